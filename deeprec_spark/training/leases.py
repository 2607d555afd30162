"""The batches of a phase's rows, from leases that are begun with their first step and not before.

    round 1    lease A, lease B │ batches read ahead …        until nothing is free to be leased now
                    A begun with its first step; B is taken over by an idle worker: refused, the round ends
    round 2    what is left of A
    waits      with nothing held: an item that comes free, or one that another worker has not begun

So a slow worker keeps no more than the lease that it works on, however far its reading is ahead.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deeprec_spark.data import Batch, BatchReader, Work
from deeprec_spark.data.shuffle import Leased, leased_from_dict
from deeprec_spark.runtime.pace import Pace
from deeprec_spark.runtime.worker_client import LeasedItem, PhaseTask, WorkerClient
from deeprec_spark.tracing.stages import StageClock


@dataclass(frozen=True)
class LeasedStep:
    """A batch, the items that its rows are of, how many rows of each are used with it, and which it finishes."""

    batch: Batch
    items: Sequence[LeasedItem]
    rows: Mapping[int, int]
    finished: Sequence[LeasedItem]


class LeasedBatches:
    """Reads what this worker has leased in a phase, in rounds.

    Batches of a round may be taken in another thread; all else is called in one, `next_round` once the round before is
    closed and none of its steps is under way.

    Args:
        client: leases and completes.
        reader: makes batches.
        task: the phase.
        pace: told of batches that were read, and before a wait for rows.
        clock: counts the seconds of waits.
        skip: so many assigned rows are left out at the beginning.

    Example:
        >>> while (batches := leases.next_round()) is not None:  # doctest: +SKIP
        ...     for batch, step in batches:
        ...         if not leases.begin(step):
        ...             break
        ...         trainer.train_step(batch)
        ...         leases.complete(step)
    """

    def __init__(
        self,
        client: WorkerClient,
        reader: BatchReader,
        task: PhaseTask,
        pace: Pace,
        clock: StageClock,
        skip: int = 0,
    ) -> None:
        self._client = client
        self._reader = reader
        self._dynamic = task.dynamic
        self._pace = pace
        self._clock = clock
        self._skip = skip
        self._held: dict[Leased, LeasedItem] = {}
        self._begun: set[int] = set()
        self._done: dict[int, int] = {}
        self._refused: set[int] = set()

    def next_round(self) -> Generator[tuple[Batch, LeasedStep]] | None:
        """What is held and can be leased without a wait; waits where that is nothing; None if all rows are done."""
        self._held = {part: item for part, item in self._held.items() if item.index not in self._refused}
        self._refused.clear()
        work = [Work(part, self._done.get(item.index, item.done)) for part, item in self._held.items()]
        while not work:
            item = self._client.lease(wait=False)
            if item is None:
                # What others hold may come back, but not while they wait for what is held here: nothing is now.
                self._pace.starving()
                with self._clock.stage("wait"):
                    item = self._client.lease()
            if item is None:
                return None
            work = self._hold(item)
        return self._read(work)

    def begin(self, step: LeasedStep, under_way: int = 0) -> bool | None:
        """Before a step: its items are begun, so that nobody takes them over from now on.

        False if an idle worker has taken one over: end the round then. None if the step must wait for the `under_way`
        rows of steps that have not ended; see `WorkerClient.begin`.
        """
        for item in step.items:
            if item.index not in self._begun:
                granted = self._client.begin(item, under_way=under_way)
                if granted is None:
                    return None
                if not granted:
                    self._refused.add(item.index)
                    return False
                self._begun.add(item.index)
        return True

    def complete(self, step: LeasedStep) -> None:
        """After a step: give back the items whose last row was in it."""
        self._done.update(step.rows)
        for item in step.finished:
            self._client.complete(item)
            del self._held[leased_from_dict(item.data)]
            self._begun.discard(item.index)
            del self._done[item.index]

    def _hold(self, item: LeasedItem) -> list[Work]:
        """The work of an item, if there is any."""
        part = leased_from_dict(item.data)
        done = item.done if self._dynamic else min(self._skip, part.rows)
        self._skip -= 0 if self._dynamic else done
        if done == part.rows:
            return []
        self._held[part] = item
        return [Work(part, done)]

    def _read(self, work: Sequence[Work]) -> Generator[tuple[Batch, LeasedStep]]:
        def more() -> Iterator[Work]:
            yield from work
            while (item := self._client.lease(wait=False)) is not None:
                yield from self._hold(item)

        for step in self._reader.steps(more()):
            items = [self._held[part] for part in step.rows]
            rows = {self._held[part].index: count for part, count in step.rows.items()}
            self._pace.reading()
            finished = [self._held[part] for part in step.finished]
            yield step.batch, LeasedStep(step.batch, items, rows, finished)
