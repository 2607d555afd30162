"""The state of a running job: members, the phase, and what has failed; one lock guards it all."""

from __future__ import annotations

import logging
import threading
import time

from deeprec_spark.runtime.errors import NodeError, NodeFailure
from deeprec_spark.runtime.membership import Member, Membership, MemberState
from deeprec_spark.runtime.options import CoordinatorOptions
from deeprec_spark.runtime.phases import PhaseState

logger = logging.getLogger(__name__)


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
        self.stopping = False
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

    def raise_failure(self) -> None:
        """Raise a NodeError if something has failed, after a moment for further reports.

        The first report may be a consequence: a lost server makes every worker fail. Servers come first, and a
        traceback says more than a silence. Called with the lock held.
        """
        if self.stopping:
            raise NodeError("The job was stopped.")
        if not self._failures and self._abort is None:
            return
        end = self._failed_at + self.options.failure_grace
        while time.monotonic() < end:
            self.driver.wait(end - time.monotonic())
        causes = sorted(self._failures, key=lambda one: (one.rank >= self.options.num_ps, not one.traceback))
        if not causes:
            raise NodeError(f"Spark ended the job's nodes: {self._abort}") from self._abort
        raise NodeError(f"{causes[0].node} failed; the job cannot go on.", causes) from self._abort

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
        queue = self.phase.queue if self.phase is not None else None
        returned = queue.release(member.rank) if queue is not None else 0
        if self.phase is not None and member.rank in self.phase.last_activity:
            self.phase.last_activity[member.rank] = time.monotonic()
        if self._may_rejoin(member.rank):
            name = self.members.name(member.rank)
            text = "%s was lost (%s); its %d leased items go to others; waiting for Spark to start it again"
            logger.warning(text, name, member.reason, returned)
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
            if now - member.lost_at > self.options.rejoin_timeout:
                waited = f"{self.options.rejoin_timeout:.0f} s"
                self.fail(self._failure(rank, f"{member.reason}, and was not started again within {waited}"))

    def _failure(self, rank: int, reason: str) -> NodeFailure:
        member = self.members.get(rank)
        tail = tuple(member.log_tail) if member is not None else ()
        return NodeFailure(rank, self.members.name(rank), reason, log_tail=tail)
