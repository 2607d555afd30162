"""FeatureTable: scales, bins, differences, target encoding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.table import FeatureTable, TargetCode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def make(spark: SparkSession, rows: list[tuple[Any, ...]], schema: str) -> FeatureTable:
    return FeatureTable(spark.createDataFrame(rows, schema).coalesce(1))


def test_min_max_scale_of_scalars_arrays_and_constants(spark: SparkSession) -> None:
    table = make(
        spark,
        [(1, 5.0, [0.0, 10.0]), (3, 5.0, [4.0, 10.0]), (None, None, [2.0, 10.0])],
        "i int, c double, a array<double>",
    )
    scaled, bounds = table.min_max_scale(["i", "c", "a"], min=-1.0, max=1.0)
    assert bounds == {"i": (1.0, 3.0), "c": (5.0, 5.0), "a": ([0.0, 10.0], [4.0, 10.0])}
    assert scaled.to_dict() == {
        "i": [-1.0, 1.0, None],
        "c": [0.0, 0.0, None],
        "a": [[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]],
    }
    other = make(spark, [(5, 5.0, [8.0, 10.0])], "i int, c double, a array<double>")
    assert other.transform_min_max_scale(["i", "a"], bounds).to_dict() == {
        "i": [2.0],
        "c": [5.0],
        "a": [[2.0, 0.5]],
    }
    with pytest.raises(DataError, match="only nulls"):
        make(spark, [(None,)], "d double").min_max_scale("d")


def test_min_max_scale_of_vectors(spark: SparkSession) -> None:
    from pyspark.ml.functions import array_to_vector

    arrays = make(spark, [([0.0, 2.0],), ([4.0, 6.0],)], "v array<double>")
    vectors = FeatureTable(arrays.df.select(array_to_vector("v").alias("v")))
    scaled, bounds = vectors.min_max_scale("v")
    assert bounds == {"v": ([0.0, 2.0], [4.0, 6.0])}
    assert [list(vector.toArray()) for vector in scaled.to_list("v")] == [[0.0, 0.0], [1.0, 1.0]]


def test_cut_bins(spark: SparkSession) -> None:
    table = make(spark, [(-1.0,), (0.0,), (5.9,), (6.0,), (math.nan,), (None,)], "x double")
    assert table.cut_bins("x", [0, 6]).to_dict() == {"x_bin": [0, 1, 1, 2, 3, None]}
    labelled = table.cut_bins("x", {"x": [0, 6]}, labels=["low", "mid", "high"], out_cols="x")
    assert labelled.to_list("x") == ["low", "mid", "mid", "high", None, None]
    even = table.dropna("x").filter("x < 7").cut_bins("x", 2, drop=False)
    assert even.to_list("x_bin") == [1, 1, 2, 3]
    with pytest.raises(DataError, match="2 labels, 2 edges"):
        table.cut_bins("x", [0, 6], labels=["a", "b"])


def test_difference_lag(spark: SparkSession) -> None:
    table = make(spark, [("a", 2, 7), ("a", 1, 5), ("b", 1, 9), ("a", 3, 4)], "k string, t int, v int")
    made = table.difference_lag("v", "t", shifts=[1, 2], partition_cols="k").sort("k", "t")
    assert made.columns[3:] == ["t_diff_lag_v_1", "t_diff_lag_v_2"]
    assert made.to_list("t_diff_lag_v_1") == [None, 2, -3, None]
    assert made.to_list("t_diff_lag_v_2") == [None, None, -1, None]
    assert table.difference_lag("v", "t", partition_cols="k", out_cols="d").columns[-1] == "d"
    with pytest.raises(DataError, match="1 times 2"):
        table.difference_lag("v", "t", shifts=[1, 2], out_cols="d")


@pytest.fixture(scope="module")
def clicks(spark: SparkSession) -> FeatureTable:
    rows = [("a", 1, 0), ("a", 0, 1), ("a", 1, 1), ("b", 1, 0), (None, 0, 0)]
    return make(spark, rows, "cat string, click int, fold int")


def test_target_encoding_leaves_out_the_own_fold(clicks: FeatureTable) -> None:
    encoded, codes = clicks.target_encode("cat", "click", smooth=2, kfold=2, fold_col="fold", drop_fold=False)
    mean = 3 / 5
    # "a", fold 0: the other fold has 0 + 1 of 2 rows; fold 1: 1 of 1 row; "b" and null: nothing outside the fold.
    expected = [(1 + 2 * mean) / 4, (1 + 2 * mean) / 3, (1 + 2 * mean) / 3, mean, mean]
    by_row = {(row["cat"], row["click"], row["fold"]): row["cat_te_click"] for row in encoded.collect()}
    keys = [("a", 1, 0), ("a", 0, 1), ("a", 1, 1), ("b", 1, 0), (None, 0, 0)]
    assert [by_row[key] for key in keys] == pytest.approx(expected)
    whole = {row["cat"]: row["cat_te_click"] for row in codes[0].collect()}
    assert whole["a"] == pytest.approx((2 + 2 * mean) / 5)
    assert codes[0].out_target_mean == {"cat_te_click": ("click", pytest.approx(mean))}


def test_target_code_can_be_read_back_and_encodes_other_tables(
    clicks: FeatureTable, spark: SparkSession, tmp_path: Path
) -> None:
    _, (code,) = clicks.target_encode("cat", "click", smooth=0, kfold=1)
    code.write_parquet(str(tmp_path / "code"))
    again = TargetCode.read_parquet(str(tmp_path / "code"))
    assert (again.cat_col, again.out_target_mean) == (code.cat_col, code.out_target_mean)
    other = make(spark, [("a",), ("z",), (None,)], "cat string")
    encoded = other.encode_target(again, drop_cat=False).to_dict()
    assert encoded == {"cat": ["a", "z", None], "cat_te_click": pytest.approx([2 / 3, 0.6, 0.6])}
    renamed = again.rename({"cat": "c", "cat_te_click": "te"})
    assert (renamed.cat_col, list(renamed.out_target_mean)) == ("c", ["te"])
    clicks.write_parquet(str(tmp_path / "plain"))
    with pytest.raises(DataError, match=r"TargetCode\.write_parquet"):
        TargetCode.read_parquet(str(tmp_path / "plain"))


def test_target_encoding_of_groups_and_several_targets(spark: SparkSession) -> None:
    table = make(
        spark,
        [("a", 1, 1.0, 0.0), ("a", 1, 0.0, 4.0), ("a", 2, 1.0, 2.0)],
        "c string, d int, x double, y double",
    )
    encoded, codes = table.target_encode([["c", "d"], "c"], ["x", "y"], kfold=1, smooth=0, drop_cat=True)
    assert encoded.columns == ["x", "y", "c_d_te_x", "c_d_te_y", "c_te_x", "c_te_y"]
    assert encoded.sort("y").to_list("c_d_te_y") == [2.0, 2.0, 2.0]
    assert encoded.to_list("c_te_x") == pytest.approx([2 / 3] * 3)
    assert [code.cat_col for code in codes] == [["c", "d"], "c"]
    only = table.encode_target(codes, target_cols="y")
    assert only.columns == ["x", "y", "c_d_te_y", "c_te_y"]
    with pytest.raises(DataError, match="kfold=0"):
        table.target_encode("c", "x", kfold=0)
