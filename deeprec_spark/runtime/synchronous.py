"""Synchronous steps on one server: all ranks' pulls merged into one, all ranks' gradients summed in rank order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from deeprec_spark.embedding.hashing import unique
from deeprec_spark.embedding.store import PullReply, PullRequest, PushRequest, SparseGradient, UniqueKeys

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
Number = TypeVar("Number", np.float32, np.int64)


@dataclass(frozen=True)
class MergedPull:
    """One pull for all ranks, and where each rank's rows are in its reply."""

    request: PullRequest
    positions: Mapping[int, Mapping[str, Int64Array]]

    def reply_for(self, rank: int, reply: PullReply, *, dense: bool) -> PullReply:
        """A rank's part of the merged reply."""
        rows = {table: reply.rows[table][positions] for table, positions in self.positions[rank].items()}
        return PullReply(rows, reply.dense if dense else None, reply.state if dense else None, reply.step)


def merge_pulls(requests: Mapping[int, PullRequest]) -> MergedPull:
    """Merge the ranks' pulls: each key once, its counts summed; first occurrence in rank order decides the order."""
    merged: dict[str, UniqueKeys] = {}
    positions: dict[int, dict[str, Int64Array]] = {rank: {} for rank in requests}
    for table in _tables(request.keys for request in requests.values()):
        parts = {rank: request.keys[table] for rank, request in requests.items() if table in request.keys}
        keys, inverse = _merged_keys({rank: part.keys for rank, part in parts.items()})
        counts = RankSum(np.zeros(len(keys), dtype=np.int64))
        for rank, part in parts.items():
            counts.add(inverse[rank], part.counts)
            positions[rank][table] = inverse[rank]
        merged[table] = UniqueKeys(keys, counts.total)
    dense = any(request.dense for request in requests.values())
    return MergedPull(PullRequest(merged, train=True, dense=dense), positions)


def merge_pushes(requests: Mapping[int, PushRequest]) -> PushRequest:
    """Sum the ranks' gradients, each weighted by its share of all samples, in rank order.

    Learning rates are those of the lowest rank that gives one. With no samples at all nothing but the step counts.
    """
    total = sum(request.samples for request in requests.values())
    weights = {
        rank: np.float32(request.samples / total if total else 0.0) for rank, request in requests.items()
    }
    active = {rank: request for rank, request in requests.items() if request.samples > 0}
    gradients: dict[str, SparseGradient] = {}
    for table in _tables(request.gradients for request in requests.values()):
        parts = {
            rank: request.gradients[table] for rank, request in active.items() if table in request.gradients
        }
        keys, inverse = _merged_keys({rank: part.keys for rank, part in parts.items()})
        dim = next(
            request.gradients[table].gradient.shape[1]
            for request in requests.values()
            if table in request.gradients
        )
        summed = RankSum(np.zeros((len(keys), dim), dtype=np.float32))
        for rank, part in parts.items():
            summed.add(inverse[rank], _scaled(part.gradient, weights[rank]))
        gradients[table] = SparseGradient(keys, summed.total)
    return PushRequest(
        gradients,
        dense_gradient=_weighted_sum(
            {rank: request.dense_gradient for rank, request in active.items()}, weights
        ),
        state_delta=_weighted_sum({rank: request.state_delta for rank, request in active.items()}, weights),
        samples=total,
        sparse_learning_rate=_first(request.sparse_learning_rate for request in requests.values()),
        dense_learning_rate=_first(request.dense_learning_rate for request in requests.values()),
    )


class RankSum(Generic[Number]):
    """Rows of all ranks, summed at their places in `total`; a rank costs by its own rows, however long `total` is.

    Clients send each key once, but repeated ones count as often as they occur.
    """

    def __init__(self, total: npt.NDArray[Number]) -> None:
        self.total: npt.NDArray[Number] = total
        # Never read where the same rank has not written before: it need not be cleared between ranks.
        self._last = np.empty(len(total), dtype=np.int64)

    def add(self, places: Int64Array, part: npt.NDArray[Number]) -> None:
        """Add rows `part` [n, …] at `places` [n]."""
        order = np.arange(len(places))
        self._last[places] = order
        if (self._last[places] == order).all():
            self.total[places] += part
        else:
            np.add.at(self.total, places, part)


def _merged_keys(keys: Mapping[int, Int64Array]) -> tuple[Int64Array, dict[int, Int64Array]]:
    """All ranks' keys once, and for each rank where its keys are among them."""
    if not keys:
        return np.empty(0, dtype=np.int64), {}
    merged, inverse, _ = unique(np.concatenate(list(keys.values())))
    places: dict[int, Int64Array] = {}
    at = 0
    for rank, part in keys.items():
        places[rank] = inverse[at : at + len(part)].astype(np.int64, copy=False)
        at += len(part)
    return merged, places


def _tables(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    """Every table that occurs, in order of first occurrence."""
    return list(dict.fromkeys(table for mapping in mappings for table in mapping))


def _scaled(gradient: Float32Array, weight: np.float32) -> Float32Array:
    return gradient if weight == 1 else gradient * weight


def _weighted_sum(
    parts: Mapping[int, Float32Array | None], weights: Mapping[int, np.float32]
) -> Float32Array | None:
    total: Float32Array | None = None
    for rank, part in parts.items():
        if part is not None:
            scaled = _scaled(part, weights[rank])
            total = scaled if total is None else total + scaled
    return total


def _first(rates: Iterable[float | None]) -> float | None:
    return next((rate for rate in rates if rate is not None), None)
