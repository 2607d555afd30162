"""Specs inferred from schemas, and any DataFrame prepared by a spec: bad values have defined outcomes."""

from __future__ import annotations

import datetime
import logging
import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import farmhash
import numpy as np
import pyarrow as pa
import pytest

from deeprec_spark.features.arrow import DataError, prepare_batch
from deeprec_spark.features.infer import infer_spec
from deeprec_spark.features.prepare import EmptyDataError, LabelError, PrepareReport, prepare_dataframe
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def expected_hash(text: str) -> int:
    return int(np.uint64(farmhash.fingerprint64(text)).astype(np.int64))


SCHEMA = (
    "id long, small tinyint, flag boolean, city string, price float, cost decimal(10,2), "
    "items array<int>, tags array<string>, vector array<double>, clicked int"
)
ROWS: list[tuple[Any, ...]] = [
    (2**40, 1, True, "rome", 1.5, Decimal("2.25"), [1, None, 3], ["a", None], [1.0, math.inf], 1),
    (None, None, None, None, None, None, None, None, None, 0),
    (-1, -5, False, "", math.nan, Decimal("-1.00"), [], ["b"], [None, 3.0], 0),
]


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(ROWS, SCHEMA).coalesce(1)


def test_kinds_follow_the_column_types(frame: DataFrame) -> None:
    spec = infer_spec(frame, frame.columns[:-1], ["clicked"], max_length={"items": 7})
    assert {feature.name: (feature.kind.value, feature.raw_type) for feature in spec.features} == {
        "id": ("categorical", "int64"),
        "small": ("categorical", "int64"),
        "flag": ("categorical", "int64"),
        "city": ("categorical", "string"),
        "price": ("dense", "float32"),
        "cost": ("dense", "float32"),
        "items": ("sequence", "int64"),
        "tags": ("sequence", "string"),
        "vector": ("dense", "float32"),
    }
    by_name = {feature.name: feature for feature in spec.features}
    assert (by_name["items"].max_length, by_name["tags"].max_length) == (7, 50)
    assert by_name["vector"].width == 2
    assert spec.labels == (Label(name="clicked"),)


