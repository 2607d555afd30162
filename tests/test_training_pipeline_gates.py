"""StepPipeline and its gate: held, shut, left out; the order of pulls and pushes does not depend on reading."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.runtime.gate import Standing, StepGate
from deeprec_spark.training.pipeline import Begin, OpenGate, PipelineOptions, StepPipeline
from deeprec_spark.training.trainer import Trainer, TrainerOptions
from tests.pipelined import STEPS, batches, model, tagged, trainer


class Recorder(OpenGate):
    """A gate that is shut at some steps, and writes down what it was told."""

    def __init__(self, held: set[int], stop: int | None = None, skipped: set[int] | None = None) -> None:
        self.held, self.stop, self.skipped = held, stop, skipped or set()
        self.log: list[tuple[str, int]] = []

    def begin(self, tag: Any, *, wait: bool) -> Begin:
        if tag == self.stop:
            return Begin.STOP
        if tag in self.skipped:
            return Begin.SKIP
        if tag in self.held and not wait:
            return Begin.HELD
        if tag in self.held:
            self.log.append(("waited", tag))
        self.log.append(("begin", tag))
        return Begin.GO

    def end(self, tag: Any) -> None:
        self.log.append(("end", tag))


def test_a_held_gate_is_waited_for_only_when_all_steps_that_began_have_ended() -> None:
    gate = Recorder(held={3})
    pipeline = StepPipeline(trainer(), PipelineOptions(depth=2, max_staleness=2), gate)
    list(pipeline.train(tagged(batches())))
    at = gate.log.index(("waited", 3))
    assert sorted(gate.log[:at]) == sorted((what, step) for step in range(3) for what in ("begin", "end"))
    assert [step for what, step in gate.log if what == "end"] == list(range(STEPS))


class Ordered(Trainer):
    """Writes down the pulls and pushes in their order."""

    def __init__(self) -> None:
        super().__init__(model(dropout=0.0), LocalStore(), TrainerOptions(seed=11))
        self.initialize(batches()[0])
        self.order: list[str] = []

    def pull(self, *arguments: Any) -> Any:
        """Note it."""
        self.order.append("pull")
        return super().pull(*arguments)

    def push(self, *arguments: Any) -> Any:
        """Note it."""
        self.order.append("push")
        return super().push(*arguments)


def test_batches_that_are_slow_to_be_read_change_no_order() -> None:
    made, nothing = Ordered(), threading.Event()

    def slow() -> Iterator[tuple[Batch, int]]:
        for entry in tagged(batches()):
            nothing.wait(0.05)
            yield entry

    list(StepPipeline(made, PipelineOptions(2, max_staleness=1)).train(slow()))
    assert made.order == ["pull", *["pull", "push"] * (STEPS - 1), "push"]


class Worker(OpenGate):
    """Passes a worker's gate, and says when a step has begun."""

    def __init__(self, watched: int) -> None:
        self.gate, self.watched, self.begun = StepGate(), watched, threading.Event()
        self.gate.enter(1)

    def begin(self, tag: Any, *, wait: bool) -> Begin:
        answer = self.gate.begin({0: tag + 1}, wait=wait)
        if answer and tag == self.watched:
            self.begun.set()
        return Begin.HELD if answer is None else Begin.GO

    def end(self, tag: Any) -> None:
        self.gate.end()

    def wait_for(self, batch: Future[Any]) -> bool:
        return self.gate.wait_for(batch)


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_save_does_not_wait_for_a_batch_that_is_slow_to_be_read(staleness: int) -> None:
    worker, read = Worker(watched=3), threading.Event()

    def source() -> Iterator[tuple[Batch, int]]:
        for batch, number in tagged(batches()):
            assert number < 4 or read.wait(30)
            yield batch, number

    def save() -> Standing:
        try:
            assert worker.begun.wait(30)
            worker.gate.hold(1)
            return worker.gate.run_to(1, target=-1, timeout=10)
        finally:
            worker.gate.release()
            read.set()

    pipeline = StepPipeline(trainer(dropout=0.0), PipelineOptions(2, staleness), worker)
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(save)
        assert list(pipeline.train(source())) == list(range(STEPS))
        assert saved.result(30) == Standing(1, steps=4, rows={0: 4})
    assert pipeline.stale_pulls == STEPS - 2, "all but the first one, and the first one after the save"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_gate_can_stop(staleness: int) -> None:
    made = trainer()
    gate = Recorder(held=set(), stop=4)
    pipeline = StepPipeline(made, PipelineOptions(max_staleness=staleness), gate)
    assert list(pipeline.train(tagged(batches()))) == [0, 1, 2, 3]
    assert made.step == 4


@pytest.mark.parametrize("depth", [0, 2])
def test_a_gate_can_leave_batches_out(depth: int) -> None:
    made = trainer()
    gate = Recorder(held=set(), skipped={0, 3, 4})
    assert list(StepPipeline(made, PipelineOptions(depth), gate).train(tagged(batches()))) == list(
        range(STEPS)
    )
    assert made.step == STEPS - 3
    assert [step for what, step in gate.log if what == "end"] == [1, 2, 5, 6]
