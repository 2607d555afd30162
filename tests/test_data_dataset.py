"""Row ranges: scanning, cutting and dealing out a Parquet data set."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeprec_spark.data import ParquetDataset, RowRange


def rows_of(dataset: ParquetDataset) -> list[tuple[int, int, int]]:
    return [
        (part.file, part.row_group, part.start + offset)
        for part in dataset.ranges
        for offset in range(part.rows)
    ]


def write(path: Path, rows: int, row_group_size: int = 100) -> None:
    pq.write_table(pa.table({"id": np.arange(rows)}), path, row_group_size=row_group_size)


def test_scan_lists_row_groups_and_skips_bookkeeping(tmp_path: Path) -> None:
    write(tmp_path / "part-1.parquet", 250)
    write(tmp_path / "part-0.parquet", 10)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "_temporary").mkdir()
    write(tmp_path / "_temporary" / "part-2.parquet", 5)
    dataset = ParquetDataset.scan(str(tmp_path))
    assert [(Path(part.path).name, part.file, part.row_group, part.rows) for part in dataset.ranges] == [
        ("part-0.parquet", 0, 0, 10),
        ("part-1.parquet", 1, 0, 100),
        ("part-1.parquet", 1, 1, 100),
        ("part-1.parquet", 1, 2, 50),
    ]


def test_scan_takes_a_single_file_and_a_uri(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 3)
    assert ParquetDataset.scan(str(tmp_path / "a.parquet")).num_rows == 3
    assert ParquetDataset.scan((tmp_path / "a.parquet").as_uri()).num_rows == 3


def test_scan_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not exist.*nowhere"):
        ParquetDataset.scan(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="No Parquet file"):
        ParquetDataset.scan(str(tmp_path))
    (tmp_path / "broken.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"footer.*broken\.parquet"):
        ParquetDataset.scan(str(tmp_path))


def test_groups_without_items_have_no_samples(tmp_path: Path) -> None:
    for number, items in enumerate(([[1, 2], [], [3]], [[], []], [[4]])):
        pq.write_table(
            pa.table({"item": items}, pa.schema({"item": pa.list_(pa.int64())})),
            tmp_path / f"{number}.parquet",
        )
    dataset = ParquetDataset.scan(str(tmp_path), "item")
    assert (dataset.num_rows, dataset.num_samples) == (6, 4)


def test_empty_files_have_no_ranges(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0)
    assert ParquetDataset.scan(str(tmp_path)).num_rows == 0


datasets = st.lists(st.integers(1, 50), max_size=6).map(
    lambda sizes: ParquetDataset(tuple(RowRange(f"f{i}", i, 0, 0, rows) for i, rows in enumerate(sizes)))
)


@given(datasets, st.integers(1, 60))
def test_chunks_keep_every_row_in_order(dataset: ParquetDataset, size: int) -> None:
    chunked = dataset.chunked(size)
    assert rows_of(chunked) == rows_of(dataset)
    assert all(part.rows <= size for part in chunked.ranges)


@given(datasets, st.integers(1, 7))
def test_even_split_keeps_every_row_once(dataset: ParquetDataset, parts: int) -> None:
    split = dataset.split_evenly(parts)
    assert [row for part in split for row in rows_of(part)] == rows_of(dataset)
    counts = [part.num_rows for part in split]
    assert max(counts) - min(counts) <= 1


@given(datasets, st.integers(0, 100))
def test_limited_takes_the_first_rows(dataset: ParquetDataset, rows: int) -> None:
    assert rows_of(dataset.limited(rows)) == rows_of(dataset)[:rows]


@given(datasets)
def test_shuffle_is_a_function_of_seed_and_epoch(dataset: ParquetDataset) -> None:
    assert dataset.shuffled(1, 2) == dataset.shuffled(1, 2)
    assert sorted(rows_of(dataset.shuffled(1, 2))) == sorted(rows_of(dataset))


def test_shuffle_differs_between_epochs() -> None:
    dataset = ParquetDataset(tuple(RowRange("f", 0, group, 0, 1) for group in range(50)))
    assert dataset.shuffled(1, 0) != dataset.shuffled(1, 1)


def test_items_round_trip() -> None:
    part = RowRange("s3://bucket/a.parquet", 3, 2, 1, 9)
    assert RowRange.from_dict(ParquetDataset((part,)).to_items()[0]) == part


def test_chunk_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="Received: max_rows=0"):
        ParquetDataset(()).chunked(0)
