"""StepPipeline (DeepRec's SmartStage): the stages of successive steps overlapped, without the model knowing.

    reading, prepare   a thread:     batch 3 │ batch 4 │ batch 5        up to `depth` batches ahead
    pull, push         a thread:     pull 2, push 0 │ pull 3, push 1    only with max_staleness > 0
    compute            the caller:   batch 1 │ batch 2 │ batch 3        or, with max_staleness > 0, some threads
    measure            the caller

With `max_staleness=0` a batch's rows are pulled after all earlier batches were pushed: the result is, bit for bit, that
of one `train_step` after the other. With `max_staleness=s` a pull may run before the last s pushes of this worker, so
that the store's work overlaps with computing; the order of pulls and pushes is still fixed, not a matter of timing:
a batch that is slow to be read is waited for before the pushes that come after its pull, unless the gate is shut.
Steps whose rows are there then compute side by side, `parallel_steps` of them: TensorFlow leaves cores idle between and
within its operations, which the other step uses. That changes no result either.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from deeprec_spark.data.batch import Batch
from deeprec_spark.tracing.stages import StageClock
from deeprec_spark.training import function_options

if TYPE_CHECKING:
    from deeprec_spark.embedding.store import PullReply
    from deeprec_spark.training.prepared import PreparedBatch
    from deeprec_spark.training.train_program import TrainResult
    from deeprec_spark.training.trainer import Trainer

Tag = TypeVar("Tag")
Gated = TypeVar("Gated", contravariant=True)


@dataclass(frozen=True)
class PipelineOptions:
    """How far stages of later steps may run ahead.

    Args:
        depth: batches that are read and prepared ahead of the step that computes; 0 does all in the caller's thread.
        max_staleness: pushes of this worker that a pull may run ahead of; 0 gives the result of unpipelined steps. None
            is 1 for a job's asynchronous workers with servers, and 0 for all others.
        parallel_steps: steps that compute at the same time, once their rows are there: `max_staleness` + 1 at most have
            them. Models that change a state in this process (random numbers, as of dropout), XLA and micro batches
            compute one step after the other.
        warmup_updates: updates of the store before which no pull runs ahead, since the first ones change a model most.
            None is 500 where `max_staleness` is the job's choice, and 0 where it is given.
    """

    depth: int = 2
    max_staleness: int | None = None
    parallel_steps: int = 2
    warmup_updates: int | None = None

    @property
    def staleness(self) -> int:
        """`max_staleness`, where nobody has put a number for None."""
        return self.max_staleness or 0

    def __post_init__(self) -> None:
        if self.parallel_steps < 1:
            raise ValueError(
                f"parallel_steps must be at least 1. Received: parallel_steps={self.parallel_steps}"
            )
        if self.depth < 0 or self.staleness < 0 or (self.warmup_updates or 0) < 0:
            raise ValueError(
                "depth, max_staleness and warmup_updates must not be negative. "
                f"Received: depth={self.depth}, max_staleness={self.max_staleness}, "
                f"warmup_updates={self.warmup_updates}"
            )
        if self.staleness > 0 and self.depth == 0:
            raise ValueError(
                "Pulls can only run ahead of batches that are prepared ahead: set depth to at least 1. "
                f"Received: depth=0, max_staleness={self.max_staleness}"
            )


class Begin(enum.Enum):
    """What a gate says to a step that wants to begin."""

    GO = "go"
    HELD = "held"  # not now: let what has begun come to its end, then ask again and wait
    SKIP = "skip"  # leave this batch out, and go on with the next
    STOP = "stop"  # no step begins any more


class Gate(Protocol[Gated]):
    """Who may keep steps from beginning, and is told of those that ended; called in the order of the steps.

    A step that is HELD is asked for again once an earlier one has ended, with `wait` once all have.
    """

    def begin(self, tag: Gated, *, wait: bool) -> Begin:
        """Before a step's pull. With `wait` it does not answer HELD. A batch to SKIP has no `end`."""

    def end(self, tag: Gated) -> None:
        """After a step's push, in the thread that pushed."""

    def wait_for(self, batch: Future[Any]) -> bool:
        """While steps have begun: wait until the next batch is there. False: end them without it, the gate is shut."""


class OpenGate:
    """Lets every step pass."""

    def begin(self, tag: object, *, wait: bool) -> Begin:
        """Always GO."""
        return Begin.GO

    def end(self, tag: object) -> None:
        """Nothing to do."""

    def wait_for(self, batch: Future[Any]) -> bool:
        """Wait for every batch."""
        wait([batch])
        return True


