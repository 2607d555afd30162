"""FeatureTable: the base operators, with Friesian 2.4.0's faults as tests of the right values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.base_table import Table
from deeprec_spark.features.table import FeatureTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def make(spark: SparkSession, rows: list[tuple[Any, ...]], schema: str) -> FeatureTable:
    return FeatureTable(spark.createDataFrame(rows, schema).coalesce(1))


def rows(table: Table) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in table.collect()]


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> FeatureTable:
    return make(
        spark,
        [(1, 10, 1.9, 0.5, "a"), (None, None, None, None, None), (-3, 2**40, -2.0, -1.0, "b")],
        "i int, l long, d double, f float, s string",
    )


def test_log_of_doubles_is_not_that_of_their_integer_part(numbers: FeatureTable) -> None:
    logged = numbers.log(["d", "f", "i"]).to_dict()
    assert logged["d"] == pytest.approx([math.log(2.9), None, 0.0])
    assert logged["f"][0] == pytest.approx(math.log(1.5), rel=1e-6)
    assert logged["i"] == pytest.approx([math.log(2), None, 0.0])
    assert numbers.log("d", clipping=False).to_list("d") == pytest.approx([math.log(1.9), None, None])


def test_float32_is_filled_clipped_and_medianed(numbers: FeatureTable) -> None:
    assert numbers.fillna(0.25, "f").to_list("f") == [0.5, 0.25, -1.0]
    assert numbers.clip("f", min=0).to_list("f") == [0.5, None, 0.0]
    filled = make(numbers.df.sparkSession, [(1.0,), (None,), (3.0,), (2.0,)], "f float").fill_median("f")
    assert filled.to_list("f") == [1.0, 2.0, 3.0, 2.0]
    assert filled.dtypes == [("f", "float")]


def test_fillna_keeps_types_and_places_and_goes_by_the_values_type(numbers: FeatureTable) -> None:
    assert rows(numbers.fillna(0))[1] == (0, 0, None, None, None)
    assert rows(numbers.fillna(0.5))[1] == (None, None, 0.5, 0.5, None)
    assert rows(numbers.fillna("x"))[1] == (None, None, None, None, "x")
    assert numbers.fillna(7, ["d", "l"]).dtypes == numbers.dtypes
    with pytest.raises(DataError, match=r"'i' cannot hold 0\.5.*Received: type int"):
        numbers.fillna(0.5, "i")


def test_fillna_leaves_nan(spark: SparkSession) -> None:
    filled = make(spark, [(math.nan,), (None,)], "d double").fillna(0.0)
    assert math.isnan(filled.to_list("d")[0])
    assert filled.to_list("d")[1] == 0.0


def test_clip_keeps_null_nan_and_64_bits(spark: SparkSession) -> None:
    table = make(spark, [(2**60 + 1, 5.0), (None, math.nan), (-7, -5.0)], "l long, d double")
    clipped = table.clip(["l", "d"], min=-1, max=2**60)
    assert clipped.to_list("l") == [2**60, None, -1]
    assert clipped.to_list("d")[0] == 5.0
    assert math.isnan(clipped.to_list("d")[1])
    assert clipped.dtypes == table.dtypes
    with pytest.raises(DataError, match="min or max"):
        table.clip("l")


def test_dtypes_is_a_list(numbers: FeatureTable) -> None:
    assert numbers.dtypes[:2] == [("i", "int"), ("l", "bigint")]


def test_drop_duplicates_keeps_a_column_named_id(spark: SparkSession) -> None:
    table = make(spark, [("a", 2, 20), ("a", 1, 10), ("b", 5, 50), ("a", 1, 11)], "k string, t int, id int")
    smallest = table.drop_duplicates("k", sort_cols="t")
    assert smallest.columns == ["k", "t", "id"]
    assert sorted(rows(smallest)) == [("a", 1, 10), ("b", 5, 50)]
    assert sorted(rows(table.drop_duplicates("k", sort_cols="t", keep="max"))) == [("a", 2, 20), ("b", 5, 50)]
    assert table.drop_duplicates("k").size() == 2


def test_statistics_are_exact_and_of_one_job(numbers: FeatureTable) -> None:
    assert numbers.get_stats(["i", "l"], ["min", "max", "count"]) == {"i": [-3, 1, 2], "l": [10, 2**40, 2]}
    assert numbers.get_stats("d", "sum") == {"d": pytest.approx(-0.1)}
    # Friesian gives these as float32, which does not hold 2 ** 24 + 1.
    large = make(numbers.df.sparkSession, [(2**24 + 1,)], "l long")
    assert rows(large.max()) == [("l", float(2**24 + 1))]
    assert rows(large.min("l")) == [("l", float(2**24 + 1))]
    assert rows(large.median()) == [("l", float(2**24 + 1))]
    with pytest.raises(DataError, match="stddev"):
        numbers.get_stats("i", "stddev")


def test_a_median_of_nothing_is_an_error(spark: SparkSession) -> None:
    with pytest.raises(DataError, match=r"no median.*\['d'\]"):
        make(spark, [(None,)], "d double").fill_median("d")


def test_concat_by_shared_or_all_columns(spark: SparkSession) -> None:
    left, right = make(spark, [(1, "x")], "a int, b string"), make(spark, [(2, 3.0)], "a int, c double")
    assert rows(left.concat(right)) == [(2,), (1,)]
    outer = left.concat([right], mode="outer")
    assert outer.columns == ["a", "c", "b"]
    assert rows(outer) == [(2, 3.0, None), (1, None, "x")]
    assert rows(left.concat(left, distinct=True)) == [(1, "x")]


def test_columns_by_attribute_and_unknown_ones(numbers: FeatureTable) -> None:
    assert numbers.filter(numbers.i > 0).size() == 1
    with pytest.raises(AttributeError, match=r"no column 'nope'.*\['i', 'l', 'd', 'f', 's'\]"):
        _ = numbers.nope
    with pytest.raises(DataError, match=r"no column \['nope'\]"):
        numbers.log("nope")
    with pytest.raises(DataError, match="must be numeric"):
        numbers.log("s")


def test_structure(numbers: FeatureTable, tmp_path: Path) -> None:
    assert numbers.select("i", "d").rename({"i": "j"}).columns == ["j", "d"]
    assert numbers.merge_cols(["i", "l"], "both").to_list("both")[0] == [1, 10]
    assert numbers.cast("i", "string").cast("d", "decimal(10,1)").dtypes[:3:2] == [
        ("i", "string"),
        ("d", "decimal(10,1)"),
    ]
    assert numbers.add("i", 2).to_list("i") == [3, None, -1]
    numbers.write_parquet(str(tmp_path / "t"))
    assert FeatureTable.read_parquet(str(tmp_path / "t")).size() == 3
    assert sum(part.size() for part in numbers.random_split([0.5, 0.5], seed=1)) == 3
    assert numbers.ordinal_shuffle_partition(seed=3).size() == 3


def test_apply_does_not_mix_the_types_of_its_inputs(numbers: FeatureTable) -> None:
    shown = numbers.limit(1).apply(["i", "d", "s"], "out", lambda values: repr(values))
    assert shown.to_list("out") == ["[1, 1.9, 'a']"]
    assert numbers.apply("i", "i", lambda value: None if value is None else value * 2, "int").to_list(
        "i"
    ) == [
        2,
        None,
        -6,
    ]


def test_join_and_group_by(spark: SparkSession) -> None:
    left = make(spark, [("a", 1), ("b", 2), ("a", 3)], "k string, v int")
    right = make(spark, [("a", 9)], "k string, v int")
    joined = left.join(right, on="k", how="left", rsuffix="_r")
    assert sorted(rows(joined)) == [("a", 1, 9), ("a", 3, 9), ("b", 2, None)]
    grouped = left.group_by("k", agg={"v": ["sum", "count"]})
    assert grouped.columns == ["k", "sum(v)", "count(v)"]
    assert sorted(rows(grouped)) == [("a", 4, 2), ("b", 2, 1)]
    assert sorted(rows(left.group_by("k", agg="max", join=True))) == [("a", 1, 3), ("a", 3, 3), ("b", 2, 2)]
    with pytest.raises(DataError, match="columns to join on"):
        left.group_by(agg="max", join=True)


def test_value_features_of_scalars_and_lists_with_64_bit_keys(spark: SparkSession) -> None:
    big = 2**40
    table = make(
        spark,
        [(big, [big, 7, 1], [[1], [big, 1]]), (None, None, [[]])],
        "item long, item_hist array<long>, item_neg array<array<long>>",
    )
    categories = make(spark, [(1, 11), (big, 22)], "item long, category int")
    found = table.add_value_features(["item", "item_hist", "item_neg"], categories, "item", "category")
    assert found.columns[3:] == ["category", "category_hist", "category_neg"]
    assert sorted(rows(found.select("category", "category_hist", "category_neg")), key=str) == [
        (0, None, [[]]),
        (22, [22, 0, 11], [[11], [22, 11]]),
    ]


def test_reindex_by_popularity(spark: SparkSession) -> None:
    table = make(spark, [(5,), (5,), (9,), (9,), (3,), (None,)], "item long")
    mapping = table.gen_reindex_mapping("item", freq_limit=2)
    assert sorted(rows(mapping)) == [(5, 1), (9, 2)]
    assert table.gen_reindex_mapping(["item"], freq_limit={"item": 1})[0].size() == 3
    assert sorted(table.reindex("item", mapping).to_list("item")) == [0, 0, 1, 1, 2, 2]


def test_reading_csv_json_text_and_pandas(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1|x\n2|y\n", encoding="utf-8")
    table = FeatureTable.read_csv(str(tmp_path / "a.csv"), "|", names=["n", "s"], dtype={"n": "long"})
    assert table.dtypes == [("n", "bigint"), ("s", "string")]
    with pytest.raises(DataError, match="2 columns"):
        FeatureTable.read_csv(str(tmp_path / "a.csv"), "|", names=["n"])
    (tmp_path / "a.json").write_text('{"n": 1, "s": "x"}\n', encoding="utf-8")
    assert FeatureTable.read_json(str(tmp_path / "a.json"), "s").columns == ["s"]
    assert FeatureTable.read_text(str(tmp_path / "a.csv"), "line").to_list("line") == ["1|x", "2|y"]
    assert rows(FeatureTable.from_pandas(pd.DataFrame({"n": [1, 2]}))) == [(1,), (2,)]
