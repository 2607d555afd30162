"""FeatureTable: vocabularies, hashes, crosses and one-hot columns."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import farmhash
import numpy as np
import pytest

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.string_index import StringIndex
from deeprec_spark.features.table import FeatureTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def make(spark: SparkSession, rows: list[tuple[Any, ...]], schema: str) -> FeatureTable:
    return FeatureTable(spark.createDataFrame(rows, schema).coalesce(1))


def expected_hash(text: str) -> int:
    return int(np.uint64(farmhash.fingerprint64(text)).astype(np.int64))


@pytest.fixture(scope="module")
def cities(spark: SparkSession) -> FeatureTable:
    return make(
        spark,
        [(1, "rome", 5), (2, "oslo", 5), (3, None, 6), (4, "rome", None), (5, "bern", 5)],
        "row int, city string, n int",
    )


def test_string_index_has_equal_ids_for_equal_data(cities: FeatureTable) -> None:
    index = cities.gen_string_idx("city")
    assert isinstance(index, StringIndex)
    assert index.to_dict() == {"bern": 1, "oslo": 2, "rome": 3}
    assert cities.repartition(3).gen_string_idx("city").to_dict() == index.to_dict()
    assert cities.gen_string_idx("city", order_by_freq=True).to_dict() == {"rome": 1, "bern": 2, "oslo": 3}
    assert cities.gen_string_idx("city", freq_limit=2).to_dict() == {"rome": 1}
    by_column = cities.gen_string_idx(["city", "n"], freq_limit={"n": 2})
    assert [one.to_dict() for one in by_column] == [index.to_dict(), {5: 1}]


def test_one_vocabulary_of_two_columns(spark: SparkSession) -> None:
    table = make(spark, [("a", "b"), ("c", "a")], "x string, y string")
    index = table.gen_string_idx({"src_cols": ["x", "y"], "col_name": "user"})
    assert index.col_name == "user"
    assert index.to_dict() == {"a": 1, "b": 2, "c": 3}


def test_encode_string_keeps_the_columns_place_and_gives_null_to_the_unknown(cities: FeatureTable) -> None:
    encoded = cities.encode_string("city", {"rome": 7, "oslo": 8})
    assert encoded.columns == ["row", "city", "n"]
    assert encoded.sort("row").to_list("city") == [7, 8, None, 7, None]
    both, indices = cities.category_encode(["city", "n"], broadcast=False)
    assert both.sort("row").to_dict() == {
        "row": [1, 2, 3, 4, 5],
        "city": [3, 2, None, 3, 1],
        "n": [1, 1, 2, None, 1],
    }
    assert [index.col_name for index in indices] == ["city", "n"]


def test_encoding_split_values_keeps_their_order(spark: SparkSession) -> None:
    table = make(spark, [(1, "c,a,x"), (2, None), (3, "x"), (4, "b,b")], "row int, tags string")
    index = {"a": 1, "b": 2, "c": 3}
    encoded = table.encode_string("tags", index, do_split=True).sort("row")
    assert encoded.columns == ["row", "tags"]
    assert encoded.to_list("tags") == [[3, 1], None, None, [2, 2]]
    assert table.encode_string("tags", index, do_split=True, sort_for_array=True).sort("row").to_list("tags")[
        0
    ] == [1, 3]
    smallest = table.encode_string("tags", index, do_split=True, keep_most_frequent=True).sort("row")
    assert smallest.to_list("tags") == [1, None, None, 2]
    assert table.gen_string_idx("tags", do_split=True).to_dict() == {"a": 1, "b": 2, "c": 3, "x": 4}


def test_string_index_round_trip(cities: FeatureTable, tmp_path: Path) -> None:
    index = cities.gen_string_idx("city")
    index.write_parquet(str(tmp_path))
    again = StringIndex.read_parquet(str(tmp_path / "city.parquet"))
    assert again.col_name == "city"
    assert again.to_dict() == index.to_dict()
    assert again.cast("id", "long").dtypes[1] == ("id", "bigint")
    with pytest.raises(DataError, match=r"\['id'\]"):
        StringIndex(cities.df, "city")


def test_filter_by_frequency_returns_the_records(cities: FeatureTable) -> None:
    kept = cities.filter_by_frequency("city", 2)
    assert kept.columns == ["row", "city", "n"]
    assert sorted(kept.to_list("row")) == [1, 4]
    assert sorted(cities.filter_by_frequency(["n"], 3).to_list("row")) == [1, 2, 5]


@pytest.mark.parametrize("method", ["md5", "sha1", "sha256", "sha512"])
def test_hash_encode_is_what_python_computes(spark: SparkSession, method: str) -> None:
    values = ["rome", "Zürich ✓", "", None]
    table = make(
        spark, [(value, index, index > 0) for index, value in enumerate(values)], "s string, i int, b boolean"
    )

    def expected(value: Any, bins: int) -> int:
        return int(hashlib.new(method, str(value).encode()).hexdigest(), 16) % bins

    encoded = table.hash_encode(["s", "i", "b"], bins=1_000_003, method=method).to_dict()
    assert encoded["s"] == [expected(value, 1_000_003) for value in values]
    assert encoded["i"] == [expected(index, 1_000_003) for index in range(4)]
    assert encoded["b"] == [expected(index > 0, 1_000_003) for index in range(4)]
    assert table.hash_encode("s", bins=2**31 - 1, method=method).to_list("s")[0] == expected(
        "rome", 2**31 - 1
    )


def test_hash_encode_refuses_what_it_cannot(cities: FeatureTable) -> None:
    with pytest.raises(DataError, match="crc"):
        cities.hash_encode("city", 10, method="crc")
    with pytest.raises(DataError, match="bins=0"):
        cities.hash_encode("city", 0)


def test_hash_encode64_is_farmhash_and_null_is_its_default(spark: SparkSession) -> None:
    table = make(spark, [("rome", ["a", None, "é"]), (None, None)], "s string, tags array<string>")
    hashed = table.hash_encode64(["s", "tags"])
    assert hashed.dtypes == [("s", "bigint"), ("tags", "array<bigint>")]
    assert hashed.to_list("s") == [expected_hash("rome"), expected_hash("")]
    assert hashed.to_list("tags") == [[expected_hash("a"), expected_hash("é")], []]
    assert table.hash_encode64("s", "h", default="?").to_list("h")[1] == expected_hash("?")


def test_crosses(spark: SparkSession) -> None:
    table = make(spark, [("1", 23), ("12", 3), ("x", None)], "a string, b long")
    crossed = table.cross64(["a", "b"]).to_list("a_b")
    assert crossed == [expected_hash("1\x1f23"), expected_hash("12\x1f3"), None]
    as_friesian = table.cross_hash_encode(["a", "b"], 1000).to_list("a_b")
    assert as_friesian[0] == as_friesian[1] == int(hashlib.md5(b"123").hexdigest(), 16) % 1000
    apart = table.cross_columns([["a", "b"], ["b", "a"]], [1000, 10], ["c", None], sep="|")
    assert apart.columns == ["a", "b", "c", "b_a"]
    assert apart.to_list("c")[0] == int(hashlib.md5(b"1|23").hexdigest(), 16) % 1000
    with pytest.raises(DataError, match="two columns"):
        table.cross_hash_encode(["a"], 10)


def test_split_and_vocabularies(spark: SparkSession) -> None:
    table = make(spark, [("a|b||",), (None,), ("a",)], "g string")
    assert table.split_column("g", "|").to_list("g") == [["a", "b"], [], ["a"]]
    assert sorted(table.dropna("g").get_vocabularies("g")["g"]) == ["a", "a|b||"]


def test_one_hot(spark: SparkSession) -> None:
    table = make(spark, [(7, 1, "x"), (8, 0, "y"), (9, None, "z")], "row int, c int, s string")
    assert table.one_hot_encode("c").to_dict() == {
        "row": [7, 8, 9],
        "c_0": [0, 1, 0],
        "c_1": [1, 0, 0],
        "s": ["x", "y", "z"],
    }
    kept = table.one_hot_encode("c", sizes=1, prefix="k", keep_original_columns=True)
    assert kept.columns == ["row", "c", "k_0", "s"]
