"""The coordinator of a job, in the driver: membership, phases, leases, logs and failures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from deeprec_spark.runtime.errors import NodeError, RegistrationError
from deeprec_spark.runtime.job_state import JobState
from deeprec_spark.runtime.node_service import NodeService
from deeprec_spark.runtime.options import CoordinatorOptions
from deeprec_spark.runtime.orders import Answer, Order, OrderError
from deeprec_spark.runtime.phases import Phase, PhaseResult, PhaseState, Progress
from deeprec_spark.runtime.transport import MessageServer

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[list[Progress]], None]

_CUT_WAITS = 8
"""A cut ends within so many order_timeouts: hold, run to, fence, fix (once more if whole), release; two to spare."""


class Coordinator:
    """Runs in the driver beside the Estimator; nodes call it.

    Example:
        >>> with Coordinator(CoordinatorOptions(num_ps=1, num_workers=2)) as coordinator:  # doctest: +SKIP
        ...     options = LaunchOptions.of(coordinator, "module:main", payload)
        ...     group = launch_nodes(spark, options, on_failure=coordinator.abort)
        ...     results = coordinator.run_phase(Phase("train", items=[{"path": "a.parquet"}]))
        ...     coordinator.finish()
        ...     group.wait()
    """

    def __init__(self, options: CoordinatorOptions) -> None:
        self.options = options
        self._state = JobState(options)
        self._driver = self._state.driver
        self._members = self._state.members
        self._phases = 0
        self._closed = False
        self._server = MessageServer(
            NodeService(self._state).handlers(),
            host=options.host,
            port=options.port,
            token=options.token,
            tls=options.tls,
            bind_host=options.bind_host,
            max_bytes=options.max_message_bytes,
        )
        self._watcher = threading.Thread(target=self._state.watch, name="coordinator-watch", daemon=True)
        self._watcher.start()
        self._fencer = threading.Thread(target=self._state.fence_lost, name="coordinator-fence", daemon=True)
        self._fencer.start()

    @property
    def address(self) -> str:
        """`host:port` that nodes connect to."""
        return self._server.address

    @property
    def token(self) -> str:
        """The job's secret."""
        return self.options.token

    def wait_ready(self, timeout: float | None = None, on_tick: Callable[[], None] | None = None) -> None:
        """Wait until every node runs; `on_tick` is called in this thread now and then.

        Raises:
            RegistrationError: not all did within `timeout` (default: options.registration_timeout) seconds.
            NodeError: one failed meanwhile.
        """
        limit = self.options.registration_timeout if timeout is None else timeout
        end = time.monotonic() + limit
        ranks = range(self.options.num_nodes)
        with self._driver:
            while not self._members.all_running(ranks):
                self._state.raise_failure()
                left = end - time.monotonic()
                if left <= 0:
                    raise RegistrationError(
                        f"Not all {len(ranks)} nodes of the job registered within {limit:.0f} s. Each needs a "
                        "free task slot: see that no other job holds them, and that executors reach the driver "
                        f"(spark.driver.host). Received: {self._members.describe_missing(ranks)}"
                    )
                self._driver.wait(min(left, self.options.heartbeat_interval))
                if on_tick is not None:
                    self._without_lock(on_tick)

    def run_phase(
        self,
        phase: Phase,
        on_progress: ProgressCallback | None = None,
        on_tick: Callable[[], None] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[PhaseResult]:
        """Hand a phase to its workers and wait for their results, in rank order.

        A lost worker's result is missing where its items are done without it.

        Arguments:
            on_progress: called in this thread with each worker's newest progress whenever there is some.
            on_tick: called in this thread every few seconds at least, after `on_progress`.
            timeout: seconds for the whole phase; None: as long as nodes live and make progress.

        Raises:
            NodeError: a node failed, was lost, or made no progress; with its traceback and last log lines.
            RegistrationError: the nodes never came up.
            TimeoutError: the phase did not end in time; names who has not finished.
            ValueError: the phase names ranks that are no workers.
        """
        ranks = self._ranks_of(phase)
        if self._phases == 0:
            self.wait_ready()
        end = None if timeout is None else time.monotonic() + timeout
        with self._driver:
            self._wait_for_cut()
            state = self._begin(phase, ranks)
            try:
                while not self._is_finished(state):
                    self._state.raise_failure()
                    self._state.fail_stalled()
                    left = self.options.heartbeat_interval
                    if end is not None:
                        left = min(left, end - time.monotonic())
                        if left <= 0:
                            missing = ", ".join(self._members.name(rank) for rank in state.unfinished_ranks())
                            raise TimeoutError(
                                f"Phase {phase.kind!r} did not end in {timeout:g} s. Missing: {missing}"
                            )
                    self._driver.wait(left)
                    self._report(state, on_progress, on_tick)
                self._wait_for_cut()
            finally:
                self._state.phase = None
                self._state.changed()
            if state.queue is not None and not state.queue.finished and not state.stopped:
                raise RuntimeError(
                    f"Phase {phase.kind!r} left items undone: workers must lease until there is none, and complete "
                    f"each. Received: pending={state.queue.pending}, leased={state.queue.leased}"
                )
            return [state.results[rank] for rank in ranks if rank in state.results]

    def order(
        self,
        kind: str,
        payload: Mapping[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> dict[int, Answer]:
        """Tell nodes to do something beside their phase, and wait for all answers; by rank.

        Safe from any thread, also during a phase. A worker that is lost meanwhile and may come back is left out.

        Arguments:
            ranks: of nodes that run; None for all nodes. Those that do not run are left out.
            timeout: seconds; None for options.order_timeout.

        Raises:
            NodeError: a node failed, or did not answer in time; names it.
            OrderError: a node could not do it.
        """
        wanted = range(self.options.num_nodes) if ranks is None else list(ranks)
        limit = self.options.order_timeout if timeout is None else timeout
        with self._driver:
            order = self._state.orders.issue(
                kind, payload or {}, self._state.targets(wanted), time.monotonic()
            )
            self._state.changed()
            try:
                self._wait_for_answers(order, limit)
            finally:
                self._state.orders.close(order)
        for rank, answer in sorted(order.answers.items()):
            if answer.error_type:
                raise OrderError(
                    f"{self._members.name(rank)} could not {kind}: {answer.error_type}: {answer.error}",
                    answer.error_type,
                )
        return order.answers

    def begin_cut(self) -> tuple[int, list[int]]:
        """From now on no worker that joins starts on a phase; the number of the running phase, 0 without one.

        Raises:
            RuntimeError: there is a cut already.
        """
        with self._driver:
            if self._state.cut is not None:
                raise RuntimeError("One save at a time may hold the workers. Received: a second one")
            self._state.cut = self._state.targets(self.options.worker_ranks)
            phase = self._state.phase
            if phase is not None and self.options.mode == "async":
                # Who has not begun on the phase need not be held: it will not begin now.
                joined = self._state.cut.items() & phase.joined
                self._state.cut = dict(joined)
            return 0 if phase is None else phase.number, sorted(self._state.cut)

    def end_cut(self, *, stop: bool = False) -> None:
        """Phases go on; with `stop` the running one ends, its workers having been told so by their gates."""
        with self._driver:
            self._state.cut = None
            if stop and self._state.phase is not None:
                self._state.phase.stopped = True
            self._state.changed()

    def wait_fenced(self, timeout: float) -> None:
        """Wait until it is known what lost workers have pushed.

        Raises:
            NodeError: a node failed, or the servers did not say in time.
        """
        end = time.monotonic() + timeout
        with self._driver:
            while self._state.fencing:
                self._state.raise_failure()
                left = end - time.monotonic()
                if left <= 0:
                    raise NodeError(
                        f"Servers did not say within {timeout:.0f} s what lost workers have pushed."
                    )
                self._driver.wait(left)

    def queue_position(self, rows: Mapping[int, int]) -> dict[str, Any] | None:
        """Which items of the running phase are done, given the rows of leased ones; None if it has no queue."""
        with self._driver:
            queue = None if self._state.phase is None else self._state.phase.queue
            return None if queue is None else queue.position(rows)

    @property
    def next_phase(self) -> int:
        """The number that the next phase will have."""
        with self._driver:
            return self._phases + 1

    def running_workers(self) -> list[int]:
        """The ranks of the workers that run, in rising order."""
        with self._driver:
            return sorted(self._state.targets(self.options.worker_ranks))

    def abort(self, error: BaseException) -> None:
        """The job cannot go on (e.g. Spark gave it up): whoever waits here gets this as the cause."""
        self._state.abort(error)

    def finish(self, timeout: float = 30.0) -> None:
        """Tell the nodes to end, and wait up to `timeout` seconds for them. May be repeated.

        Calls are answered until `stop`: a task that Spark starts again now must hear that there is nothing to do.
        """
        with self._driver:
            if not self._state.stopping:
                self._state.stopping = True
                self._state.changed()
            gone = self._driver.wait_for(
                lambda: self._state.aborted or not self._members.any_alive(), timeout
            )
            if not gone:
                alive = [rank for rank in range(self.options.num_nodes) if self._members.is_alive(rank)]
                logger.warning("Still running after the end: %s", ", ".join(map(self._members.name, alive)))

    def stop(self, timeout: float = 30.0) -> None:
        """`finish`, then close the server. May be repeated.

        Where Spark runs the nodes, wait for its job (`NodeGroup.wait`) between `finish` and this.
        """
        self.finish(timeout)
        if self._closed:
            return
        self._closed = True
        self._watcher.join(timeout)
        self._fencer.join(timeout)
        self._server.stop()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(timeout=30.0 if error is None else 5.0)

    def _ranks_of(self, phase: Phase) -> tuple[int, ...]:
        workers = self.options.worker_ranks
        ranks = tuple(workers if phase.ranks is None else phase.ranks)
        if not ranks or list(ranks) != sorted(set(ranks)) or not set(ranks) <= set(workers):
            raise ValueError(
                f"Phase.ranks must be worker ranks in rising order, of {workers.start} to {workers.stop - 1} here "
                f"(lower ones are servers). Received: ranks={list(ranks)}"
            )
        if phase.assignment is not None and len(phase.assignment) != len(ranks):
            raise ValueError(
                f"Phase.assignment needs a list for each of {len(ranks)} ranks. Received: {len(phase.assignment)}"
            )
        return ranks

    def _begin(self, phase: Phase, ranks: tuple[int, ...]) -> PhaseState:
        running = self._state.phase
        if running is not None:
            raise RuntimeError(
                f"Phases run one after another. Received: {phase.kind!r} during {running.phase.kind!r}"
            )
        self._phases += 1
        activity = dict.fromkeys(ranks, time.monotonic())
        state = PhaseState(self._phases, phase, ranks, phase.queue(), last_activity=activity)
        self._state.phase = state
        self._state.changed()
        return state

    def _is_finished(self, state: PhaseState) -> bool:
        """Whether nobody is waited for: lost workers, and those that come late, are not where all items are done."""
        if state.finished or not state.out_of_work:
            return state.finished
        taking_part = [
            rank
            for rank, incarnation in self._state.targets(state.unfinished_ranks()).items()
            if (rank, incarnation) in state.joined
        ]
        return not taking_part and not self._state.fencing

    def _wait_for_cut(self) -> None:
        """A phase does not begin or end under a save that is asking its workers where they are."""
        limit = _CUT_WAITS * self.options.order_timeout
        end = time.monotonic() + limit
        while self._state.cut is not None and not self._state.ended:
            if time.monotonic() >= end:
                raise NodeError(
                    f"A save has held the workers for {limit:.0f} s, and no phase may go on with it."
                )
            self._driver.wait(self.options.heartbeat_interval)

    def _wait_for_answers(self, order: Order, timeout: float) -> None:
        end = order.issued + timeout
        while True:
            self._state.raise_failure()
            missing = [
                rank
                for rank in order.missing()
                if self._state.targets([rank]).get(rank) == order.targets[rank]
            ]
            if not missing:
                return
            left = end - time.monotonic()
            if left <= 0:
                names = ", ".join(self._members.name(rank) for rank in missing)
                raise NodeError(
                    f"Order {order.kind!r} was not answered within {timeout:.0f} s. Missing: {names}"
                )
            self._driver.wait(left)

    def _report(
        self,
        state: PhaseState,
        on_progress: ProgressCallback | None,
        on_tick: Callable[[], None] | None,
    ) -> None:
        """Call back without the lock, so that a slow callback holds up no node."""
        seen = state.unseen_progress
        state.unseen_progress = False
        newest = [state.progress[rank] for rank in sorted(state.progress)]
        if on_progress is not None and seen:
            self._without_lock(lambda: on_progress(newest))
        if on_tick is not None:
            self._without_lock(on_tick)

    def _without_lock(self, call: Callable[[], None]) -> None:
        self._driver.release()
        try:
            call()
        finally:
            self._driver.acquire()


__all__ = ["Coordinator", "CoordinatorOptions", "Phase", "PhaseResult", "Progress"]