class StepPipeline:
    """Trains on a stream of batches with the stages of a Trainer's steps overlapped.

    Args:
        trainer: an initialized Trainer.
        options: see PipelineOptions.
        gate: asked before each step's pull, told after each push.
        clock: counts the seconds of each stage.

    Example:
        >>> pipeline = StepPipeline(trainer, PipelineOptions(depth=2))
        >>> for number in pipeline.train((batch, number) for number, batch in enumerate(batches)):
        ...     print("trained", number)
    """

    def __init__(
        self,
        trainer: Trainer,
        options: PipelineOptions | None = None,
        gate: Gate[Any] | None = None,
        clock: StageClock | None = None,
    ) -> None:
        self._trainer = trainer
        self._gate: Gate[Any] = gate or OpenGate()
        self.clock = clock or StageClock()
        self.options = options or PipelineOptions()
        self._updates = 0  # of the store, when the last step that has computed was pulled
        self.stale_pulls = 0
        """Pulls that ran ahead of at least one push of this worker."""

    def train(self, batches: Iterable[tuple[Batch, Tag]]) -> Iterator[Tag]:
        """Train on every batch, in order; yields each one's tag once its update is in the store.

        `batches` is advanced in another thread where there is a depth, and is closed before this ends. It is not
        finished when the gate says STOP.
        What a stage raises is raised here, after the stages that run have ended. Batches that were read ahead are then
        dropped untrained. A batch without samples is a step all the same (see `Trainer.train_empty`).
        """
        with ExitStack() as stack:
            source = iter(batches)
            stack.callback(_close, source)
            if self.options.depth == 0:
                yield from self._in_order(iter(lambda: self._read(source), None))
                return
            reader = _executor(stack, "prepare")
            # The trace that finds a batch's ids is made in the caller's thread: Keras keeps its scopes by thread.
            self._trainer.record()
            steps = _StepsAhead(lambda: self._read(source), reader, self.options.depth, self.clock)
            if self.options.staleness == 0:
                yield from self._in_order(steps)
            else:
                computers = None
                if self.options.parallel_steps > 1:
                    computers = _executor(stack, "compute", self.options.parallel_steps)
                yield from self._ahead(steps, _executor(stack, "store"), computers)

    def _read(self, batches: Iterator[tuple[Batch, Tag]]) -> _Step[Tag] | None:
        """The next batch, read and prepared; None where there is no more."""
        with self.clock.stage("read"):
            entry = next(batches, None)
        if entry is None:
            return None
        batch, tag = entry
        if not batch.size:
            return batch, None, tag
        with self.clock.stage("prepare"):
            return batch, self._trainer.prepare(batch), tag

    def _in_order(self, steps: Iterable[_Step[Tag]]) -> Iterator[Tag]:
        for step in steps:
            answer = self._begin(step[2], wait=True)
            if answer is Begin.STOP:
                return
            if answer is not Begin.SKIP:
                result = self._compute(step, self._pull(step))
                self._measure(step, result)
                self._push(step, result)
            yield step[2]

    def _ahead(
        self, steps: _StepsAhead[Tag], store: ThreadPoolExecutor, computers: ThreadPoolExecutor | None
    ) -> Iterator[Tag]:
        """Pulls and pushes in one thread, so that their order is fixed: pull i + max_staleness, then push i."""
        pulled: deque[tuple[_Step[Tag], Future[PullReply | None]]] = deque()
        computed: deque[tuple[_Step[Tag], Future[PullReply | None], Future[TrainResult | None]]] = deque()
        pushed: deque[tuple[Tag, Future[None]]] = deque()
        waiting: _Step[Tag] | None = None
        stopped = False

        def begin_computing() -> None:
            while computers is not None and pulled and self._may_join(pulled[0][0], computed):
                step, reply = pulled.popleft()
                computed.append((step, reply, computers.submit(self._compute_pulled, step, reply)))

        while True:
            begin_computing()
            while not stopped and len(pulled) + len(computed) <= self._staleness():
                begun = bool(pulled or computed)
                if waiting is None:
                    if begun and not self._wait_for_batch(steps.coming):
                        break
                    waiting = next(steps, None)
                if waiting is None:
                    break
                if not begun:
                    yield from self._finished(pushed, all_of_them=True)
                answer = self._begin(waiting[2], wait=not begun)
                if answer is Begin.HELD:
                    break
                if answer is Begin.STOP:
                    stopped = True
                    break
                if answer is Begin.SKIP:
                    raise RuntimeError(
                        "Steps can be left out only where no pull runs ahead (max_staleness=0)."
                    )
                self.stale_pulls += begun
                pulled.append((waiting, store.submit(self._pull, waiting)))
                begin_computing()
                # One that is there makes room for another to be read, though it may not begin yet.
                waiting = next(steps, None) if steps.coming.done() else None
            if computed:
                step, reply, found = computed.popleft()
                self._note(self._wait_for(reply))
                result = found.result()
            elif pulled:
                step, reply = pulled.popleft()
                result = self._compute(step, self._note(self._wait_for(reply)))
            else:
                break
            self._measure(step, result)
            pushed.append((step[2], store.submit(self._push, step, result)))
            yield from self._finished(pushed, all_of_them=False)
        yield from self._finished(pushed, all_of_them=True)

    def _staleness(self) -> int:
        """How many pushes a pull may run ahead of now."""
        return self.options.staleness if self._updates >= (self.options.warmup_updates or 0) else 0

    def _note(self, reply: PullReply | None) -> PullReply | None:
        """Count updates by what pulls say of them: in the order of the steps, so that timing decides nothing."""
        if reply is not None:
            self._updates = reply.step
        return reply

    def _wait_for_batch(self, batch: Future[Any]) -> bool:
        with self.clock.stage("wait"):
            return self._gate.wait_for(batch)

    def _may_join(self, step: _Step[Any], computed: Sized) -> bool:
        """Whether a step may compute beside those that do now, if any."""
        _, prepared, _ = step
        if prepared is None or len(computed) >= self.options.parallel_steps:
            return False
        return self._trainer.overlaps(prepared)

    def _compute_pulled(self, step: _Step[Any], reply: Future[PullReply | None]) -> TrainResult | None:
        return self._compute(step, reply.result())

    def _wait_for(self, reply: Future[PullReply | None]) -> PullReply | None:
        """The rows of the first step that has not ended. Pulls are in order, so without these nothing computes."""
        with self.clock.stage("wait"):
            return reply.result()

    def _finished(self, pushed: deque[tuple[Tag, Future[None]]], *, all_of_them: bool) -> Iterator[Tag]:
        """The tags whose push has ended, in order; raises what a push raised."""
        while pushed and (all_of_them or pushed[0][1].done()):
            tag, future = pushed.popleft()
            with self.clock.stage("wait"):
                future.result()
            yield tag

    def _begin(self, tag: Any, *, wait: bool) -> Begin:
        with self.clock.stage("wait"):
            return self._gate.begin(tag, wait=wait)

    def _pull(self, step: _Step[Any]) -> PullReply | None:
        _, prepared, _ = step
        if prepared is None:
            return None
        with self.clock.stage("pull"):
            return self._trainer.pull(prepared)

    def _compute(self, step: _Step[Any], reply: PullReply | None) -> TrainResult | None:
        _, prepared, _ = step
        if prepared is None or reply is None:
            return None
        with self.clock.stage("compute"):
            return self._trainer.compute(prepared, reply)

    def _measure(self, step: _Step[Any], result: TrainResult | None) -> None:
        _, prepared, _ = step
        if prepared is not None and result is not None:
            with self.clock.stage("measure"):
                self._trainer.measure(prepared, result)

    def _push(self, step: _Step[Any], result: TrainResult | None) -> None:
        batch, prepared, tag = step
        with self.clock.stage("push"):
            if prepared is None or result is None:
                self._trainer.train_step(batch)
            else:
                self._trainer.push(prepared, result)
        self._gate.end(tag)


