"""RowBuffer: rows of several row groups that are shuffled together; what a worker leases with `shuffle_rows`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deeprec_spark.data.dataset import ParquetDataset, RowRange

SOURCES = 4
"""Pieces of a full buffer: larger row groups are cut, so that each buffer has rows of about so many places.

A row group that is cut is decoded once for each of its pieces; whole ones, with four in a buffer, are decoded once.
"""


@dataclass(frozen=True)
class RowBuffer:
    """Pieces of row groups, read into memory and shuffled as one.

    The order is a function of seed, epoch and these pieces, as that of a `RowRange` is: "the first n rows" says the
    same to whoever reads it.
    """

    parts: tuple[RowRange, ...]

    def __hash__(self) -> int:
        """By the first part: buffers of an epoch share none, and there may be thousands of them in each."""
        return hash((self.parts[:1], len(self.parts)))

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """The buffer as JSON-able data."""
        return {"parts": [part.to_dict() for part in self.parts], "rows": self.rows}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RowBuffer:
        """The buffer that `to_dict` described."""
        return cls(tuple(RowRange.from_dict(part) for part in data["parts"]))


Leased = RowRange | RowBuffer
"""What a worker leases."""


def leased_from_dict(data: Mapping[str, Any]) -> Leased:
    """What either kind's `to_dict` described."""
    return RowBuffer.from_dict(data) if "parts" in data else RowRange.from_dict(data)


def pieces(dataset: ParquetDataset, buffer_rows: int) -> ParquetDataset:
    """The rows in ranges of at most a quarter of a buffer: row groups as they are where they are no larger."""
    return dataset.chunked(max(buffer_rows // SOURCES, 1))


def buffers(dataset: ParquetDataset, buffer_rows: int) -> list[RowBuffer]:
    """Successive ranges packed into buffers of at most `buffer_rows` rows (one range at least).

    Example:
        >>> data = ParquetDataset(tuple(RowRange("a", 0, group, 0, 3) for group in range(5)))
        >>> [buffer.rows for buffer in buffers(data, 7)]
        [6, 6, 3]
    """
    return [RowBuffer(tuple(parts)) for parts in _packed(dataset.ranges, buffer_rows)]


def _packed(ranges: Sequence[RowRange], buffer_rows: int) -> Iterator[list[RowRange]]:
    parts: list[RowRange] = []
    rows = 0
    for part in ranges:
        if parts and rows + part.rows > buffer_rows:
            yield parts
            parts, rows = [], 0
        parts.append(part)
        rows += part.rows
    if parts:
        yield parts
