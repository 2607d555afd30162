"""Orca's room: XShards to DataFrames and back, and what is left of it without BigDL."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from deeprec_spark import orca

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Shards:
    """What a SparkXShards is to the conversion: an RDD of shards."""

    def __init__(self, spark: SparkSession, shards: list[Any]) -> None:
        self.rdd = spark.sparkContext.parallelize(shards, max(1, len(shards)))


def to_rows(spark: SparkSession, shards: list[Any], *names: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in orca.xshards_to_dataframe(spark, Shards(spark, shards), *names).collect()]


def test_shards_of_dicts_by_name(spark: SparkSession) -> None:
    shard = {
        "x": {"a": np.array([2**40, 2]), "b": np.array([[1.0, 2.0], [3.0, 4.0]])},
        "y": {"l": np.array([0, 1])},
    }
    df = orca.xshards_to_dataframe(spark, Shards(spark, [shard, shard]))
    assert df.dtypes == [("a", "bigint"), ("b", "array<double>"), ("l", "bigint")]
    assert [tuple(row) for row in df.collect()] == [(2**40, [1.0, 2.0], 0), (2, [3.0, 4.0], 1)] * 2


def test_shards_of_arrays_take_their_names_from_the_columns(spark: SparkSession) -> None:
    a, b, y = np.array([1, 2]), np.array(["p", "q"]), np.array([[0.0], [1.0]])
    assert to_rows(spark, [{"x": (a, b), "y": y}], ["a", "b"], ["y"]) == [(1, "p", 0.0), (2, "q", 1.0)]
    assert to_rows(spark, [{"x": np.array([[1, 2], [3, 4]])}], ["a", "b"]) == [(1, 2), (3, 4)]
    assert to_rows(spark, [{"x": np.array([[1, 2], [3, 4]])}], ["a"]) == [([1, 2],), ([3, 4],)]


def test_shards_of_pandas(spark: SparkSession) -> None:
    shard = pd.DataFrame({"a": [1, 2], "b": ["p", None], "z": [0.5, 0.25]})
    assert to_rows(spark, [shard, shard[:0]], ["a"], ["z"]) == [(1, 0.5), (2, 0.25)]
    assert to_rows(spark, [shard]) == [(1, "p", 0.5), (2, None, 0.25)]


def test_large_shards_travel_in_parts(spark: SparkSession) -> None:
    size = 150_000
    shard = {"x": {"a": np.arange(size)}}
    df = orca.xshards_to_dataframe(spark, Shards(spark, [shard]))
    assert df.selectExpr("count(*)", "sum(a)", "max(a)").first() == (size, size * (size - 1) // 2, size - 1)


@pytest.mark.parametrize(
    ("shard", "names", "message"),
    [
        ([1, 2], (), "pandas DataFrames, or dicts with 'x'"),
        ({"z": 1}, (), r"dict with keys \['z'\]"),
        ({"x": np.arange(3)}, (["a", "b"],), "feature_cols must name the arrays of 'x'.*1 arrays"),
        ({"x": {"a": np.arange(3)}}, (["nope"],), r"lacks \['nope'\]: check feature_cols"),
        ({"x": {"a": np.zeros((2, 2, 2))}}, (), r"one or two axes. Received: shape \(2, 2, 2\)"),
    ],
)
def test_other_shards_are_errors(
    spark: SparkSession, shard: Any, names: tuple[list[str], ...], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        to_rows(spark, [shard], *names)
    with pytest.raises(orca.OrcaError, match="hold no rows"):
        to_rows(spark, [])


def test_without_bigdl_nothing_is_orcas(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bigdl", "bigdl.orca"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(orca, "installed", lambda: False)
    assert orca.estimator_base() is object
    assert not orca.is_xshards(object())
    with pytest.raises(orca.OrcaError, match=r"bigdl\.orca cannot be imported"):
        orca.import_bigdl("bigdl.orca")


@pytest.mark.skipif(not orca.installed(), reason="BigDL is not installed")
def test_real_xshards_there_and_back(spark: SparkSession) -> None:
    orca.attach(spark)
    orca.attach(spark)
    data = orca.import_bigdl("bigdl.orca.data")
    shards = data.XShards.partition(
        {"x": {"a": np.arange(6), "b": np.ones((6, 2))}, "y": {"l": np.arange(6) % 2}}
    )
    assert orca.is_xshards(shards)
    df = orca.xshards_to_dataframe(spark, shards)
    back = orca.dataframe_to_xshards(df, ["a", "b"], ["l"])
    assert orca.is_xshards(back)
    found = back.collect()
    assert np.concatenate([shard["x"]["a"] for shard in found]).tolist() == list(range(6))
    assert all(shard["x"]["b"].shape[1] == 2 for shard in found)
    assert np.concatenate([shard["y"]["l"] for shard in found]).tolist() == [0, 1] * 3
    assert orca.estimator_base().__name__ == "SparkTFEstimator"
