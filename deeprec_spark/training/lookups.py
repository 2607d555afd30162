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

    def collect(self, columns: Mapping[str, npt.NDArray[Any]], recorded: Sequence[Int64Array]) -> Lookups:
        """The distinct keys of a batch.

        Args:
            columns: feature arrays by name.
            recorded: int64 `[n]` outputs of the recording trace.
        """
        ids = [self._ids(call, columns, recorded) for call in self.calls]
        names = [name for _, group in self.groups for name in group]
        per_table = [[ids[position] for position in self.tables[name]] for name in names]
        joined = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in per_table]
        uniques = dict(zip(names, unique_many(joined), strict=True))
        keys = {name: UniqueKeys(unique, counts) for name, (unique, _, counts) in uniques.items()}
        inverse, sizes = [], []
        for _, group in self.groups:
            total = sum(len(uniques[name][1]) for name in group)
            numbers: npt.NDArray[np.int32] = aligned_empty((total,), np.int32)
            start = offset = 0
            for name in group:
                unique, inverse_of_table, _ = uniques[name]
                stop = start + len(inverse_of_table)
                np.add(inverse_of_table, offset, out=numbers[start:stop])
                start, offset = stop, offset + len(unique)
            inverse.append(numbers)
            sizes.append(
                np.array([len(ids[position]) for name in group for position in self.tables[name]], np.int32)
            )
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