def test_bad_values_take_defaults_and_are_counted(frame: DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    spec = infer_spec(frame, frame.columns[:-1], ["clicked"])
    report = PrepareReport()
    with caplog.at_level(logging.INFO):
        prepared = prepare_dataframe(frame, spec, report=report)
    assert [row.asDict() for row in prepared.collect()] == [
        {
            "id": 2**40,
            "small": 1,
            "flag": 1,
            "city": expected_hash("rome"),
            "price": 1.5,
            "cost": 2.25,
            "items": [1, 3],
            "tags": [expected_hash("a")],
            "vector": [1.0, 0.0],
            "clicked": 1.0,
        },
        {
            "id": -1,
            "small": -1,
            "flag": -1,
            "city": expected_hash(""),
            "price": 0.0,
            "cost": 0.0,
            "items": [],
            "tags": [],
            "vector": [0.0, 0.0],
            "clicked": 0.0,
        },
        {
            "id": -1,
            "small": -5,
            "flag": 0,
            "city": expected_hash(""),
            "price": 0.0,
            "cost": -1.0,
            "items": [],
            "tags": [expected_hash("b")],
            "vector": [0.0, 3.0],
            "clicked": 0.0,
        },
    ]
    assert (report.rows, report.nulls["id"]) == (3, 1)
    assert report.not_finite == {"price": 1, "vector": 2}
    assert report.null_elements == {"items": 1, "tags": 1}
    assert "'city': 1 of 3 values were null" in caplog.text
    assert "'price': 1 numbers were NaN or infinite" in caplog.text


def test_defaults_and_transforms_of_the_spec(spark: SparkSession) -> None:
    spec = FeatureSpec(
        features=(
            Feature(name="n", kind=FeatureKind.DENSE, raw_type="float32", default=3.0, transform="log1p"),
            Feature(name="c", kind=FeatureKind.CATEGORICAL, raw_type="string", default="none"),
            Feature(name="i", kind=FeatureKind.CATEGORICAL, raw_type="int64", default=7),
            Feature(name="s", kind=FeatureKind.SEQUENCE, raw_type="int64", max_length=2),
        )
    )
    df = spark.createDataFrame(
        [(None, None, None, [1, 2, 3]), (-2.0, "x", 8, [4])], "n double, c string, i int, s array<long>"
    ).coalesce(1)
    first, second = prepare_dataframe(df, spec, labels=False, check=False).collect()
    assert first["n"] == pytest.approx(math.log(4.0))
    assert (first["c"], first["i"], first["s"]) == (expected_hash("none"), 7, [2, 3])
    assert (second["n"], second["i"], second["s"]) == (0.0, 8, [4])


def test_spark_and_serving_prepare_alike(frame: DataFrame) -> None:
    spec = infer_spec(frame, frame.columns[:-1], ["clicked"])
    served = prepare_batch(
        pa.RecordBatch.from_pylist(
            [dict(zip(frame.columns, row, strict=True)) for row in ROWS],
            schema=pa.schema(
                {
                    "id": pa.int64(),
                    "small": pa.int8(),
                    "flag": pa.bool_(),
                    "city": pa.string(),
                    "price": pa.float32(),
                    "cost": pa.decimal128(10, 2),
                    "items": pa.list_(pa.int32()),
                    "tags": pa.list_(pa.string()),
                    "vector": pa.list_(pa.float64()),
                    "clicked": pa.int32(),
                }
            ),
        ),
        spec,
    )
    assert served.to_pylist() == [row.asDict() for row in prepare_dataframe(frame, spec).collect()]


def test_prepared_columns_are_not_prepared_again(
    frame: DataFrame, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = infer_spec(frame, ["city", "price"], ["clicked"])
    path = str(tmp_path_factory.mktemp("prepared") / "data")
    prepare_dataframe(frame, spec).write.parquet(path)
    once = frame.sparkSession.read.parquet(path)
    assert prepare_dataframe(once, spec).collect() == once.collect()


def test_columns_to_keep_and_rows_to_drop(frame: DataFrame) -> None:
    spec = infer_spec(frame, ["id"])
    df = frame.withColumn("bad", frame.id.isNull())
    kept = prepare_dataframe(df, spec, keep=["city"], drop="bad")
    assert [tuple(row) for row in kept.collect()] == [(2**40, "rome"), (-1, "")]


def test_an_all_null_column_takes_its_default_with_a_warning(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    df = spark.createDataFrame([(None, 1.0), (None, 0.0)], "c string, y double")
    prepared = prepare_dataframe(df, infer_spec(df, ["c"], ["y"]))
    assert {row["c"] for row in prepared.collect()} == {expected_hash("")}
    assert "Column 'c' is null in all 2 rows" in caplog.text
    void = spark.sql("SELECT NULL AS c, 1 AS y")
    spec = FeatureSpec(features=(Feature(name="c", kind=FeatureKind.CATEGORICAL, raw_type="int64"),))
    assert [row["c"] for row in prepare_dataframe(void, spec).collect()] == [-1]


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("binary", [0.0, 2.0]),
        ("binary", [-1.0, 1.0]),
        ("binary", [None, 1.0]),
        ("binary", [math.nan, 1.0]),
        ("regression", [math.inf, 1.0]),
        ("multiclass", [0.5, 1.0]),
        ("multiclass", [-1.0, 1.0]),
    ],
)
def test_labels_out_of_range(spark: SparkSession, kind: Any, bad: list[float | None]) -> None:
    df = spark.createDataFrame([(1, value) for value in bad], "x int, y double")
    with pytest.raises(LabelError, match=r"Label 'y'.*Received: 1 bad of 2 rows"):
        prepare_dataframe(df, infer_spec(df, ["x"], ["y"], label_kind=kind))


def test_labels_in_range(spark: SparkSession) -> None:
    df = spark.createDataFrame([(1, 0), (1, 3)], "x int, y int")
    regression = prepare_dataframe(df, infer_spec(df, ["x"], ["y"], label_kind="regression"))
    assert regression.dtypes[1] == ("y", "float")
    classes = prepare_dataframe(df, infer_spec(df, ["x"], ["y"], label_kind="multiclass"))
    assert (classes.dtypes[1], [row["y"] for row in classes.collect()]) == (("y", "bigint"), [0, 3])


def test_errors_name_the_column_and_the_remedy(spark: SparkSession, frame: DataFrame) -> None:
    with pytest.raises(EmptyDataError, match="no rows"):
        prepare_dataframe(frame.limit(0), infer_spec(frame, ["id"]))
    with pytest.raises(DataError, match=r"no column \['nope'\].*feature_cols"):
        infer_spec(frame, ["nope"])
    with pytest.raises(DataError, match="at least one column"):
        infer_spec(frame, [])
    with pytest.raises(DataError, match=r"Label 'city' must be a number.*type string"):
        infer_spec(frame, ["id"], ["city"])
    times = spark.createDataFrame(
        [(datetime.datetime(2020, 1, 1), {"a": 1})], "t timestamp, m map<string,int>"
    )
    with pytest.raises(DataError, match=r"'t'.*unix_timestamp.*type timestamp"):
        infer_spec(times, ["t"])
    with pytest.raises(DataError, match=r"'m'.*type map<string,int>"):
        infer_spec(times, ["m"])
    spec = infer_spec(frame, ["price"])
    text = spark.createDataFrame([("x",)], "price string")
    with pytest.raises(DataError, match=r"'price' is dense and must hold float32.*type string"):
        prepare_dataframe(text, spec)
    wide = frame.selectExpr("array(1.0D, 2.0D, 3.0D) AS vector")
    with pytest.raises(DataError, match=r"'vector' must have width 2.*3 of 3 rows"):
        prepare_dataframe(wide, infer_spec(frame, ["vector"]))
    with pytest.raises(DataError, match="width of dense vector column 'vector'"):
        infer_spec(frame.where("vector IS NULL"), ["vector"])
