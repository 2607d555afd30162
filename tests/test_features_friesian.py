"""Beside Friesian itself: where Friesian 2.4.0 is right, our FeatureTable gives the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from deeprec_spark import orca
from deeprec_spark.features.friesian import friesian_class, from_friesian, to_friesian
from deeprec_spark.features.string_index import StringIndex
from deeprec_spark.features.table import FeatureTable, TargetCode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.skipif(friesian_class("FeatureTable") is object, reason="BigDL cannot run here")

ROWS: list[tuple[Any, ...]] = [
    ("u1", 3, 30, 1.5, [1, 2, 3], "a,b", 1, 0, 100),
    ("u1", 5, None, None, [4], "b", 0, 1, 50),
    ("u2", 7, -2, 0.25, [5, 6], "c,a", 1, 1, 10),
    ("u1", 2, 40, 7.0, [7, 8, 9, 10], "a", 0, 0, 75),
    (None, 9, 0, 2.0, [1], None, 1, 1, 5),
]
SCHEMA = "user string, item int, n int, d double, h array<int>, tags string, click int, fold int, time long"

Operation = Callable[[Any], Any]
OPERATIONS: dict[str, Operation] = {
    "fillna": lambda t: t.fillna(7, ["n"]).fillna(0.5, ["d"]),
    "clip": lambda t: t.clip(["n", "d"], min=0, max=5),
    "log of integers": lambda t: t.fillna(0, ["n"]).log(["n"]),
    "fill_median": lambda t: t.fill_median(["d"]),
    "hash_encode": lambda t: t.hash_encode(["user", "item"], 1000),
    "cross_hash_encode": lambda t: t.cross_hash_encode(["user", "tags"], 100),
    "encode_string": lambda t: t.encode_string(["user"], [{"u1": 1, "u2": 2}]),
    "one_hot_encode": lambda t: t.one_hot_encode("click"),
    "min_max_scale": lambda t: t.dropna("d").min_max_scale(["d", "item"])[0].select("d", "item"),
    "cut_bins": lambda t: t.cut_bins(["n"], [0, 35]),
    "add_hist_seq": lambda t: t.dropna("user").add_hist_seq(["item"], "user", "time", max_len=2),
    "mask and pad": lambda t: t.pad(["h"], seq_len=3, mask_cols=["h"]),
    "add_value_features": lambda t: t.add_value_features(["item", "h"], _categories(t), "item", "cat"),
    "difference_lag": lambda t: t.difference_lag("item", "time", partition_cols="user"),
    "group_by": lambda t: t.group_by("user", agg={"item": ["max", "count"]}),
    "drop_duplicates": lambda t: t.drop_duplicates("user", sort_cols="time"),
    "target_encode": lambda t: t.target_encode("user", "click", fold_col="fold")[0],
    "concat": lambda t: t.select("user", "item").concat(t.select("item", "n"), mode="outer"),
}


def _categories(table: Any) -> Any:
    pairs = table.df.sparkSession.createDataFrame([(3, 33), (1, 11), (5, 55)], "item int, cat int")
    return type(table)(pairs)


@pytest.fixture(scope="module")
def ours(spark: SparkSession) -> FeatureTable:
    orca.attach(spark)
    return FeatureTable(spark.createDataFrame(ROWS, SCHEMA).coalesce(1))


def as_set(table: Any) -> list[str]:
    """Rows as sorted text, columns in order of their names, numbers rounded: float32 is not double."""

    def shown(value: Any) -> Any:
        if isinstance(value, list):
            return [shown(entry) for entry in value]
        return round(float(value), 5) if isinstance(value, int | float) else value

    return sorted(
        str({name: shown(value) for name, value in sorted(row.asDict().items())})
        for row in table.df.collect()
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_same_as_friesian(ours: FeatureTable, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Friesian uses what Spark deprecates
        expected = as_set(OPERATIONS[name](to_friesian(ours)))
    assert as_set(OPERATIONS[name](ours)) == expected


def test_vocabularies_have_the_same_values_and_ids_from_1(ours: FeatureTable) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = to_friesian(ours).gen_string_idx(["user", "tags"], do_split=False, order_by_freq=True)
    mine = ours.gen_string_idx(["user", "tags"], order_by_freq=True)
    assert isinstance(mine, list)
    for left, right in zip(mine, theirs, strict=True):
        assert left.to_dict().keys() == right.to_dict().keys()
        assert sorted(left.to_dict().values()) == sorted(right.to_dict().values())
    assert mine[0].to_dict() == theirs[0].to_dict() == {"u1": 1, "u2": 2}


def test_our_classes_stand_under_friesians(ours: FeatureTable) -> None:
    for name, kind in (
        ("FeatureTable", FeatureTable),
        ("StringIndex", StringIndex),
        ("TargetCode", TargetCode),
    ):
        assert issubclass(kind, friesian_class(name))
    assert type(from_friesian(to_friesian(ours))) is FeatureTable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = to_friesian(ours).gen_string_idx("user")
    encoded = ours.encode_string("user", index)
    assert set(encoded.to_list("user")) == {1, 2, None}
