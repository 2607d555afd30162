"""A consistent cut through a running job: workers between two steps, tables fixed at that moment."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deeprec_spark.embedding.store import CheckpointFile, SaveBaseError
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.runtime.coordinator import Coordinator
from deeprec_spark.runtime.errors import JobError, RemoteError
from deeprec_spark.runtime.gate import Standing
from deeprec_spark.runtime.orders import Answer, OrderError, StorageError
from deeprec_spark.runtime.store_messages import file_from_dict

logger = logging.getLogger(__name__)

_MAY_PASS = frozenset(kind.__name__ for kind in (OSError, TimeoutError, RemoteError))

WHAT_HAS_BEGUN = -1
"""As the target of `run_to`: finish the step that has begun."""


@dataclass(frozen=True)
class WorkerState:
    """Where a worker stood at a cut, and what it told of itself."""

    standing: Standing
    data: Mapping[str, Any] = field(default_factory=dict)
    blob: bytes = b""


@dataclass(frozen=True)
class Cut:
    """A moment of a job.

    `workers` are by rank; `queue` says which items of the phase are done, None where it has no queue; `step` is that
    of the tables. `base` is what the fixed tables build on, None if they are whole. `pause` are the seconds for which
    the slowest worker was held. `position` is what the caller of `take` made of all this.
    """

    save_id: str
    base: str | None
    phase: int
    step: int
    workers: Mapping[int, WorkerState]
    queue: Mapping[str, Any] | None
    pause: float = 0.0
    position: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps of the phase that the workers had done; of a synchronous job, all of them did as many."""
        return max((state.standing.steps for state in self.workers.values()), default=0)


@dataclass(frozen=True)
class OpenCut:
    """A cut that has begun: through which phase (0: none), and the workers to hold."""

    phase: int
    ranks: Sequence[int]


