"""The clock of a worker's stages, and the ring that keeps the last spans."""

from __future__ import annotations

import threading

import pytest

from deeprec_spark.tracing.spans import SpanRing, TraceBounds
from deeprec_spark.tracing.stages import STAGES, StageClock


def busy(seconds: float) -> None:
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_seconds_add_up_by_stage() -> None:
    clock = StageClock()
    for _ in range(2):
        with clock.stage("pull"):
            busy(0.01)
    assert set(clock.seconds) == set(STAGES)
    assert clock.seconds["pull"] >= 0.02
    assert sum(clock.seconds.values()) == clock.seconds["pull"]


def test_a_stage_that_fails_does_not_count() -> None:
    clock = StageClock(SpanRing(TraceBounds(10)))
    with pytest.raises(KeyError), clock.stage("compute"):
        raise KeyError("batch")
    assert clock.seconds["compute"] == 0.0
    assert clock.spans is not None
    assert clock.spans.drain() == []


def test_stages_of_two_threads_do_not_mix() -> None:
    clock = StageClock(SpanRing(TraceBounds(100)))
    rounds = 20

    def work(stage: str) -> None:
        for _ in range(rounds):
            with clock.stage(stage):
                busy(0.0001)

    threads = [threading.Thread(target=work, args=(stage,), name=f"{stage} thread") for stage in STAGES[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert clock.spans is not None
    spans = clock.spans.drain()
    for stage in STAGES[:2]:
        mine = [span for span in spans if span.name == stage]
        assert [span.number for span in mine] == list(range(1, rounds + 1))
        assert {span.thread for span in mine} == {f"{stage} thread"}
        assert sum(span.seconds for span in mine) == pytest.approx(clock.seconds[stage])


def test_a_ring_keeps_the_last_of_those_sampled() -> None:
    ring = SpanRing(TraceBounds(capacity=3, sample_every=10))
    for number in range(1, 101):
        ring.add("push", "main", float(number), 0.5, number)
    assert [span.number for span in ring.drain()] == [80, 90, 100]
    assert ring.drain() == []
