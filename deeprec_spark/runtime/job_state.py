"""The state of a running job: members, the phase, and what has failed; one lock guards it all."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from deeprec_spark.runtime.errors import ConnectionLostError, NodeError, NodeFailure
from deeprec_spark.runtime.gate import rows_of
from deeprec_spark.runtime.membership import Member, Membership, MemberState
from deeprec_spark.runtime.options import CoordinatorOptions
from deeprec_spark.runtime.orders import Order, Orders
from deeprec_spark.runtime.phases import PhaseState

logger = logging.getLogger(__name__)

Owner = tuple[int, int]
"""Who holds a lease: a rank, and which incarnation of it."""


class JobState:
    """Shared by the driver's side of the coordinator and the handlers of the nodes' calls.

    Hold the lock (that of `nodes`, and of `driver`) while reading or changing anything. Calls of nodes wait on
    `nodes`, the driver's thread on `driver`, so that frequent reports of many nodes wake one thread only.
    """

    def __init__(self, options: CoordinatorOptions) -> None:
        self.options = options
        lock = threading.RLock()
        self.nodes = threading.Condition(lock)
        self.driver = threading.Condition(lock)
        self.members = Membership(options, self.nodes, self._lost, self.changed)
        self.phase: PhaseState | None = None
        self.orders = Orders()
        # While a save holds the workers: who ran when it began. Others do not start on a phase.
        self.cut: dict[int, int] | None = None
        self.stopping = False
        self._fences: deque[Owner] = deque()
        self._absent: set[Owner] = set()
        self._failures: list[NodeFailure] = []
        self._failed_at = 0.0
        self._abort: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether nodes must end: stopped, or failed."""
        return self.stopping or bool(self._failures) or self._abort is not None

    @property
    def aborted(self) -> bool:
        """Whether the nodes are known to be gone: Spark ended their tasks."""
        return self._abort is not None

    def changed(self) -> None:
        """Wake everybody who waits; called with the lock held."""
        self.nodes.notify_all()
        self.driver.notify_all()

    def running(self, number: int) -> PhaseState | None:
        """The current phase if it is the one of this number."""
        return self.phase if self.phase is not None and self.phase.number == number else None

    def abort(self, error: BaseException) -> None:
        """Record that the job cannot go on for a reason outside the nodes."""
        with self.nodes:
            if not self.stopping and self._abort is None:
                for member in self.members.lost():
                    self.fail(self._failure(member.rank, member.reason))
                self._abort = error
                self._failed_at = self._failed_at or time.monotonic()
                self.changed()

    def fail(self, failure: NodeFailure) -> None:
        """Record a node's failure; the first one of each rank counts."""
        with self.nodes:
            if self.stopping or any(known.rank == failure.rank for known in self._failures):
                return
            self._failures.append(failure)
            self._failed_at = self._failed_at or time.monotonic()
            self.changed()

    def watch(self) -> None:
        """Run until the job stops: give up members whose deadline passes."""
        with self.nodes:
            while not self.stopping:
                self.members.expire()
                self._fail_absent_workers()
                self.nodes.wait(self.options.heartbeat_interval / 2)

    @property
    def fencing(self) -> bool:
        """Whether it is not known yet what lost workers have pushed."""
        return bool(self._fences)

    def targets(self, ranks: range | list[int]) -> dict[int, int]:
        """The incarnations that run of these ranks. Called with the lock held."""
        members = {rank: self.members.get(rank) for rank in ranks}
        return {
            rank: member.incarnation
            for rank, member in members.items()
            if member is not None and member.state is MemberState.RUNNING
        }

    def fence_lost(self) -> None:
        """Run until the job stops: ask the servers what a lost worker has pushed, and give back the rest.

        From their answers on they refuse its pushes: what comes later would train rows that others train.
        """
        with self.nodes:
            while not self.stopping:
                if not self._fences:
                    self.nodes.wait(self.options.heartbeat_interval)
                    continue
                owner = self._fences[0]
                try:
                    rows = self._pushed_rows(owner)
                except ValueError as error:
                    logger.warning("Where %s was is not known: %s", self.members.name(owner[0]), error)
                    rows = {}
                state = self.phase
                if state is not None and state.queue is not None:
                    redo = state.phase.redo_lost and owner[0] not in state.results
                    returned = state.queue.release(owner, rows, redo=redo)
                    if returned:
                        name = self.members.name(owner[0])
                        logger.warning("%d items that %s had leased go to others", returned, name)
                self._fences.popleft()
                self.changed()

    def _pushed_rows(self, owner: Owner) -> dict[int, int]:
        """Rows by item of the running phase that this worker has pushed, as its servers know."""
        rank, incarnation = owner
        number = 0 if self.phase is None else self.phase.number
        payload = {"rank": rank, "incarnation": incarnation}
        order = self.orders.issue("fence", payload, self.targets(self.options.server_ranks), time.monotonic())
        self.changed()
        while (
            order.missing()
            and not self.ended
            and time.monotonic() - order.issued < self.options.order_timeout
        ):
            self.nodes.wait(self.options.heartbeat_interval)
        self.orders.close(order)
        if self.ended:
            return {}
        positions = self._positions(order, self.members.name(rank))
        if not positions or positions[0] is None or positions[0].get("phase") != number:
            return {}
        return rows_of(positions[0].get("rows"))

    def _positions(self, order: Order, name: str) -> list[Mapping[str, Any] | None]:
        """Where each server says the worker's last push was; the job fails if they do not say, or not the same.

        Then nobody knows which rows are trained, and a restart from the last checkpoint loses none.
        """
        positions: list[Mapping[str, Any] | None] = []
        for server in order.targets:
            answer = order.answers.get(server)
            if answer is None or answer.error_type:
                why = "no answer" if answer is None else f"{answer.error_type}: {answer.error}"
                self.fail(
                    self._failure(server, f"did not say what {name}, which was lost, has pushed: {why}")
                )
                return []
            position = answer.data.get("position")
            positions.append(position if isinstance(position, Mapping) else None)
            if positions[0] != positions[-1]:
                reason = f"the last push of {name}, which was lost, has reached only some of the servers"
                self.fail(self._failure(server, reason))
                return []
        return positions

    def raise_failure(self) -> None:
        """Raise a NodeError if something has failed, after a moment for further reports.

        The first report may be a consequence: a lost server makes every worker fail. Servers come first, and a
        traceback says more than a silence, unless it is that of a lost connection. Called with the lock held.
        """
        if self.stopping:
            raise NodeError("The job was stopped.")
        if not self._failures and self._abort is None:
            return
        end = self._failed_at + self.options.failure_grace
        while time.monotonic() < end:
            self.driver.wait(end - time.monotonic())
        causes = sorted(self._failures, key=self._lateness)
        if not causes:
            raise NodeError(f"Spark ended the job's nodes: {self._abort}") from self._abort
        raise NodeError(f"{causes[0].node} failed; the job cannot go on.", causes) from self._abort

    def _lateness(self, failure: NodeFailure) -> tuple[bool, bool, bool]:
        """Sorts likely causes before consequences."""
        lost_another = failure.reason.startswith(ConnectionLostError.__name__)
        return failure.rank >= self.options.num_ps, lost_another, not failure.traceback

    def fail_stalled(self) -> None:
        """Record a failure for each worker that lives but makes no progress in the phase."""
        state = self.phase
        if state is None:
            return
        now = time.monotonic()
        for rank in state.unfinished_ranks():
            silent = now - state.last_activity[rank]
            if silent > self.options.stall_timeout:
                reason = f"made no progress in phase {state.phase.kind!r} for {silent:.0f} s (stall_timeout)"
                self.fail(self._failure(rank, reason))

    def _lost(self, member: Member) -> None:
        """A member died without a word of its own."""
        if self.phase is not None and member.rank in self.phase.last_activity:
            self.phase.last_activity[member.rank] = time.monotonic()
        if self._may_rejoin(member.rank):
            name = self.members.name(member.rank)
            logger.warning("%s was lost (%s); waiting for Spark to start it again", name, member.reason)
            self._fences.append((member.rank, member.incarnation))
        else:
            self.fail(self._failure(member.rank, member.reason))

    def _may_rejoin(self, rank: int) -> bool:
        """An asynchronous job with servers outlives its workers; everything else holds state that is gone."""
        return self.options.mode == "async" and rank >= self.options.num_ps > 0

    def _fail_absent_workers(self) -> None:
        now = time.monotonic()
        for rank in self.options.worker_ranks:
            member = self.members.get(rank)
            if member is None or member.state is not MemberState.LOST or not self._may_rejoin(rank):
                continue
            if now - member.lost_at <= self.options.rejoin_timeout:
                continue
            waited = f"{self.options.rejoin_timeout:.0f} s"
            if self._needed(rank):
                self.fail(self._failure(rank, f"{member.reason}, and was not started again within {waited}"))
            elif (rank, member.incarnation) not in self._absent:
                self._absent.add((rank, member.incarnation))
                name = self.members.name(rank)
                logger.warning("%s was not started again within %s; going on without it", name, waited)

    def _needed(self, rank: int) -> bool:
        """Whether the job cannot go on without this worker: the phase waits for it alone, or no other one is left.

        It also does where items are left, and each other worker that lives has given its result and asks for no more.
        """
        others = [
            other for other in self.options.worker_ranks if other != rank and self.members.is_alive(other)
        ]
        state = self.phase
        if not others or state is None:
            return not others
        unfinished = state.unfinished_ranks()
        if state.queue is None:
            return rank in unfinished
        undone = not state.stopped and not state.queue.finished
        return undone and rank in unfinished and not set(others) & set(unfinished)

    def _failure(self, rank: int, reason: str) -> NodeFailure:
        member = self.members.get(rank)
        tail = tuple(member.log_tail) if member is not None else ()
        return NodeFailure(rank, self.members.name(rank), reason, log_tail=tail)
