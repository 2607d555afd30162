"""The coordinator of a job, in the driver: membership, phases, leases, logs and failures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from deeprec_spark.runtime.errors import RegistrationError
from deeprec_spark.runtime.job_state import JobState
from deeprec_spark.runtime.node_service import NodeService
from deeprec_spark.runtime.options import CoordinatorOptions
from deeprec_spark.runtime.phases import Phase, PhaseResult, PhaseState, Progress
from deeprec_spark.runtime.transport import MessageServer

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[list[Progress]], None]


class Coordinator:
    """Runs in the driver beside the Estimator; nodes call it.

    Example:
        >>> with Coordinator(CoordinatorOptions(num_ps=1, num_workers=2)) as coordinator:  # doctest: +SKIP
        ...     options = LaunchOptions.of(coordinator, "module:main", payload)
        ...     group = launch_nodes(spark, options, on_failure=coordinator.abort)
        ...     results = coordinator.run_phase(Phase("train", items=[{"path": "a.parquet"}]))
        ...     coordinator.stop()
        ...     group.wait()
    """

    def __init__(self, options: CoordinatorOptions) -> None:
        self.options = options
        self._state = JobState(options)
        self._driver = self._state.driver
        self._members = self._state.members
        self._phases = 0
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

    @property
    def address(self) -> str:
        """`host:port` that nodes connect to."""
        return self._server.address

    @property
    def token(self) -> str:
        """The job's secret."""
        return self.options.token

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every node runs.

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
                self._driver.wait(left)

    def run_phase(
        self, phase: Phase, on_progress: ProgressCallback | None = None, *, timeout: float | None = None
    ) -> list[PhaseResult]:
        """Hand a phase to its workers and wait for all their results, in rank order.

        Arguments:
            on_progress: called in this thread with each worker's newest progress whenever there is some.
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
            state = self._begin(phase, ranks)
            try:
                while not state.finished:
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
                    self._report(state, on_progress)
            finally:
                self._state.phase = None
                self._state.changed()
            if state.queue is not None and not state.queue.finished:
                raise RuntimeError(
                    f"Phase {phase.kind!r} left items undone: workers must lease until there is none, and complete "
                    f"each. Received: pending={state.queue.pending}, leased={state.queue.leased}"
                )
            return [state.results[rank] for rank in ranks]

    def abort(self, error: BaseException) -> None:
        """The job cannot go on (e.g. Spark gave it up): whoever waits here gets this as the cause."""
        self._state.abort(error)

    def stop(self, timeout: float = 30.0) -> None:
        """Tell the nodes to end, wait up to `timeout` seconds for them, and close the server. May be repeated."""
        with self._driver:
            if self._state.stopping:
                return
            self._state.stopping = True
            self._state.changed()
            gone = self._driver.wait_for(
                lambda: self._state.aborted or not self._members.any_alive(), timeout
            )
            if not gone:
                alive = [rank for rank in range(self.options.num_nodes) if self._members.is_alive(rank)]
                logger.warning("Still running after stop: %s", ", ".join(map(self._members.name, alive)))
        self._watcher.join(timeout)
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

    def _report(self, state: PhaseState, on_progress: ProgressCallback | None) -> None:
        """Call back without the lock, so that a slow callback holds up no node."""
        if on_progress is None or not state.unseen_progress:
            return
        state.unseen_progress = False
        newest = [state.progress[rank] for rank in sorted(state.progress)]
        self._driver.release()
        try:
            on_progress(newest)
        finally:
            self._driver.acquire()


__all__ = ["Coordinator", "CoordinatorOptions", "Phase", "PhaseResult", "Progress"]
