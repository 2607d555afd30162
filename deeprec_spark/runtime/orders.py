"""Orders: what the driver tells single nodes while a phase runs, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deeprec_spark.runtime.errors import JobError


@dataclass(frozen=True)
class Answer:
    """One node's answer: JSON-able data and bytes, or the error that it met."""

    data: Mapping[str, Any] = field(default_factory=dict)
    blob: bytes = b""
    error_type: str = ""
    error: str = ""


@dataclass
class Order:
    """One order; `targets` are the incarnations that it is for, by rank. Guarded by the job's lock."""

    number: int
    kind: str
    payload: Mapping[str, Any]
    targets: Mapping[int, int]
    issued: float
    answers: dict[int, Answer] = field(default_factory=dict)

    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in self.targets if rank not in self.answers]


class OrderError(JobError):
    """A node could not carry out an order; `error_type` is the name of its exception."""

    def __init__(self, message: str, error_type: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class StorageError(OrderError):
    """A checkpoint could not be read for a reason of its storage that may pass: it did not answer, or not in time."""


class Orders:
    """The orders that are not done with, for the coordinator's handlers. Callers hold the job's lock."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, Order] = {}

    def issue(self, kind: str, payload: Mapping[str, Any], targets: Mapping[int, int], now: float) -> Order:
        """A new order for these incarnations, by rank."""
        self._last += 1
        order = Order(self._last, kind, dict(payload), dict(targets), now)
        self._open[order.number] = order
        return order

    def next_for(self, rank: int, incarnation: int, seen: int) -> Order | None:
        """The first order for this node after the one it has seen last."""
        for number, order in self._open.items():
            if number > seen and order.targets.get(rank) == incarnation and rank not in order.answers:
                return order
        return None

    def answer(self, number: int, rank: int, incarnation: int, answer: Answer) -> None:
        """A node's answer; one to an order that was closed meanwhile is dropped."""
        order = self._open.get(number)
        if order is not None and order.targets.get(rank) == incarnation:
            order.answers.setdefault(rank, answer)

    def close(self, order: Order) -> None:
        """Nobody waits for this order any more."""
        self._open.pop(order.number, None)
