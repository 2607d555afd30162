"""The Spark columns equal the functions that serving calls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from deeprec_spark.udfs import functions, register_udfs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TEXTS = ["rome", None, "", "Zürich ✓"]
LONGS = [2**62 + 1, None, -1, 0]
DOUBLES = [1.9, None, -3.0, math.nan]
LISTS = [["a", None], None, [], ["b"]]


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    rows = list(zip(TEXTS, LONGS, DOUBLES, LISTS, ["a|b", None, "", "c|"], strict=True))
    return spark.createDataFrame(rows, "t string, i long, d double, l array<string>, g string").coalesce(1)


def test_columns_equal_functions(frame: DataFrame) -> None:
    from deeprec_spark.udfs import columns

    rows = frame.select(
        columns.fingerprint64("t").alias("t"),
        columns.fingerprint64("i").alias("i"),
        columns.fingerprint64_lists("l").alias("l"),
        columns.cross64("t", "i").alias("c"),
        columns.bucketize("d", [-3.0, 0.0, 1.9]).alias("b"),
        columns.log1p("d").alias("log"),
        columns.split("g", "|").alias("g"),
    ).collect()
    longs = pa.array(LONGS, pa.int64())
    expected = {
        "t": functions.fingerprint64(TEXTS),
        "i": functions.fingerprint64(longs),
        "l": functions.fingerprint64_lists(pa.array(LISTS, pa.list_(pa.string()))),
        "c": functions.cross64(TEXTS, longs),
        "b": functions.bucketize(DOUBLES, [-3.0, 0.0, 1.9]),
        "log": functions.log1p(DOUBLES),
        "g": functions.split(["a|b", None, "", "c|"], "|"),
    }
    assert {name: [row[name] for row in rows] for name in expected} == {
        name: values.to_pylist() for name, values in expected.items()
    }


def test_registered_functions_in_sql(spark: SparkSession, frame: DataFrame) -> None:
    assert register_udfs(spark) == ["fingerprint64", "cross64", "bucketize", "log1p_clipped"]
    frame.createOrReplaceTempView("udf_input")
    rows = spark.sql(
        "SELECT fingerprint64(t) AS t, cross64(t, cast(i AS string)) AS c, "
        "bucketize(d, array(0D, 1.9D)) AS b, log1p_clipped(d) AS log FROM udf_input"
    ).collect()
    assert [row["t"] for row in rows] == functions.fingerprint64(TEXTS).to_pylist()
    assert [row["c"] for row in rows] == functions.cross64(TEXTS, pa.array(LONGS, pa.int64())).to_pylist()
    assert [row["b"] for row in rows] == functions.bucketize(DOUBLES, [0.0, 1.9]).to_pylist()
    assert [row["log"] for row in rows] == functions.log1p(DOUBLES).to_pylist()


@pytest.mark.parametrize(
    ("boundaries", "error"),
    [
        ("cast(NULL AS array<double>)", "boundaries=NULL"),
        ("cast(array() AS array<double>)", r"ascending numbers, at least one. Received: \[\]"),
        ("array(2D, 1D)", r"ascending.*Received: \[2.0, 1.0\]"),
        ("array(1D, 1D)", "ascending"),
        ("array(1D, cast(NULL AS double))", "ascending"),
        ("IF(d > 0, array(1D), array(3D, 2D))", "ascending"),
    ],
)
def test_boundaries_in_sql_must_ascend(
    spark: SparkSession, frame: DataFrame, boundaries: str, error: str
) -> None:
    register_udfs(spark)
    frame.createOrReplaceTempView("udf_input")
    with pytest.raises(Exception, match=error):
        spark.sql(f"SELECT bucketize(d, {boundaries}) FROM udf_input").collect()


def test_boundaries_in_sql_may_differ_by_row(spark: SparkSession) -> None:
    register_udfs(spark)
    rows = spark.sql(
        "SELECT bucketize(d, IF(d > 4, array(1D, 5D, 9D), array(2D))) AS b "
        "FROM VALUES (1D), (2D), (5D), (9.5D), (cast(NULL AS double)) AS t(d)"
    ).collect()
    assert [row["b"] for row in rows] == [0, 1, 2, 3, None]


def test_numbers_in_a_cross_are_refused_since_spark_makes_floats_of_them(
    spark: SparkSession, frame: DataFrame
) -> None:
    register_udfs(spark)
    frame.createOrReplaceTempView("udf_input")
    with pytest.raises(Exception, match=r"cast\(column AS string\)"):
        spark.sql("SELECT cross64(t, i) FROM udf_input").collect()
