"""Data creators written as Parquet shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from deeprec_spark.data import BatchReader, ParquetDataset, ReaderOptions
from deeprec_spark.data.creator import spec_of_arrays, write_shard
from deeprec_spark.features.spec import FeatureKind, FeatureSpec


def batches(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
    for start in range(0, config["rows"], batch_size):
        ids = np.arange(start, min(start + batch_size, config["rows"]))
        features = {"id": ids, "list": np.stack([ids, ids + 1], axis=1), "dense": ids.astype(np.float32)}
        yield features, ids % 2, np.ones(len(ids)) * 0.5


def test_shards_hold_every_row_once(tmp_path: Path) -> None:
    found = [
        write_shard(batches, {"rows": 50}, 8, shard=shard, num_shards=3, location=str(tmp_path))
        for shard in range(3)
    ]
    assert sum(each.rows for each in found) == 50
    assert all(each.weighted for each in found)
    assert sorted(each.file for each in found) == sorted(path.name for path in tmp_path.iterdir())
    [text] = {each.spec for each in found}
    spec = FeatureSpec.model_validate_json(text)
    assert [feature.kind for feature in spec.features] == [
        FeatureKind.CATEGORICAL,
        FeatureKind.SEQUENCE,
        FeatureKind.DENSE,
    ]
    assert spec.features[1].max_length == 2
    reader = BatchReader(spec, ReaderOptions(50, sample_weight="sample_weight"))
    [(batch, _)] = reader.batches(iter(ParquetDataset.scan(str(tmp_path)).ranges))
    order = np.argsort(batch.features["id"])
    assert batch.features["id"][order].tolist() == list(range(50))
    assert batch.features["list"][order].tolist() == [[i, i + 1] for i in range(50)]
    assert batch.labels["y"][order].tolist() == [i % 2 for i in range(50)]
    assert batch.sample_weight is not None
    assert set(batch.sample_weight) == {0.5}


def test_endless_data_stop_at_max_batches(tmp_path: Path) -> None:
    def endless(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
        while True:
            yield np.arange(batch_size), np.zeros((batch_size, 1), np.float32)

    found = [
        write_shard(endless, {}, 4, shard=s, num_shards=2, location=str(tmp_path), max_batches=5)
        for s in range(2)
    ]
    assert [each.rows for each in found] == [12, 8]
    assert pq.read_table(tmp_path / found[0].file).column_names == ["x", "y"]


def test_names_come_from_the_columns(tmp_path: Path) -> None:
    def pairs(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
        yield (np.arange(2), np.arange(2.0)), np.arange(2.0)

    written = write_shard(
        pairs, {}, 2, shard=0, num_shards=1, location=str(tmp_path), feature_cols=["a", "b"], label_cols=["c"]
    )
    assert pq.read_table(tmp_path / written.file).column_names == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"2 arrays in x.*Received: \['a'\]"):
        write_shard(pairs, {}, 2, shard=0, num_shards=1, location=str(tmp_path), feature_cols=["a"])


def test_a_shard_without_a_batch_writes_nothing(tmp_path: Path) -> None:
    assert write_shard(batches, {"rows": 0}, 8, shard=0, num_shards=1, location=str(tmp_path)) == (
        "",
        0,
        False,
        "",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must return a tf.data.Dataset or an iterable.*Received: int"),
        ([np.arange(3)], "Each batch of a data creator.*Received: ndarray"),
        (
            [(np.arange(2), np.arange(2)), (np.arange(2.0), np.arange(2))],
            "same columns and shapes as the first",
        ),
        ([(np.array(["a"]), np.arange(1))], "'x' must be an array of numbers"),
    ],
)
def test_wrong_batches_are_errors(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_shard(lambda config, size: value, {}, 2, shard=0, num_shards=1, location=str(tmp_path))


def test_spec_tells_kinds_by_type_and_rank() -> None:
    spec = spec_of_arrays({"v": np.zeros((3, 4))}, {"k": np.arange(3), "r": np.zeros(3)})
    assert (spec.features[0].kind, spec.features[0].width) == (FeatureKind.DENSE, 4)
    assert [label.kind for label in spec.labels] == ["multiclass", "regression"]
