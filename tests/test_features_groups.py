"""Samples stored in groups: grouped by Spark, read without a loop over rows, the same samples again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from deeprec_spark.data import Batch, BatchReader, Groups, ParquetDataset, ReaderOptions
from deeprec_spark.data.columns import decode
from deeprec_spark.features.groups import is_grouped, ungroup_rows
from deeprec_spark.features.infer import infer_spec
from deeprec_spark.features.prepare import DataError, PrepareReport, is_prepared, prepare_dataframe
from deeprec_spark.features.spec import FeatureSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
