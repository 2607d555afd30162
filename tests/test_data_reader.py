"""Batches from leased ranges."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprec_spark.data import BatchReader, ParquetDataset, ReaderOptions, RowRange
from deeprec_spark.data.columns import projected
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label

SPEC = FeatureSpec(
    features=(
        Feature(name="id", kind=FeatureKind.CATEGORICAL, raw_type="int64"),
        Feature(name="list", kind=FeatureKind.SEQUENCE, raw_type="int64", max_length=2),
    ),
    labels=(Label(name="label"),),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ParquetDataset:
    folder = tmp_path_factory.mktemp("data")
    for part, rows in enumerate((70, 1, 30)):
        ids = np.arange(rows) + 1000 * part
        table = pa.table(
            {"id": ids, "list": [[i, i + 1, i + 2] for i in ids], "label": ids % 2, "other": ids}
        )
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=25)
    return ParquetDataset.scan(str(folder))


ALL_IDS = [*range(70), 1000, *range(2000, 2030)]


@settings(deadline=None, max_examples=30)
@given(batch_size=st.integers(1, 120), chunk=st.integers(1, 40), seed=st.sampled_from([None, 3]))
def test_every_row_once_in_full_batches(
    dataset: ParquetDataset, batch_size: int, chunk: int, seed: int | None
) -> None:
    reader = BatchReader(SPEC, ReaderOptions(batch_size, shuffle_seed=seed))
    ranges = dataset.chunked(chunk).ranges
    seen: list[int] = []
    sizes: list[int] = []
    finished: list[RowRange] = []
    for batch, done in reader.batches(iter(ranges)):
        seen += batch.features["id"].tolist()
        sizes.append(batch.size)
        finished += done
        # A finished range has all its rows behind it.
        assert sum(part.rows for part in finished) <= len(seen)
        assert (batch.features["list"][:, 0] == batch.features["id"] + 1).all()
        assert (batch.labels["label"] == batch.features["id"] % 2).all()
    assert (seen if seed is None else sorted(seen)) == ALL_IDS
    assert finished == list(ranges)
    assert all(size == batch_size for size in sizes[:-1])
    assert 0 < sizes[-1] <= batch_size


def test_shuffle_depends_on_seed_and_epoch_only(dataset: ParquetDataset) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        reader = BatchReader(SPEC, ReaderOptions(16, shuffle_seed=seed, epoch=epoch))
        return [i for batch, _ in reader.batches(iter(dataset.ranges)) for i in batch.features["id"].tolist()]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_no_ranges_no_batches() -> None:
    assert list(BatchReader(SPEC, ReaderOptions(4)).batches(iter(()))) == []


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    part = RowRange(str(tmp_path / "gone.parquet"), 0, 0, 0, 4)
    with pytest.raises(ValueError, match=r"gone\.parquet"):
        list(BatchReader(SPEC, ReaderOptions(4)).batches(iter((part,))))


def test_truncated_file_is_named(dataset: ParquetDataset, tmp_path: Path) -> None:
    whole = Path(dataset.ranges[0].path).read_bytes()
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(whole[:200])
    with pytest.raises(ValueError, match=r"broken\.parquet"):
        list(BatchReader(SPEC, ReaderOptions(4)).batches(iter((RowRange(str(broken), 0, 0, 0, 4),))))


def test_changed_file_is_noticed(dataset: ParquetDataset) -> None:
    part = RowRange(dataset.ranges[0].path, 0, 0, 20, 30)
    with pytest.raises(ValueError, match=r"changed while it was read.*Received: a range of 30"):
        list(BatchReader(SPEC, ReaderOptions(4)).batches(iter((part,))))


def test_batch_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="Received: batch_size=0"):
        ReaderOptions(batch_size=0)


def test_flat_rows_beside_groups_are_groups_of_one(tmp_path: Path) -> None:
    """A folder may hold both, as when rows of today are stored beside the groups of the days before."""
    spec = FeatureSpec(
        features=tuple(
            Feature(name=name, kind=FeatureKind.CATEGORICAL, raw_type="int64") for name in ("user", "item")
        ),
        labels=(Label(name="y"),),
    ).grouped(["user"], ["user"])
    pq.write_table(pa.table({"user": [1, 2], "item": [10, 11], "y": [0.0, 1.0]}), tmp_path / "a.parquet")
    groups = pa.table({"user": [3, 4], "item": [[12, 13, 14], [15]], "y": [[0.0, 1.0, 0.0], [1.0]]})
    for name in ("b", "c"):
        pq.write_table(groups, tmp_path / f"{name}.parquet")
    dataset = ParquetDataset.scan(str(tmp_path), spec.sample_column)
    assert (dataset.num_rows, dataset.num_samples) == (6, 10)
    found: list[tuple[int, int, float]] = []
    for batch, _ in BatchReader(spec, ReaderOptions(3)).batches(iter(dataset.ranges)):
        assert batch.rows == 3
        flat = batch.flat()
        assert batch.size == flat.size == len(flat.features["item"])
        columns = (flat.features["user"], flat.features["item"], flat.labels["y"])
        found += list(zip(*(column.tolist() for column in columns), strict=True))
    later = [(3, 12, 0.0), (3, 13, 1.0), (3, 14, 0.0), (4, 15, 1.0)]
    assert found == [(1, 10, 0.0), (2, 11, 1.0), *later, *later]


def test_columns_that_a_model_does_not_take_are_not_read(tmp_path: Path) -> None:
    """A column that cannot be decoded does no harm where nobody needs it."""
    pq.write_table(pa.table({"id": [1, 2], "list": ["no", "list"], "label": [0, 1]}), tmp_path / "a.parquet")
    ranges = ParquetDataset.scan(str(tmp_path)).ranges
    with pytest.raises(ValueError, match="'list' must hold lists"):
        list(BatchReader(SPEC, ReaderOptions(4)).batches(iter(ranges)))
    spec = projected(SPEC, ["id"])
    [(batch, _)] = BatchReader(spec, ReaderOptions(4)).batches(iter(ranges))
    assert list(batch.features) == ["id"]
    assert spec.label_names == SPEC.label_names
