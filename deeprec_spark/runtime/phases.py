"""Phases: what the driver asks all workers to do together, and what comes back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deeprec_spark.runtime.work_queue import Lease, WorkQueue

Item = Mapping[str, Any]


@dataclass(frozen=True)
class Phase:
    """One round of work, e.g. an epoch of training, an evaluation, a save.

    Arguments:
        kind: what the worker's main switches on.
        payload: JSON-able settings, the same for every rank.
        items: work handed out dynamically: a worker leases the next item when it is ready for it.
        assignment: or work fixed beforehand: one list of items for each of `ranks`, in their order.
        ranks: the worker ranks that take part (ranks below num_ps are servers); None for all workers.
        blob: bytes for the workers, e.g. weights.
        redo_lost: what a lost worker completed is done again, because its result is lost with it.
    """

    kind: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    items: Sequence[Item] | WorkQueue | None = None
    assignment: Sequence[Sequence[Item]] | None = None
    ranks: Sequence[int] | None = None
    blob: bytes = b""
    redo_lost: bool = False

    def __post_init__(self) -> None:
        if self.items is not None and self.assignment is not None:
            raise ValueError(f"A phase has items or an assignment. Received: both, kind={self.kind!r}")

    def queue(self) -> WorkQueue | None:
        """The queue that hands out `items`."""
        if self.items is None or isinstance(self.items, WorkQueue):
            return self.items
        return WorkQueue(self.items)


@dataclass(frozen=True)
class PhaseResult:
    """What one worker gave back: JSON-able data and bytes."""

    rank: int
    data: Mapping[str, Any]
    blob: bytes = b""


@dataclass(frozen=True)
class Progress:
    """The newest report of one worker in the current phase."""

    rank: int
    data: Mapping[str, Any]


@dataclass
class LeaseRequest:
    """The newest request of a worker's thread, and what it got: asked again under its number, it gets the same."""

    number: int
    lease: Lease | None = None


@dataclass
class PhaseState:
    """The coordinator's book of the running phase; guarded by its lock."""

    number: int
    phase: Phase
    ranks: tuple[int, ...]
    queue: WorkQueue | None
    results: dict[int, PhaseResult] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    last_activity: dict[int, float] = field(default_factory=dict)
    joined: set[tuple[int, int]] = field(default_factory=set)
    requests: dict[tuple[int, int, int], LeaseRequest] = field(default_factory=dict)
    moved: float = field(default_factory=time.monotonic)
    unseen_progress: bool = False
    stopped: bool = False

    def active(self, rank: int) -> None:
        """This rank has moved the phase on."""
        self.last_activity[rank] = self.moved = time.monotonic()

    def request(self, caller: tuple[int, int, int], number: int) -> LeaseRequest:
        """The newest request of a caller (rank, incarnation, thread): that of this number, or a later one."""
        known = self.requests.get(caller)
        if known is None or known.number < number:
            known = self.requests[caller] = LeaseRequest(number)
        return known

    def waits(self, rank: int) -> None:
        """This rank waits for what others hold: it is as active as they are, so a wait of all for all has an end."""
        self.last_activity[rank] = max(self.last_activity.get(rank, 0.0), self.moved)

    @property
    def finished(self) -> bool:
        """Whether every rank has given its result."""
        return len(self.results) == len(self.ranks)

    @property
    def out_of_work(self) -> bool:
        """Whether nothing is left to hand out or to wait for: ranks that are not there are not needed."""
        return bool(self.results) and (self.stopped or (self.queue is not None and self.queue.finished))

    def unfinished_ranks(self) -> list[int]:
        """The ranks that still work."""
        return [rank for rank in self.ranks if rank not in self.results]

    def message_for(self, rank: int) -> dict[str, Any]:
        """The JSON that tells a worker what to do."""
        assignment = self.phase.assignment
        return {
            "number": self.number,
            "kind": self.phase.kind,
            "payload": dict(self.phase.payload),
            "dynamic": self.queue is not None,
            "items": [dict(item) for item in assignment[self.ranks.index(rank)]]
            if assignment is not None
            else [],
        }
