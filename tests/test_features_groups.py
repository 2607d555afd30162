"""Samples stored in groups: grouped by Spark, read without a loop over rows, the same samples again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from deeprec_spark.data import Batch, BatchReader, Groups, ParquetDataset, ReaderOptions
from deeprec_spark.data.columns import decode, projected
from deeprec_spark.features.groups import is_grouped, ungroup_rows
from deeprec_spark.features.infer import infer_spec
from deeprec_spark.features.prepare import DataError, PrepareReport, is_prepared, prepare_dataframe
from deeprec_spark.features.spec import FeatureSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.conftest import RunPython

FEATURES = ["user", "city", "seen", "item", "price", "tags", "image"]
ROWS = 200


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """Users of 1 to 40 samples, two requests each; lists and vectors on both sides."""
    random = np.random.default_rng(5)
    rows: list[tuple[Any, ...]] = []
    for _ in range(ROWS):
        user = int(random.integers(0, 6) ** 2)
        rows.append(
            (
                user,
                f"city {user % 3}",
                [user, user + 1],
                int(random.integers(0, 9)),
                float(np.float32(random.random())),
                [f"tag {tag}" for tag in range(random.integers(0, 3))],
                [float(user), float(np.float32(random.random()))],
                int(random.random() < 0.3),
                int(random.integers(0, 2)),
            )
        )
    schema = (
        "user long, city string, seen array<long>, item long, price double, tags array<string>, "
        "image array<double>, click int, request int"
    )
    return spark.createDataFrame(rows, schema).repartition(3)


@pytest.fixture(scope="module")
def spec(frame: DataFrame) -> FeatureSpec:
    return infer_spec(
        frame,
        FEATURES,
        ["click"],
        group_by=["user", "request"],
        group_features=["user", "city", "seen"],
    )


@pytest.fixture(scope="module")
def stored(frame: DataFrame, spec: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("groups") / "data")
    prepare_dataframe(frame, spec).write.parquet(path)
    return path


def samples(batches: list[Batch]) -> list[tuple[Any, ...]]:
    """Every sample of the batches as a tuple, sorted."""
    found = []
    for batch in (each.flat() for each in batches):
        columns = [batch.features[name].tolist() for name in FEATURES]
        columns.append(batch.labels["click"].tolist())
        found += [tuple(map(str, row)) for row in zip(*columns, strict=True)]
    return sorted(found)


def flat_samples(frame: DataFrame, spec: FeatureSpec) -> list[tuple[Any, ...]]:
    prepared = prepare_dataframe(frame, spec.model_copy(update={"grouping": None}))
    return samples(
        [
            decode(
                prepared.toArrow()
                if hasattr(prepared, "toArrow")
                else pa.Table.from_pandas(prepared.toPandas()),
                spec,
            )
        ]
    )


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_reading_groups_gives_every_sample_once(
    frame: DataFrame, spec: FeatureSpec, stored: str, batch_size: int, seed: int | None
) -> None:
    dataset = ParquetDataset.scan(stored, spec.sample_column)
    assert dataset.num_samples == ROWS
    assert dataset.num_rows == frame.select("user", "request").distinct().count()
    reader = BatchReader(spec, ReaderOptions(batch_size, shuffle_seed=seed))
    batches = [batch for batch, _ in reader.batches(iter(dataset.chunked(5).ranges))]
    assert [batch.rows for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert sum(batch.rows for batch in batches) == dataset.num_rows
    for batch in batches:
        assert batch.groups is not None
        assert len(batch.features["user"]) == batch.rows
        assert len(batch.features["item"]) == len(batch.labels["click"]) == batch.size
        # The image's first number is its user: items are with their group.
        np.testing.assert_array_equal(batch.flat().features["user"], batch.features["image"][:, 0])
    assert samples(batches) == flat_samples(frame, spec)


def test_a_group_of_spark_comes_back_flat(
    frame: DataFrame, spec: FeatureSpec, stored: str, spark: SparkSession
) -> None:
    again = spark.read.parquet(stored)
    assert is_grouped(again)
    assert is_prepared(again, spec)
    flat = ungroup_rows(again)
    assert not is_grouped(flat)
    assert is_prepared(flat, spec)
    assert flat.columns == again.columns == [*FEATURES, "click"]
    assert flat.count() == ROWS
    # Grouped data are not grouped or hashed again, whichever way they come.
    report = PrepareReport()
    assert prepare_dataframe(again, spec, report=report).schema == again.schema
    assert report.rows == ROWS
    assert prepare_dataframe(again, spec.model_copy(update={"grouping": None})).count() == ROWS


def test_large_groups_become_several(frame: DataFrame, spec: FeatureSpec, tmp_path: Path) -> None:
    assert spec.grouping is not None
    small = spec.model_copy(update={"grouping": spec.grouping.model_copy(update={"max_items": 7})})
    prepare_dataframe(frame, small).write.parquet(str(tmp_path / "data"))
    dataset = ParquetDataset.scan(str(tmp_path / "data"))
    batches = [batch for batch, _ in BatchReader(small, ReaderOptions(3)).batches(iter(dataset.ranges))]
    assert max(batch.groups.sizes.max() for batch in batches if batch.groups) == 7
    assert samples(batches) == flat_samples(frame, spec)


LARGE_KEY = """
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from deeprec_spark.features.groups import group_rows
from deeprec_spark.features.spec import Feature, FeatureSpec

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.driver.memory", "500m")  # hardly more than the least that Spark takes
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "1")
    .getOrCreate()
)
spec = FeatureSpec(
    features=[Feature(name=name, kind="categorical", raw_type="int64") for name in ("user", "item")]
).grouped(["user"], ["user"], max_items=16)
# 320 MB of one user, the unknown one.
rows = spark.range(80_000).select(
    F.lit(-1).cast("long").alias("user"), F.col("id").alias("item"), F.repeat(F.lit("x"), 4096).alias("note")
)
groups = group_rows(rows, spec)
size, length = F.size("note"), F.length(F.element_at("note", -1))
found = groups.agg(F.count("*"), F.max(size), F.sum(size), F.min(length))
print("FOUND", *found.collect()[0])
"""


def test_a_key_of_very_many_samples_needs_no_memory_for_all_of_them(run_python: RunPython) -> None:
    """A list of them all would not fit into the JVM."""
    done = run_python(LARGE_KEY)
    assert "FOUND 5000 16 80000 4096" in done.stdout


def test_equal_data_give_equal_groups(frame: DataFrame, spec: FeatureSpec) -> None:
    """Whatever the order and the partitions: their items are in ascending order, cut by `max_items`."""
    assert spec.grouping is not None
    small = spec.model_copy(update={"grouping": spec.grouping.model_copy(update={"max_items": 7})})

    def groups(rows: DataFrame) -> list[tuple[Any, ...]]:
        found = prepare_dataframe(rows, small).collect()
        return sorted(
            (row.user, row.city, row.item, row.price, row.tags, row.image, row.click) for row in found
        )

    one = groups(frame)
    assert one == groups(frame.repartition(4, "price").sort("price"))
    by_group: dict[Any, list[Any]] = {}
    items = prepare_dataframe(frame, small).collect()
    for row in items:
        assert row.item == sorted(row.item)
        assert len(row.item) <= 7
        by_group.setdefault((row.user, row.city), []).append(len(row.item))
    # Two requests for each user; of each all groups but the last are full.
    assert all(sum(size < 7 for size in sizes) <= 2 for sizes in by_group.values())


def test_small_groups_are_a_warning_that_names_the_cause(
    frame: DataFrame, spec: FeatureSpec, caplog: pytest.LogCaptureFixture
) -> None:
    prepare_dataframe(frame, spec)
    assert "samples on average" not in caplog.text
    prepare_dataframe(frame, spec.grouped(["user"], ["user", "price"]))
    [text] = [message for message in caplog.messages if "samples on average" in message]
    assert re.match(r"Groups hold 1\.\d\d samples on average \(200 samples in about \d+ groups\)", text)
    assert "'price' makes about" in text
    assert "'user' makes" not in text
    assert "Leave them out of group_features" in text
    assert text.endswith("Received: group_by=['user'], group_features=['user', 'price'], max_items=256")
    caplog.clear()
    prepare_dataframe(frame, spec.grouped(["price"], ["user"]))
    [text] = [message for message in caplog.messages if "samples on average" in message]
    assert "group_by has about" in text
    caplog.clear()
    # What is to be stored flat is not warned of.
    prepare_dataframe(frame, spec.grouped(["price"], ["user"]), group=False)
    assert "samples on average" not in caplog.text


def test_columns_that_a_model_does_not_take_are_not_read_of_groups_either(
    spec: FeatureSpec, stored: str
) -> None:
    def read(names: list[str]) -> tuple[FeatureSpec, list[Batch]]:
        narrow = projected(spec, names)
        dataset = ParquetDataset.scan(stored, spec.sample_column)
        reader = BatchReader(narrow, ReaderOptions(8))
        return narrow, [batch for batch, _ in reader.batches(iter(dataset.ranges))]

    narrow, batches = read(["user", "item", "group_index"])
    assert narrow.feature_names == ["user", "item"]
    assert {tuple(batch.features) for batch in batches} == {("user", "item")}
    whole, _ = read(FEATURES)
    assert whole == spec
    sizes = [batch.groups.sizes.tolist() for batch in batches if batch.groups]
    assert sum(map(sum, sizes)) == ROWS
    # Of the other side one column stays, a single number where there is one: groups are seen of both.
    only_user, batches = read(["seen"])
    assert only_user.feature_names == ["seen", "item"]
    assert [batch.groups.sizes.tolist() for batch in batches if batch.groups] == sizes
    only_items, batches = read(["tags"])
    assert only_items.feature_names == ["user", "tags"]
    assert [batch.groups.sizes.tolist() for batch in batches if batch.groups] == sizes
    # Flat data of the same spec are projected, too.
    assert projected(spec.model_copy(update={"grouping": None}), ["tags"]).feature_names == ["tags"]


def test_values_that_differ_inside_of_a_user_make_several_groups(frame: DataFrame, spec: FeatureSpec) -> None:
    by_user = spec.grouped(["user"], ["user", "item"])
    groups = prepare_dataframe(frame, by_user)
    assert groups.count() == frame.select("user", "item").distinct().count()


def test_wrong_groupings_are_named(frame: DataFrame, spec: FeatureSpec) -> None:
    with pytest.raises(ValidationError, match="all features are group-level"):
        spec.grouped(["request"], FEATURES)
    with pytest.raises(ValidationError, match="unknown"):
        spec.grouped(["request"], ["unknown"])
    with pytest.raises(ValueError, match="group_features"):
        spec.grouped(["request"])
    with pytest.raises(DataError, match="session"):
        prepare_dataframe(frame, spec.grouped(["session"], ["city"]))


def test_lists_of_different_lengths_are_refused(spec: FeatureSpec) -> None:
    narrow = spec.with_columns(
        [feature for feature in spec.features if feature.name in ("city", "item")], spec.labels
    )
    table = pa.table({"city": [1, 2], "item": [[1], [2, 3]], "click": [[0.0, 1.0], [1.0]]})
    with pytest.raises(ValueError, match=r"'click' and 'item' differ"):
        decode(table, narrow)
    with pytest.raises(ValueError, match="in groups"):
        decode(table, narrow.model_copy(update={"grouping": None}))


def test_rows_of_a_batch_are_groups() -> None:
    batch = Batch(
        {"user": np.array([1, 2, 3]), "item": np.array([10, 11, 30])},
        {"click": np.array([0.0, 1.0, 0.0], np.float32)},
        groups=Groups(frozenset({"user"}), np.array([2, 0, 1])),
        group_index="group_index",
    )
    assert (batch.rows, batch.size) == (3, 3)
    assert batch.grouped_inputs()["group_index"].tolist() == [0, 0, 2]
    assert batch.flat().features["user"].tolist() == [1, 1, 3]
    turned = batch.take(np.array([2, 0]))
    assert turned.features["item"].tolist() == [30, 10, 11]
    assert turned.labels["click"].tolist() == [0.0, 0.0, 1.0]
    assert batch.slice(1, 3).features["item"].tolist() == [30]
    with pytest.raises(ValueError, match="group_by"):
        Batch({"user": np.array([1])}).grouped_inputs()
