"""ParquetDataset: the row ranges of a prepared data set, and how an epoch deals them out."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pyarrow import fs

from deeprec_spark.embedding.filesystem import redacted, resolve, split_query

# Footers are read in parallel: on an object store each costs a round trip.
_FOOTER_THREADS = 16


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of one Parquet row group: what a worker leases.

    `file` is the position of `path` in the sorted data set: unlike the path, in which Spark puts a random
    UUID, it is the same each time the data are written, so shuffles are seeded by it. `start` counts from
    the first row of the row group.
    """

    path: str
    file: int
    row_group: int
    start: int
    rows: int

    def to_dict(self) -> dict[str, Any]:
        """The range as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RowRange:
        """The range that `to_dict` described."""
        numbers = (int(data[name]) for name in ("file", "row_group", "start", "rows"))
        return cls(str(data["path"]), *numbers)


@dataclass(frozen=True)
class ParquetDataset:
    """The row ranges of a Parquet data set, in order. Immutable; each method returns a new one.

    `fingerprint` (of what `scan` returns) changes with the sizes of the row groups, not with where they lie. A row is a
    sample, or of grouped data a group: `samples_per_row` is how many samples it has on average.

    Example:
        >>> data = ParquetDataset((RowRange("a", 0, 0, 0, 5), RowRange("b", 1, 0, 0, 3)))
        >>> [part.num_rows for part in data.split_evenly(2)]
        [4, 4]
    """

    ranges: tuple[RowRange, ...]
    fingerprint: str = ""
    samples_per_row: float = 1.0

    @property
    def num_rows(self) -> int:
        """Rows of all ranges."""
        return sum(part.rows for part in self.ranges)

    @property
    def num_samples(self) -> int:
        """Samples of all ranges; of grouped data exact for all that was scanned, an estimate for a part of it."""
        return round(self.num_rows * self.samples_per_row)

    @classmethod
    def scan(
        cls, location: str, item_column: str | None = None, files: Collection[str] | None = None
    ) -> ParquetDataset:
        """Read the footers below a path or URI: a Parquet file, or a folder of them.

        Args:
            location: the path or URI.
            item_column: a column of which each sample has one number, in a list where data are grouped; it tells how
                many samples there are. None: as many as rows.
            files: names of the only files to take from the folder, such as those of attempts that count. None: all.

        Raises:
            FileNotFoundError: nothing is there, or no Parquet file.
            ValueError: a file is not Parquet (its name is in the message).
        """
        filesystem, root = resolve(location)
        info = filesystem.get_file_info(root)
        if info.type == fs.FileType.File:
            paths = [root]
        elif info.type == fs.FileType.Directory:
            selector = fs.FileSelector(root, recursive=True)
            paths = sorted(
                entry.path
                for entry in filesystem.get_file_info(selector)
                if entry.type == fs.FileType.File
                and _is_data_file(entry.path[len(root) :])
                and (files is None or entry.base_name in files)
            )
        else:
            raise FileNotFoundError(
                f"No Parquet data: the path does not exist. Received: {redacted(location)!r}"
            )
        if not paths:
            raise FileNotFoundError(f"No Parquet file lies below this path. Received: {redacted(location)!r}")
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            read = list(pool.map(lambda path: _row_counts(filesystem, path, item_column), paths))
        footers = [[counts[:2] for counts in file] for file in read]
        rows_in_all = sum(rows for file in read for rows, _, _ in file)
        samples = sum(count for file in read for _, _, count in file)
        start, query = split_query(location)
        start = start.rstrip("/")
        prefix = start[: -len(root)] if start.endswith(root) and start != root else ""
        return cls(
            tuple(
                RowRange(f"{prefix}{path}{query}" if prefix else path, file, group, 0, rows)
                for file, (path, counts) in enumerate(zip(paths, footers, strict=True))
                for group, (rows, _) in enumerate(counts)
                if rows
            ),
            hashlib.sha256(repr(footers).encode()).hexdigest(),
            samples / rows_in_all if rows_in_all else 1.0,
        )

    def chunked(self, max_rows: int) -> ParquetDataset:
        """The same rows in ranges of at most `max_rows`: the size of a lease."""
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1. Received: max_rows={max_rows}")
        return self._part(
            replace(part, start=part.start + offset, rows=min(max_rows, part.rows - offset))
            for part in self.ranges
            for offset in range(0, part.rows, max_rows)
        )

    def shuffled(self, seed: int, epoch: int) -> ParquetDataset:
        """The ranges in an order that is a pure function of seed and epoch."""
        order = np.random.default_rng([seed, epoch]).permutation(len(self.ranges))
        return self._part(self.ranges[index] for index in order)

    def limited(self, max_rows: int) -> ParquetDataset:
        """The first `max_rows` rows."""
        return self._part(_cut(self.ranges, 0, max_rows))

    def split_evenly(self, parts: int) -> list[ParquetDataset]:
        """Contiguous parts whose row counts differ by at most one: what synchronous ranks read."""
        bounds = [self.num_rows * index // parts for index in range(parts + 1)]
        return [self._part(_cut(self.ranges, low, high)) for low, high in pairwise(bounds)]

    def to_items(self) -> list[dict[str, Any]]:
        """The ranges as work items."""
        return [part.to_dict() for part in self.ranges]

    def _part(self, ranges: Iterable[RowRange]) -> ParquetDataset:
        return ParquetDataset(tuple(ranges), samples_per_row=self.samples_per_row)


def _is_data_file(relative_path: str) -> bool:
    """Spark's rule: parts of a path that begin with `_` or `.` are bookkeeping, not data."""
    parts = [part for part in relative_path.split("/") if part]
    return not any(part[0] in "_." for part in parts) and parts[-1].endswith(".parquet")


def _row_counts(filesystem: Any, path: str, item_column: str | None) -> list[tuple[int, int, int]]:
    """Rows, bytes and samples of each row group."""
    try:
        metadata = pq.read_metadata(path, filesystem=filesystem)
    except Exception as error:
        raise ValueError(f"Cannot read the Parquet footer: {error}. Received: {path!r}") from error
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    leaves = [metadata.schema.column(leaf) for leaf in range(metadata.num_columns)] if item_column else []
    leaf = next(
        (
            number
            for number, column in enumerate(leaves)
            if column.path == item_column or column.path.startswith(f"{item_column}.")
        ),
        None,
    )
    return [
        (
            group.num_rows,
            group.total_byte_size,
            group.num_rows if leaf is None else _values(group.column(leaf)),
        )
        for group in groups
    ]


def _values(column: Any) -> int:
    """How many numbers a column of a row group holds."""
    counts = column.statistics
    # An empty list is a place in the column too, but without a value: writers count it with the nulls.
    empty = counts.null_count if counts is not None and counts.has_null_count else 0
    return int(column.num_values - empty)


def _cut(ranges: Sequence[RowRange], low: int, high: int) -> Iterable[RowRange]:
    """The rows [low, high) of the concatenated ranges."""
    position = 0
    for part in ranges:
        start, stop = max(low, position), min(high, position + part.rows)
        if start < stop:
            yield replace(part, start=part.start + start - position, rows=stop - start)
        position += part.rows
