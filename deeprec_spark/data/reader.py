"""BatchReader: leased row ranges to batches of a fixed size, the next range read in the background.

A row is what the files hold: a sample, or a group with its samples. Ranges, leases and batch sizes count rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deeprec_spark.data.batch import Batch, concatenate
from deeprec_spark.data.columns import decode, required_columns
from deeprec_spark.data.dataset import RowRange
from deeprec_spark.data.file_cache import FileCache
from deeprec_spark.data.shuffle import Leased, RowBuffer
from deeprec_spark.embedding.filesystem import resolve
from deeprec_spark.features.spec import FeatureSpec

_SLICE_ROWS = 16_384


@dataclass(frozen=True)
class ReaderOptions:
    """How ranges become batches.

    `batch_size` counts rows: of data in groups the groups. Rows are shuffled within a range or buffer where
    `shuffle_seed` is given: a pure function of the seed, the epoch and the range, so that who reads it does not matter.
    """

    batch_size: int
    labels: bool = True
    sample_weight: str | None = None
    shuffle_seed: int | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1. Received: batch_size={self.batch_size}")


@dataclass(frozen=True)
class Work:
    """A range or buffer to read, of which the first `done` rows (in the order in which it is read) were used before."""

    part: Leased
    done: int = 0


@dataclass(frozen=True)
class Step:
    """A batch, and where its reader is after it.

    `rows` says of each range that the batch has rows of how many are used with it, `Work.done` included; `finished`
    are the ranges all of whose rows have been handed out.
    """

    batch: Batch
    rows: Mapping[Leased, int]
    finished: Sequence[Leased]


class BatchReader:
    """Iterates over batches; each comes with the ranges whose rows have all been handed out with it.

    Every batch has `batch_size` rows but the last, which may have fewer. No row is dropped and none repeated. With a
    `cache`, remote files are read from local copies.

    Example:
        >>> reader = BatchReader(spec, ReaderOptions(batch_size=256))  # doctest: +SKIP
        >>> for batch, finished in reader.batches(dataset.ranges):  # doctest: +SKIP
        ...     trainer.train_step(batch)
    """

    def __init__(self, spec: FeatureSpec, options: ReaderOptions, cache: FileCache | None = None) -> None:
        self._spec = spec
        self._options = options
        self._cache = cache
        self._columns = required_columns(spec, labels=options.labels, sample_weight=options.sample_weight)
        self._group: tuple[tuple[str, int], pa.Table] | None = None

    def batches(self, ranges: Iterator[Leased]) -> Iterator[tuple[Batch, list[Leased]]]:
        """Batches of the ranges in their order; a range is taken from the iterator one ahead of its use.

        Raises:
            ValueError: a file cannot be read or does not fit the spec (its path is in the message).
        """
        for step in self.steps(Work(part) for part in ranges):
            yield step.batch, list(step.finished)

    def steps(self, work: Iterator[Work]) -> Iterator[Step]:
        """The same, from the middle of ranges on, with the position after each batch.

        Args:
            work: the ranges in their order, none of them twice.

        Raises:
            ValueError: a file cannot be read or does not fit the spec (its path is in the message).
        """
        size = self._options.batch_size
        parts: list[Batch] = []
        finished: list[Leased] = []
        rows: dict[Leased, int] = {}
        waiting = 0
        with ThreadPoolExecutor(1, thread_name_prefix="batch-reader") as pool:
            for item, chunk in self._prefetched(pool, work):
                part, start = item.part, item.done
                while chunk.rows - start >= size - waiting and start < chunk.rows:
                    stop = start + size - waiting
                    batch = concatenate([*parts, chunk.slice(start, stop)])
                    parts, waiting, start = [], 0, stop
                    done = finished + ([part] if start == chunk.rows else [])
                    used, finished, rows = {**rows, part: stop}, [], {}
                    yield Step(batch, used, done)
                if start < chunk.rows:
                    parts.append(chunk.slice(start, chunk.rows))
                    waiting += chunk.rows - start
                    # Its last rows wait for the next batch: it is finished with that one.
                    finished.append(part)
                    rows[part] = chunk.rows
        if parts:
            yield Step(concatenate(parts), rows, finished)

    def _prefetched(self, pool: ThreadPoolExecutor, work: Iterator[Work]) -> Iterator[tuple[Work, Batch]]:
        pending: tuple[Work, Future[Batch]] | None = None
        for item in work:
            following = (item, pool.submit(self._read, item.part))
            if pending:
                yield pending[0], pending[1].result()
            pending = following
        if pending:
            yield pending[0], pending[1].result()

    def _read(self, part: Leased) -> Batch:
        if isinstance(part, RowBuffer):
            places = part.parts
            chunk = concatenate(self._read_pieces(places))
        else:
            places = (part,)
            with _naming(part):
                chunk = self._decode(self._read_group(part).slice(part.start, part.rows), part)
        if self._options.shuffle_seed is None:
            return chunk
        seed = [self._options.shuffle_seed, self._options.epoch]
        for place in places:
            seed += [place.file, place.row_group, place.start]
        return chunk.take(np.random.default_rng(seed).permutation(chunk.rows))

    def _read_pieces(self, pieces: Sequence[RowRange]) -> list[Batch]:
        """The rows of each piece, in order; a row group that has several of them is read once."""
        by_group: dict[tuple[str, int], list[RowRange]] = {}
        for piece in pieces:
            by_group.setdefault((piece.path, piece.row_group), []).append(piece)
        found: dict[RowRange, Batch] = {}
        for group in by_group.values():
            with _naming(group[0]):
                tables = self._read_slices(group)
                found |= {
                    piece: self._decode(table, piece) for piece, table in zip(group, tables, strict=True)
                }
        return [found[piece] for piece in pieces]

    def _read_slices(self, pieces: Sequence[RowRange]) -> list[pa.Table]:
        """The needed columns of pieces of one row group; what lies between them is decoded, but not kept."""
        slices: list[list[pa.RecordBatch]] = [[] for _ in pieces]
        at, end = 0, max(piece.start + piece.rows for piece in pieces)
        with self._open(pieces[0]) as file:
            columns, group = self._present(file), pieces[0].row_group
            for batch in file.iter_batches(_SLICE_ROWS, row_groups=[group], columns=columns):
                for piece, found in zip(pieces, slices, strict=True):
                    low = max(piece.start - at, 0)
                    high = min(piece.start + piece.rows - at, batch.num_rows)
                    if low < high:
                        found.append(batch.slice(low, high - low))
                at += batch.num_rows
                if at >= end:
                    break
            whole = file.schema_arrow
            return [pa.Table.from_batches(found, found[0].schema if found else whole) for found in slices]

    def _decode(self, table: pa.Table, part: RowRange) -> Batch:
        chunk = decode(
            table, self._spec, labels=self._options.labels, sample_weight=self._options.sample_weight
        )
        if chunk.rows != part.rows:
            raise ValueError(
                f"the file changed while it was read: there are {chunk.rows} rows from {part.start} on. "
                f"Received: a range of {part.rows}"
            )
        return chunk

    def _read_group(self, part: RowRange) -> pa.Table:
        """The row group's needed columns; the last one is kept, since leases cut a group into pieces."""
        key = (part.path, part.row_group)
        if self._group is None or self._group[0] != key:
            with self._open(part) as file:
                self._group = (key, file.read_row_group(part.row_group, columns=self._present(file)))
        return self._group[1]

    @contextmanager
    def _open(self, part: RowRange) -> Iterator[pq.ParquetFile]:
        if self._cache is not None:
            with self._cache.open(part.path) as source, pq.ParquetFile(source) as file:
                yield file
            return
        filesystem, path = resolve(part.path)
        with pq.ParquetFile(path, filesystem=filesystem) as file:
            yield file

    def _present(self, file: pq.ParquetFile) -> list[str]:
        """The needed columns that the file has; `decode` names those that it lacks."""
        return [name for name in self._columns if name in file.schema_arrow.names]


@contextmanager
def _naming(part: RowRange) -> Iterator[None]:
    """Name the file and row group in what goes wrong with them."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"Cannot read row group {part.row_group} of {part.path}: {error}") from error
