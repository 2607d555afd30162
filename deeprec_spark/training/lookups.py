"""From the ids of a batch to distinct keys, and from pulled rows to what the traced step takes.

All tables of one width travel as one tensor, so few tensors cross into TensorFlow whatever the number of tables:

    calls          user -> A     item -> B     friends -> A        (tables A and B of width 8)
    rows           [ A's distinct rows | B's distinct rows ]       float32 [unique, 8]
    inverse        [ user | friends | item ]                       int32 [ids], numbers of rows
    sizes          ids of each call, in this order                 int32 [calls]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deeprec_spark.embedding.hashing import unique_many
from deeprec_spark.embedding.store import SparseGradient, UniqueKeys
from deeprec_spark.training.buffers import aligned_empty, concatenate

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LookupCall:
    """One call of a SparseEmbedding: its table, and where its ids come from.

    `column` is the feature that reaches the layer unchanged; None where the model computes the ids, which then
    are the `recorded`-th output of the recording trace.
    """

    table: str
    dim: int
    column: str | None = None
    padding_value: int | None = None
    recorded: int | None = None


@dataclass(frozen=True)
class Lookups:
    """The distinct keys of a batch by table, and for each width how they spread over the calls."""

    keys: Mapping[str, UniqueKeys]
    inverse: Sequence[npt.NDArray[np.int32]]
    sizes: Sequence[npt.NDArray[np.int32]]


class LookupPlan:
    """The lookups of one traced step, in the order of its calls."""

    def __init__(self, calls: Sequence[LookupCall]) -> None:
        self.calls = list(calls)
        self.tables: dict[str, list[int]] = {}
        self.dims: dict[str, int] = {}
        for position, call in enumerate(self.calls):
            self.tables.setdefault(call.table, []).append(position)
            self.dims[call.table] = call.dim
        widths = sorted(set(self.dims.values()))
        self.groups = [
            (width, [name for name in self.tables if self.dims[name] == width]) for width in widths
        ]
        # Where the i-th call's rows lie: (group, position in the group).
        self.places: list[tuple[int, int]] = [(0, 0)] * len(self.calls)
        for group, (_, names) in enumerate(self.groups):
            order = [position for name in names for position in self.tables[name]]
            for place, position in enumerate(order):
                self.places[position] = (group, place)

    @property
    def needs_recording(self) -> bool:
        """Whether the model computes any ids."""
        return any(call.column is None for call in self.calls)

    def collect(
        self, parts: Sequence[tuple[Mapping[str, npt.NDArray[Any]], Sequence[Int64Array]]]
    ) -> list[Lookups]:
        """The distinct keys of a batch, and how each part of it spreads over them.

        Args:
            parts: of each part the feature arrays by name, and int64 `[n]` outputs of the recording trace.
        """
        ids = [[self._ids(call, columns, recorded) for call in self.calls] for columns, recorded in parts]
        names = [name for _, group in self.groups for name in group]
        per_table = [[part[position] for part in ids for position in self.tables[name]] for name in names]
        joined = [arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for arrays in per_table]
        uniques = dict(zip(names, unique_many(joined), strict=True))
        keys = {name: UniqueKeys(unique, counts) for name, (unique, _, counts) in uniques.items()}
        done = dict.fromkeys(names, 0)
        return [self._spread(part, uniques, keys, done) for part in ids]

    def _spread(
        self,
        ids: Sequence[Int64Array],
        uniques: Mapping[str, tuple[Int64Array, npt.NDArray[Any], Int64Array]],
        keys: Mapping[str, UniqueKeys],
        done: dict[str, int],
    ) -> Lookups:
        """One part's numbers of rows; `done` counts the ids of each table that earlier parts have used."""
        inverse, sizes = [], []
        for _, group in self.groups:
            lengths = [[len(ids[position]) for position in self.tables[name]] for name in group]
            numbers: npt.NDArray[np.int32] = aligned_empty((sum(map(sum, lengths)),), np.int32)
            start = offset = 0
            for name, of_calls in zip(group, lengths, strict=True):
                unique, inverse_of_table, _ = uniques[name]
                first, count = done[name], sum(of_calls)
                stop = start + count
                np.add(inverse_of_table[first : first + count], offset, out=numbers[start:stop])
                start, offset = stop, offset + len(unique)
                done[name] = first + count
            inverse.append(numbers)
            sizes.append(np.array([length for of_calls in lengths for length in of_calls], np.int32))
        return Lookups(keys, inverse, sizes)

    def empty(self) -> dict[str, UniqueKeys]:
        """The keys of a batch without samples."""
        none = np.empty(0, np.int64)
        return {name: UniqueKeys(none, none) for name in self.tables}

    def join_rows(self, rows: Mapping[str, Float32Array]) -> list[Float32Array]:
        """The pulled rows, one array for each width."""
        return [
            concatenate([rows[name] for name in group], (width,), np.float32) for width, group in self.groups
        ]

    def split_gradients(
        self, keys: Mapping[str, UniqueKeys], gradients: Sequence[Float32Array]
    ) -> dict[str, SparseGradient]:
        """The gradients of `join_rows`' arrays, by table."""
        result = {}
        for (_, group), gradient in zip(self.groups, gradients, strict=True):
            start = 0
            for name in group:
                stop = start + len(keys[name].keys)
                result[name] = SparseGradient(keys[name].keys, gradient[start:stop])
                start = stop
        return result

    @staticmethod
    def _ids(
        call: LookupCall, columns: Mapping[str, npt.NDArray[Any]], recorded: Sequence[Int64Array]
    ) -> Int64Array:
        if call.recorded is not None:
            return recorded[call.recorded]
        assert call.column is not None
        ids = columns[call.column].reshape(-1)
        if call.padding_value is not None:
            ids = ids[ids != call.padding_value]
        return np.ascontiguousarray(ids, np.int64)
