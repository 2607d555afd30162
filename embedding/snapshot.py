"""A table as of one moment, read while training goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

import deeprec_spark.embedding._core as _core

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

GROUP_ROWS = 65536
"""Rows that are read at a time."""


@dataclass(frozen=True)
class RowBlock:
    """Some rows of a table, each one consistent in itself.

    `key`, `frequency` and `version` are int64 `[n]`, `value` and every slot float32 `[n, embedding_dim]` (`[n, 1]` for
    slots that a row has once). `time` (int64 `[n]`, seconds of the last update) is None without TimeEvict, `blocks`
    (int64 `[n]`) without a dynamic dimension. `rank` and `rank_refresh` (int64 `[n]`) are there under the rank rule:
    the decayed frequency (bits of a float32, shifted by 32) plus the frequency that it has taken in, as of so many
    refreshes.
    """

    key: Int64Array
    frequency: Int64Array
    version: Int64Array
    value: Float32Array
    slots: Mapping[str, Float32Array]
    time: Int64Array | None = None
    blocks: Int64Array | None = None
    rank: Int64Array | None = None
    rank_refresh: Int64Array | None = None

    def __len__(self) -> int:
        return len(self.key)


class TableSnapshot:
    """The content of a table at the moment of `EmbeddingVariable.snapshot`; training may go on meanwhile.

    Nothing is copied to begin one: rows that training changes before they are read are copied first, one by one. A
    table has one snapshot at a time. Close it: it keeps copies, and the next one waits for it. Closed before all rows,
    counts and tombstones were read, it is as if it had never been taken: its changes and removals are in the next one.

    Attributes:
        changed_only: whether it has only what changed since the last one.
        updates: updates applied to the table.
        calls: training lookups of the table.
        rank_refreshes: how often the ranks of a dynamic dimension were refreshed.
        rank_thresholds: what the last refresh gave; empty without the rank rule.
        num_rows: rows of all `blocks`.
        num_filtered: keys of all `filtered`.

    Example:
        >>> with table.snapshot() as snapshot:
        ...     for block in snapshot.blocks():
        ...         write(block)
    """

    def __init__(self, table: _core.Table, changed_only: bool) -> None:
        self.changed_only = changed_only
        self._core = _core.Snapshot(table, changed_only)
        self.updates = self._core.updates
        self.calls = self._core.calls
        self.rank_refreshes = self._core.rank_refreshes
        self.rank_thresholds = self._core.rank_thresholds
        self.num_rows = self._core.num_rows
        self.num_filtered = self._core.num_filtered

    def __enter__(self) -> TableSnapshot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def blocks(self, rows: int = GROUP_ROWS) -> Iterator[RowBlock]:
        """The rows, sorted by bucket, in blocks of at most `rows`; they can be read once."""
        for start in range(0, self.num_rows, rows):
            yield self.block(start, min(start + rows, self.num_rows))

    def block(self, start: int, stop: int) -> RowBlock:
        """The rows [start, stop) of that order, each once; several threads may read different ones at a time."""
        return RowBlock(**self._core.read(start, stop - start))

    def filtered(self, rows: int = GROUP_ROWS) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Keys that were only counted and their counts, sorted by bucket, at most `rows` at a time."""
        keys, counts = self._core.filtered()
        for start in range(0, len(keys), rows):
            yield keys[start : start + rows], counts[start : start + rows]

    @property
    def tombstones(self) -> Int64Array:
        """Keys whose row or count was removed since the previous snapshot, sorted by bucket.

        Keys that have a row again are left out. One that is only counted again is listed here and in `filtered`: take
        tombstones in before rows and counts. Empty unless `changed_only`.
        """
        return self._core.tombstones()

    def bloom(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """The counters of a CBFFilter, of the buckets [first, last): uint8 `[last - first, bytes]`."""
        return self._core.bloom(first, last)

    @property
    def copied(self) -> int:
        """Rows that are held as copies now, because training changed them before they were read."""
        return self._core.copied

    def close(self) -> None:
        """Free what is left; again and again is harmless."""
        self._core.close()
