"""A table out of a full checkpoint and the incremental ones after it, as one stream of rows sorted by bucket.

All files are sorted by bucket, so a few buckets at a time are merged, and memory is bounded whatever the table's size:
of each key the newest checkpoint decides, whether it has a row there, an admission count or a tombstone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from deeprec_spark.embedding.filesystem import list_files, redacted, resolve
from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket
from deeprec_spark.embedding.table_files import (
    GROUP_ROWS,
    GROUPS_KEY,
    METADATA_KEY,
    int64_column,
    matrix_array,
    matrix_column,
    table_directory,
)

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class TableLevel:
    """One table in one checkpoint directory: its files, and what their metadata says.

    Args:
        directory: path or URI.
        table: its name.
        files: the checkpoint's files, relative paths; others in the directory are not looked at. None takes all.
    """

    def __init__(self, directory: str, table: str, files: Collection[str] | None = None) -> None:
        self.filesystem, root = resolve(directory)
        self._known = None if files is None else frozenset(f"{root}/{file}" for file in files)
        folder = f"{root}/{table_directory(table)}"
        self.parts = self._files(folder, "part-")
        if not self.parts:
            raise ValueError(
                f"The checkpoint has no table {table!r}. Received: no part files in {redacted(directory)}"
            )
        self.filtered = self._files(folder, "filtered-")
        self.tombstones = self._files(folder, "tombstones-")
        self.blooms = self._paths(folder, "bloom-")
        infos = [part.info for part in self.parts]
        self.infos = infos
        self.info = infos[0]
        self.schema = self.parts[0].schema.remove_metadata()
        self.updates = max(int(info["updates"]) for info in infos)
        self.calls = max(int(info["calls"]) for info in infos)
        self._ranks = {int(info["ranks"]["shard_index"]): info["ranks"] for info in infos if "ranks" in info}
        self.rank_refreshes = max((int(ranks["refreshes"]) for ranks in self._ranks.values()), default=0)
        self.num_rows = sum(part.num_rows for part in self.parts)
        self.num_filtered = sum(part.num_rows for part in self.filtered)

    def rank_thresholds(self, shard_index: int, num_shards: int) -> list[int]:
        """Thresholds of a dynamic dimension's ranks, for one of as many servers as saved them.

        Empty for another number of servers: those of one server are of its rows, and are found anew from the rows'
        ranks.
        """
        ranks = self._ranks.get(shard_index)
        if ranks is None or len(self._ranks) != num_shards or int(ranks["refreshes"]) != self.rank_refreshes:
            return []
        return [int(threshold) for threshold in ranks["thresholds"]]

    def bloom(self) -> Iterator[tuple[int, bytes]]:
        """Buckets of a Bloom filter and their counters."""
        for path in self.blooms:
            with _Named(path), pq.ParquetFile(path, filesystem=self.filesystem) as source:
                for batch in source.iter_batches():
                    for index, counters in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
                        yield index, counters.as_py()

    def _paths(self, folder: str, prefix: str) -> list[str]:
        if self._known is None:
            return list_files(self.filesystem, folder, prefix, ".parquet")
        start = f"{folder}/{prefix}"
        return sorted(path for path in self._known if path.startswith(start))

    def _files(self, folder: str, prefix: str) -> list[_File]:
        return [_File(self.filesystem, path) for path in self._paths(folder, prefix)]


class TableChain:
    """One table in a chain of checkpoints: a full one, then incremental ones in order.

    Several threads may read at once; each call has files of its own.

    Args:
        directories: the checkpoints' directories, paths or URIs.
        table: the table's name in the checkpoints.
        files: the files of each checkpoint, see TableLevel.

    Raises:
        ValueError: a checkpoint has no such table, or a file is none of a checkpoint.

    Example:
        >>> chain = TableChain(["/m/checkpoints/000000000010", "/m/checkpoints/000000000020"], "user")  # doctest: +SKIP
        >>> sum(len(batch) for batch in chain.rows())  # doctest: +SKIP
        1000
    """

    def __init__(
        self,
        directories: Sequence[str],
        table: str,
        files: Sequence[Collection[str] | None] | None = None,
    ) -> None:
        self.table = table
        known = files or [None] * len(directories)
        self.levels = [
            TableLevel(directory, table, part) for directory, part in zip(directories, known, strict=True)
        ]

    @property
    def last(self) -> TableLevel:
        """The newest checkpoint's part; clocks and Bloom counters are its own."""
        return self.levels[-1]

    @property
    def num_rows(self) -> int:
        """Rows of all checkpoints together: at least as many as the table has."""
        return sum(level.num_rows for level in self.levels)

    def rows(
        self,
        first: int = 0,
        last: int = NUM_BUCKETS,
        columns: Sequence[str] | None = None,
        *,
        ordered: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The table's rows in buckets [first, last): each key once.

        Args:
            columns: which to read, with `key` among them; None reads all. Batches of older checkpoints may lack
                columns (`time`) that newer ones have.
            ordered: by bucket. Otherwise rows are so only in windows of a few buckets, which costs less.
        """
        return self._flat("parts", first, last, columns, ordered)

    def filtered(
        self, first: int = 0, last: int = NUM_BUCKETS, *, ordered: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Keys that are only counted, and their counts: key, frequency."""
        return self._flat("filtered", first, last, None, ordered)

    def windows(
        self, first: int = 0, last: int = NUM_BUCKETS, rows: int | None = None
    ) -> list[tuple[int, int]]:
        """Ranges of buckets that hold about two row groups each, if the table has so many rows and counts."""
        total = sum(level.num_rows + level.num_filtered for level in self.levels) if rows is None else rows
        width = max(1, NUM_BUCKETS * 2 * GROUP_ROWS // max(total, 1))
        return [(begin, min(begin + width, last)) for begin in range(first, last, width)]

    def by_window(
        self, windows: Sequence[tuple[int, int]], columns: Sequence[str] | None = None
    ) -> Iterator[list[pa.RecordBatch]]:
        """The rows of each range of buckets; ranges must ascend."""
        return self._merged("parts", windows, columns)

    def _flat(
        self, kind: str, first: int, last: int, columns: Sequence[str] | None, ordered: bool
    ) -> Iterator[pa.RecordBatch]:
        if len(self.levels) == 1:
            with closing(_LevelStreams(self.last, kind, columns, with_keys=False)) as streams:
                yield from streams.wanted.batches(first, last)
            return
        for found in self._merged(kind, self.windows(first, last), columns):
            yield from _by_bucket(found) if ordered and found else found

    def _merged(
        self, kind: str, windows: Sequence[tuple[int, int]], columns: Sequence[str] | None
    ) -> Iterator[list[pa.RecordBatch]]:
        with ExitStack() as stack:
            streams = [
                stack.enter_context(closing(_LevelStreams(level, kind, columns, with_keys=number > 0)))
                for number, level in enumerate(self.levels)
            ]
            for begin, end in windows:
                yield _merge_window(streams, begin, end)


def _merge_window(streams: Sequence[_LevelStreams], begin: int, end: int) -> list[pa.RecordBatch]:
    """The rows of a few buckets, newest first; an older one's go where a newer one says something of the key."""
    found: list[pa.RecordBatch] = []
    decided: list[Int64Array] = []
    for stream in reversed(streams):
        batches = stream.wanted.take(begin, end)
        found += _undecided(batches, decided)
        decided += [int64_column(batch, "key") for batch in batches]
        for other in stream.others:
            decided += [int64_column(batch, "key") for batch in other.take(begin, end)]
    return found


def _by_bucket(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The same rows as one batch in order of buckets, with the newest checkpoint's columns."""
    schema = batches[0].schema
    full = [with_schema(batch, schema) for batch in batches]
    merged = pa.Table.from_batches(full).combine_chunks().to_batches()[0]
    order = np.argsort(bucket(int64_column(merged, "key")), kind="stable")
    return [merged.take(pa.array(order))]


def with_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch of an older checkpoint with the columns of a newer one; integers that it lacks are 0."""
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        if field.name not in batch.schema.names:
            columns.append(pa.array(np.zeros(len(batch), np.int64)))
        elif pa.types.is_fixed_size_list(field.type) or pa.types.is_fixed_size_binary(field.type):
            columns.append(matrix_array(matrix_column(batch, field.name), field.type))
        else:
            columns.append(batch.column(field.name))
    return pa.record_batch(columns, schema=schema)


def _undecided(batches: list[pa.RecordBatch], decided: list[Int64Array]) -> list[pa.RecordBatch]:
    known = np.sort(np.concatenate(decided)) if decided else np.empty(0, np.int64)
    if not len(known):
        return batches
    left = []
    for batch in batches:
        keys = int64_column(batch, "key")
        place = np.searchsorted(known, keys)
        place[place == len(known)] = 0
        fresh = known[place] != keys
        if fresh.all():
            left.append(batch)
        elif fresh.any():
            left.append(batch.filter(pa.array(fresh)))
    return left


class _LevelStreams:
    """What is wanted of one checkpoint, and the keys of its other files, which hide older rows."""

    def __init__(
        self, level: TableLevel, kind: str, columns: Sequence[str] | None, *, with_keys: bool
    ) -> None:
        self.wanted = _Stream(getattr(level, kind), columns)
        kinds = {"parts", "filtered", "tombstones"} - {kind} if with_keys else set()
        self.others = [_Stream(getattr(level, name), ["key"]) for name in sorted(kinds)]

    def close(self) -> None:
        for stream in (self.wanted, *self.others):
            stream.close()


class _File:
    """One Parquet file: its metadata, and the buckets [low, high] of each row group."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem = filesystem
        self.path = path
        with _Named(path), pq.ParquetFile(path, filesystem=filesystem) as source:
            self.metadata = source.metadata
            self.schema = source.schema_arrow
        metadata = self.schema.metadata or {}
        if METADATA_KEY not in metadata:
            raise ValueError(
                f"Not a checkpoint file: its schema has no {METADATA_KEY.decode()} metadata. Received: {path}"
            )
        self.info: dict[str, Any] = json.loads(metadata[METADATA_KEY])
        self.num_rows = int(self.metadata.num_rows)
        groups = (self.metadata.metadata or {}).get(GROUPS_KEY)
        everything = [(0, NUM_BUCKETS - 1)] * self.metadata.num_row_groups
        self.groups: list[tuple[int, int]] = everything if groups is None else json.loads(groups)

    def open(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path, metadata=self.metadata, filesystem=self.filesystem, pre_buffer=True)


class _Stream:
    """Sorted files of one kind and checkpoint, read a row group at a time in ascending order of buckets."""

    def __init__(self, files: Sequence[_File], columns: Sequence[str] | None) -> None:
        self._columns = None if columns is None else list(columns)
        self._groups = [
            (file, index, low, high) for file in files for index, (low, high) in enumerate(file.groups)
        ]
        self._next = 0
        self._held: list[tuple[pa.RecordBatch, npt.NDArray[np.int32]]] = []
        self._open: tuple[_File, pq.ParquetFile] | None = None

    def batches(self, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """All rows in buckets [first, last), a row group at a time."""
        for file, index, low, high in self._groups:
            if high >= first and low < last:
                yield from (batch for batch, _ in self._read(file, index, first, last))

    def take(self, first: int, last: int) -> list[pa.RecordBatch]:
        """The rows in buckets [first, last); ranges must ascend from call to call."""
        while self._next < len(self._groups) and self._groups[self._next][2] < last:
            file, index, _, high = self._groups[self._next]
            self._next += 1
            if high >= first:
                self._held += self._read(file, index, first, NUM_BUCKETS)
        taken, kept = [], []
        for batch, places in self._held:
            start, stop = np.searchsorted(places, [first, last])
            if stop > start:
                taken.append(batch.slice(start, stop - start))
            if stop < len(places):
                kept.append((batch, places))
        self._held = kept
        return taken

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _read(
        self, file: _File, index: int, first: int, last: int
    ) -> list[tuple[pa.RecordBatch, npt.NDArray[np.int32]]]:
        with _Named(file.path):
            if self._open is None or self._open[0] is not file:
                self.close()
                self._open = (file, file.open())
            data = self._open[1].read_row_group(index, columns=self._columns, use_threads=False)
            pieces = data.combine_chunks().to_batches()
        read = []
        for batch in pieces:
            places = bucket(int64_column(batch, "key"))
            start, stop = np.searchsorted(places, [first, last])
            if stop > start:
                read.append((batch.slice(start, stop - start), places[start:stop]))
        return read


class _Named:
    """Says which file could not be read."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (pa.ArrowInvalid, OSError)):
            raise ValueError(
                f"A file of the checkpoint cannot be read: {error}. Received: {self._path}"
            ) from error


def read_vector(
    directory: str, name: str, files: Collection[str] | None = None
) -> tuple[dict[str, Float32Array], dict[str, Any]] | None:
    """The whole vector that any number of shards wrote, by column, and its metadata; None where there is none.

    `files` are the checkpoint's, relative paths; others are not looked at.
    """
    filesystem, root = resolve(directory)
    if files is None:
        paths = list_files(filesystem, f"{root}/dense", f"{name}-", ".parquet")
    else:
        paths = sorted(f"{root}/{file}" for file in files if file.startswith(f"dense/{name}-"))
    parts = []
    for path in paths:
        file = _File(filesystem, path)
        with _Named(path), file.open() as source:
            parts.append((file.info, source.read()))
    if not parts:
        return None
    parts.sort(key=lambda part: int(part[0]["start"]))
    expected = 0
    for info, data in parts:
        if int(info["start"]) != expected:
            raise ValueError(
                f"Dense file for elements from {expected} on is missing. Received: {[_base(path) for path in paths]}"
            )
        expected += data.num_rows
    info = parts[0][0]
    if expected != int(info["total"]):
        raise ValueError(
            f"Dense files hold {expected} elements of {info['total']}. Received: {[_base(path) for path in paths]}"
        )
    merged = pa.concat_tables([data for _, data in parts])
    columns = {
        column: np.ascontiguousarray(merged.column(column).to_numpy(), dtype=np.float32)
        for column in merged.column_names
    }
    return columns, info


def _base(path: str) -> str:
    return path.rpartition("/")[2]
