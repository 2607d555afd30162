"""FeatureTable: histories, negative samples, padding."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.table import FeatureTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BIG = 2**40


def make(spark: SparkSession, rows: list[tuple[Any, ...]], schema: str) -> FeatureTable:
    return FeatureTable(spark.createDataFrame(rows, schema).coalesce(1))


@pytest.fixture(scope="module")
def events(spark: SparkSession) -> FeatureTable:
    rows = [
        ("u", BIG + 4, 4),
        ("u", BIG + 1, 1),
        ("u", BIG + 3, 3),
        ("v", 9, 1),
        ("u", BIG + 2, 2),
        ("v", None, 2),
        ("v", 8, 3),
    ]
    return make(spark, rows, "user string, item long, time int")


def histories(table: FeatureTable) -> dict[tuple[str, int], list[Any]]:
    return {(row["user"], row["time"]): row["item_hist_seq"] for row in table.collect()}


def test_histories_hold_64_bit_ids_and_unknown_items(events: FeatureTable) -> None:
    made = events.add_hist_seq("item", "user")
    assert made.columns == ["user", "item", "time", "item_hist_seq"]
    assert histories(made) == {
        ("u", 2): [BIG + 1],
        ("u", 3): [BIG + 1, BIG + 2],
        ("u", 4): [BIG + 1, BIG + 2, BIG + 3],
        ("v", 2): [9],
        ("v", 3): [9, None],
    }


def test_history_lengths_and_number(events: FeatureTable) -> None:
    assert histories(events.add_hist_seq(["item"], "user", max_len=2, min_len=2)) == {
        ("u", 3): [BIG + 1, BIG + 2],
        ("u", 4): [BIG + 2, BIG + 3],
        ("v", 3): [9, None],
    }
    assert set(histories(events.add_hist_seq("item", "user", num_seqs=1))) == {("u", 4), ("v", 3)}
    with pytest.raises(DataError, match="min_len=3, max_len=2"):
        events.add_hist_seq("item", "user", min_len=3, max_len=2)


def test_events_of_one_moment_have_one_order(spark: SparkSession) -> None:
    rows = [("u", item, 1) for item in (5, 3, 4, 1, 2)]
    first = make(spark, rows, "user string, item long, time int").add_hist_seq("item", "user")
    second = (
        make(spark, rows[::-1], "user string, item long, time int")
        .repartition(2)
        .add_hist_seq("item", "user")
    )
    expected = {5: [1, 2, 3, 4], 4: [1, 2, 3], 3: [1, 2], 2: [1]}
    for table in (first, second):
        assert {row["item"]: row["item_hist_seq"] for row in table.collect()} == expected


def test_negative_samples_are_seeded_64_bit_and_never_the_item(spark: SparkSession) -> None:
    size = BIG + 5
    table = make(spark, [(item, "x") for item in (1, BIG + 4, 7, 2 * BIG)], "item long, s string")
    sampled = table.add_negative_samples(size, neg_num=3, seed=5)
    assert sampled.dtypes == [("item", "bigint"), ("s", "string"), ("label", "int")]
    rows = sampled.collect()
    assert [row["label"] for row in rows] == [1, 0, 0, 0] * 4
    for start in range(0, 16, 4):
        positive, *negatives = (row["item"] for row in rows[start : start + 4])
        assert positive not in negatives
        assert all(1 <= item < size for item in negatives)
    again = table.repartition(2).add_negative_samples(size, neg_num=3, seed=5)
    assert Counter(map(tuple, again.collect())) == Counter(map(tuple, rows))
    assert Counter(map(tuple, table.add_negative_samples(size, neg_num=3, seed=6).collect())) != Counter(
        map(tuple, rows)
    )


def test_negative_samples_are_even(spark: SparkSession) -> None:
    table = FeatureTable(spark.range(4000).selectExpr("2L AS item", "id"))
    drawn = Counter(
        row["item"] for row in table.add_negative_samples(5, seed=1).collect() if row["label"] == 0
    )
    assert set(drawn) == {1, 3, 4}
    assert all(1200 < count < 1470 for count in drawn.values())  # 1333 expected, 5 standard deviations
    with pytest.raises(DataError, match="item_size=2"):
        table.add_negative_samples(2)


def test_negative_histories(spark: SparkSession) -> None:
    table = make(spark, [([BIG, 1, 2],), ([],), (None,)], "h array<long>")
    made = table.add_neg_hist_seq(BIG + 1, "h", 2, seed=3)
    assert made.dtypes[1] == ("neg_h", "array<array<bigint>>")
    first, empty, null = made.to_list("neg_h")
    assert [len(negatives) for negatives in first] == [2, 2, 2]
    for item, negatives in zip([BIG, 1, 2], first, strict=True):
        assert item not in negatives
        assert all(1 <= negative <= BIG for negative in negatives)
    assert (empty, null) == ([], None)
    assert made.to_list("neg_h") == table.add_neg_hist_seq(BIG + 1, "h", 2, seed=3).to_list("neg_h")


def test_pad_takes_empty_null_and_float_lists(spark: SparkSession) -> None:
    table = make(
        spark,
        [([1, 2, 3], [0.5], ["a"], [[1, 2], [3, 4]]), ([], [], [], []), (None, None, None, None)],
        "i array<long>, f array<float>, s array<string>, n array<array<int>>",
    )
    padded = table.pad(["i", "f", "n"], seq_len=2, mask_cols=["i"]).pad("s", 2, mask_token="-").to_dict()
    assert padded["i"] == [[2, 3], [0, 0], [0, 0]]
    assert padded["f"] == [[0.5, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert padded["s"] == [["a", "-"], ["-", "-"], ["-", "-"]]
    assert padded["n"] == [[[1, 2], [3, 4]], [[], []], [[], []]]
    assert padded["i_mask"] == [[1, 1], [0, 0], [0, 0]]
    assert table.pad("n", 3).to_list("n")[0] == [[1, 2], [3, 4], [0, 0]]
    with pytest.raises(DataError, match="must hold lists"):
        make(spark, [(1,)], "i int").pad("i")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lists=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), min_size=1, max_size=6),
    length=st.integers(1, 5),
)
def test_padding_has_one_length_and_keeps_the_last(
    spark: SparkSession, lists: list[list[int]], length: int
) -> None:
    padded = make(spark, [(values,) for values in lists], "x array<long>").pad("x", length, mask_token=-1)
    assert padded.to_list("x") == [(values[-length:] + [-1] * length)[:length] for values in lists]


def test_sample_listwise(spark: SparkSession) -> None:
    table = make(spark, [([1, 2, 3, 4], ["1", "2", "3", "4"]), ([1], ["1"])], "i array<int>, s array<string>")
    sampled = table.sample_listwise(["i", "s"], num_sampled_list=5, num_sampled_item=2, random_seed=1)
    rows = sampled.collect()
    assert len(rows) == 5
    for row in rows:
        assert len(set(row["i"])) == 2
        assert [str(value) for value in row["i"]] == row["s"]
    assert len({tuple(row["i"]) for row in rows}) > 1
    kept = table.sample_listwise("i", 1, 1, random_seed=1, replace=False)
    assert kept.columns == ["i", "s", "sampled_i"]
    assert kept.size() == 2
