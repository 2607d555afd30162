"""From the ids of a batch to distinct keys, from pulled rows to what the traced step takes, and from the gradients that
it gives to those of the rows (DeepRec's GroupEmbedding and fused lookups).

All tables of one width travel as one tensor, so few tensors cross into TensorFlow whatever the number of tables:

    calls          user -> A     item -> B     friends -> A        (tables A and B of width 8)
    rows           [ A's distinct rows | B's distinct rows ]       float32 [unique, 8]
    inverse        [ user | friends | item ]                       int32 [ids], numbers of rows
    outputs        [ user | friends | item ]                       float32 [outputs, 8]
    sizes          outputs of each call, in this order             int32 [calls]

A call has an output for each id, or, where its layer combines the ids of a bag, one for each bag: the engine sums rows
while it spreads them, and gradients while it gathers them, so that what has a row for each id is never made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import deeprec_spark.embedding._core as _core
from deeprec_spark.embedding.hashing import unique_many
from deeprec_spark.embedding.store import SparseGradient, UniqueKeys
from deeprec_spark.training.buffers import aligned_empty, concatenate

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_COMBINERS = {None: 0, "sum": 0, "mean": 1, "sqrtn": 2}
_BY_ENDS = -1
_LAST_ROW = 5  # the column of `Lookups.calls`


@dataclass(frozen=True)
class LookupCall:
    """One call of a SparseEmbedding: its table, and where its ids come from.

    `column` is the feature that reaches the layer unchanged; None where the model computes the ids, which then
    are the `recorded`-th output of the recording trace. With a `combiner` each `length` ids, of which those equal to
    `padding_value` count for nothing, are a bag, and have one output together.
    """

    table: str
    dim: int
    column: str | None = None
    padding_value: int | None = None
    recorded: int | None = None
    combiner: str | None = None
    length: int = 1

    @property
    def fixed(self) -> bool:
        """Whether the number of outputs follows from the size of the batch."""
        return self.column is not None and (self.padding_value is None or self.combiner is not None)


@dataclass(frozen=True)
class Lookups:
    """The distinct keys of a batch by table, and for each width how they spread over the calls.

    For each width: `inverse` int32 `[ids]`, the row of each id; `ends` int32 `[bags]`, where the bags of calls with
    padding end, counted from the call's first id; `calls` int64 `[calls, 7]`, see `_core.sum_bags`: first id, outputs,
    ids of a bag (-1: as `ends` says), first of its `ends`, first row and last row + 1 of its table, combiner.
    """

    keys: Mapping[str, UniqueKeys]
    inverse: Sequence[Int32Array]
    ends: Sequence[Int32Array]
    calls: Sequence[Int64Array]

    @property
    def sizes(self) -> list[Int32Array]:
        """Outputs of each call, for each width."""
        return [calls[:, 1].astype(np.int32) for calls in self.calls]

    def spread(self, rows: Sequence[Float32Array]) -> list[Float32Array]:
        """The outputs of all calls `[outputs, width]`, of the distinct rows `[unique, width]`, for each width."""
        described = zip(rows, self.inverse, self.ends, self.calls, strict=True)
        return [_core.sum_bags(values, numbers, ends, calls) for values, numbers, ends, calls in described]


def sum_by_row(
    parts: Sequence[Lookups], gradients: Sequence[Sequence[Float32Array]], widths: Sequence[int]
) -> tuple[list[Float32Array], float]:
    """The gradients of the distinct rows, of those of `Lookups.spread` for each part; in the order of the ids.

    Returns:
        `[unique, width]` for each width, and a sum of all, which is finite only if every element is.
    """
    found, total = [], 0.0
    for place, width in enumerate(widths):
        rows, check = _core.sum_by_row(
            [gradient[place] for gradient in gradients],
            [part.inverse[place] for part in parts],
            [part.ends[place] for part in parts],
            [part.calls[place] for part in parts],
            int(parts[0].calls[place][:, _LAST_ROW].max()),
            width,
        )
        found.append(rows)
        total += check
    return found, total


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
    def widths(self) -> list[int]:
        """The width of each group of tables."""
        return [width for width, _ in self.groups]

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
        ids = [[_ids(call, columns, recorded) for call in self.calls] for columns, recorded in parts]
        names = [name for _, group in self.groups for name in group]
        per_table = [
            [part[position].values for part in ids for position in self.tables[name]] for name in names
        ]
        joined = [arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for arrays in per_table]
        uniques = dict(zip(names, unique_many(joined), strict=True))
        keys = {name: UniqueKeys(unique, counts) for name, (unique, _, counts) in uniques.items()}
        done = dict.fromkeys(names, 0)
        return [self._spread(part, uniques, keys, done) for part in ids]

    def _spread(
        self,
        ids: Sequence[_Ids],
        uniques: Mapping[str, tuple[Int64Array, npt.NDArray[Any], Int64Array]],
        keys: Mapping[str, UniqueKeys],
        done: dict[str, int],
    ) -> Lookups:
        """One part's numbers of rows; `done` counts the ids of each table that earlier parts have used."""
        inverse, ends, described = [], [], []
        for _, group in self.groups:
            total = sum(len(ids[position].values) for name in group for position in self.tables[name])
            numbers: Int32Array = aligned_empty((total,), np.int32)
            ends_of_calls: list[Int32Array] = []
            calls = []
            start = num_ends = first_row = 0
            for name in group:
                unique, inverse_of_table, _ = uniques[name]
                last_row = first_row + len(unique)
                count = sum(len(ids[position].values) for position in self.tables[name])
                taken = inverse_of_table[done[name] : done[name] + count]
                np.add(taken, first_row, out=numbers[start : start + count])
                done[name] += count
                for position in self.tables[name]:
                    found, combiner = ids[position], _COMBINERS[self.calls[position].combiner]
                    length = found.length if found.ends is None else _BY_ENDS
                    calls.append((start, found.outputs, length, num_ends, first_row, last_row, combiner))
                    start += len(found.values)
                    if found.ends is not None:
                        ends_of_calls.append(found.ends)
                        num_ends += len(found.ends)
                first_row = last_row
            inverse.append(numbers)
            ends.append(np.concatenate([np.empty(0, np.int32), *ends_of_calls]))
            described.append(np.array(calls, np.int64))
        return Lookups(keys, inverse, ends, described)

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


@dataclass(frozen=True)
class _Ids:
    """The ids of one call that count: `outputs` bags of `length` ids each, or as `ends` says."""

    values: Int64Array
    outputs: int
    length: int = 1
    ends: Int32Array | None = None


def _ids(call: LookupCall, columns: Mapping[str, npt.NDArray[Any]], recorded: Sequence[Int64Array]) -> _Ids:
    if call.recorded is not None:
        ids = recorded[call.recorded]
        return _Ids(ids, len(ids) // call.length, call.length)
    assert call.column is not None
    ids = columns[call.column].reshape(-1)
    bags = len(ids) // call.length
    if call.padding_value is None:
        return _Ids(np.ascontiguousarray(ids, np.int64), bags, call.length)
    counted = ids != call.padding_value
    values = np.ascontiguousarray(ids[counted], np.int64)
    if call.combiner is None:
        return _Ids(values, len(values))
    lengths = np.count_nonzero(counted.reshape(bags, call.length), axis=1)
    return _Ids(values, bags, ends=np.cumsum(lengths, dtype=np.int32))