class Cutter:
    """Takes cuts of one job, one at a time."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        options = coordinator.options
        self._synchronous = options.mode == "sync"
        self._timeout = options.order_timeout
        self.table_ranks = list(options.table_ranks)

    def begin(self) -> OpenCut:
        """Begin a cut now; `take` does the rest, in whatever thread, or `give_up` ends it.

        Called by the thread that runs the phases, the cut is of the phase that runs, which does not end before the cut.

        Raises:
            RuntimeError: there is a cut already.
        """
        return OpenCut(*self._coordinator.begin_cut())

    def give_up(self) -> None:
        """End the cut that was begun and nothing else."""
        self._coordinator.end_cut()

    def take(
        self,
        base: str | None = None,
        describe: Callable[[Cut], Mapping[str, Any]] | None = None,
        opened: OpenCut | None = None,
    ) -> Cut:
        """Fix the tables between two steps of all workers; training goes on when this returns.

        What is fixed must be written by `write`, or given up by `drop`.

        Arguments:
            base: the save that the tables' changes are counted from; if a node does not know it, all is fixed.
            describe: makes the `position` of the cut, while the workers are still held.
            opened: the cut that `begin` began; None begins one.

        Raises:
            NodeError: a node failed.
            OrderError: a node could not fix its tables.
        """
        save_id = uuid.uuid4().hex
        opened = opened or self.begin()
        phase, ranks = opened.phase, opened.ranks
        try:
            try:
                workers = self._hold(phase, ranks)
                self._coordinator.wait_fenced(self._timeout)
                rows = {i: done for state in workers.values() for i, done in state.standing.rows.items()}
                queue = self._coordinator.queue_position(rows)
                base, step = self._snapshot(save_id, base)
                cut = Cut(save_id, base, phase, step, workers, queue)
                position = {} if describe is None else describe(cut)
            except BaseException:
                self._end(ranks, quiet=True)
                raise
            return replace(cut, pause=self._end(ranks), position=position)
        except BaseException:
            # Tables have one snapshot at a time: left fixed, they could not be saved any more.
            self.drop(save_id)
            raise

    def stop_phase(self) -> None:
        """End the running phase between two steps: its workers finish as if there were nothing more to do."""
        phase, ranks = self._coordinator.begin_cut()
        try:
            self._hold(phase, ranks)
        except BaseException:
            self._end(ranks, quiet=True)
            raise
        self._end(ranks, stop=True)

    def write(self, cut: Cut, directory: str) -> tuple[list[CheckpointFile], float]:
        """Have every node with tables write its part below `directory`; the files, and the longest node's seconds.

        Raises:
            NodeError: a node failed.
            OrderError: a node could not write.
        """
        payload = {"save_id": cut.save_id, "directory": directory}
        timeout = self._coordinator.options.file_timeout
        answers = self._coordinator.order("write", payload, self.table_ranks, timeout=timeout)
        files = [file_from_dict(entry) for answer in answers.values() for entry in answer.data["files"]]
        return files, max(answer.data["seconds"] for answer in answers.values())

    def drop(self, save_id: str) -> None:
        """Give up what was fixed; a node that does not answer is left alone."""
        try:
            self._coordinator.order("drop", {"save_id": save_id}, self.table_ranks)
        except JobError as error:
            logger.warning("A save could not be given up everywhere: %s", error)

    def restore(self, chain: list[str], save_id: str | None, warm_start: WarmStart | None = None) -> int:
        """Have every node with tables read its part of a checkpoint and its deltas; the step they are of.

        Raises:
            NodeError: a node failed.
            OrderError: a node could not read it; a StorageError if it may be able to later.
        """
        warm = None if warm_start is None else warm_start.to_dict()
        payload = {"chain": chain, "save_id": save_id, "warm_start": warm}
        timeout = self._coordinator.options.file_timeout
        try:
            answers = self._coordinator.order("restore", payload, self.table_ranks, timeout=timeout)
        except OrderError as error:
            if error.error_type not in _MAY_PASS:
                raise
            raise StorageError(str(error), error.error_type) from error
        return max(int(answer.data["step"]) for answer in answers.values())

    def _hold(self, phase: int, ranks: Sequence[int]) -> dict[int, WorkerState]:
        """Bring all workers to a stop between two steps, synchronous ones after the same step."""
        order = self._coordinator.order
        begun = order("hold", {"phase": phase}, ranks)
        target = WHAT_HAS_BEGUN
        if self._synchronous:
            target = max((int(answer.data["begun"]) for answer in begun.values()), default=0)
        payload = {"phase": phase, "target": target, "timeout": self._timeout}
        return {
            rank: _state(answer) for rank, answer in sorted(order("run_to", payload, list(begun)).items())
        }

    def _snapshot(self, save_id: str, base: str | None) -> tuple[str | None, int]:
        order = self._coordinator.order
        try:
            answers = order("snapshot", {"save_id": save_id, "base": base}, self.table_ranks)
        except OrderError as error:
            # A node that has fixed its tables gives that up when it is asked again.
            if base is None or error.error_type != SaveBaseError.__name__:
                raise
            logger.info("A full save instead of an incremental one: %s", error)
            return self._snapshot(save_id, None)
        return base, max(int(answer.data["step"]) for answer in answers.values())

    def _end(self, ranks: Sequence[int], *, stop: bool = False, quiet: bool = False) -> float:
        """Let the workers go on; the seconds that the slowest one was held."""
        pauses: list[float] = []
        try:
            answers = self._coordinator.order("release", {"stop": stop}, ranks)
            pauses = [float(answer.data["pause"]) for answer in answers.values()]
        except JobError as error:
            if not quiet:
                raise
            logger.warning("Workers could not be told to go on: %s", error)
        finally:
            self._coordinator.end_cut(stop=stop)
        return max(pauses, default=0.0)


def _state(answer: Answer) -> WorkerState:
    return WorkerState(Standing.from_dict(answer.data), answer.data["state"], answer.blob)