_Step = tuple[Batch, "PreparedBatch | None", Tag]
"""A batch, its first stage's result (None: it has no samples, or was not prepared), and its tag."""


class _StepsAhead(Generic[Tag]):
    """The steps of a stream, read and prepared up to `depth` batches ahead in a thread of `reader`.

    Args:
        read: the next step; None where there is no more.
        reader: of one thread.
        depth: at least 1.
        clock: counts the seconds of waits.
    """

    def __init__(
        self, read: Callable[[], _Step[Tag] | None], reader: ThreadPoolExecutor, depth: int, clock: StageClock
    ) -> None:
        self._read = read
        self._reader = reader
        self._clock = clock
        self._ahead = deque(reader.submit(read) for _ in range(depth))

    @property
    def coming(self) -> Future[_Step[Tag] | None]:
        """The next step, once it is read."""
        return self._ahead[0]

    def __iter__(self) -> Iterator[_Step[Tag]]:
        return self

    def __next__(self) -> _Step[Tag]:
        with self._clock.stage("wait"):
            step = self.coming.result()
        if step is None:
            raise StopIteration
        self._ahead.popleft()
        self._ahead.append(self._reader.submit(self._read))
        return step


def _executor(stack: ExitStack, name: str, threads: int = 1) -> ThreadPoolExecutor:
    """Threads that end with the stack; they run TensorFlow's functions as the caller's does (the executor policy)."""
    pool = ThreadPoolExecutor(
        threads, f"step-{name}", initializer=function_options.adopt, initargs=(function_options.current(),)
    )
    stack.callback(pool.shutdown, wait=True, cancel_futures=True)
    return pool


def _close(batches: Iterator[Any]) -> None:
    """End a generator whose reading was given up, so that what it holds is freed now."""
    close = getattr(batches, "close", None)
    if close is not None:
        close()
