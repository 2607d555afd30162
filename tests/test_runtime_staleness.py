"""The bound on one server: who may begin, who counts, who is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deeprec_spark.runtime.errors import JobEndedError, StaleNodeError
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.semi_sync import SemiSyncOptions
from deeprec_spark.runtime.staleness import StalenessBound
from deeprec_spark.runtime.store_messages import Sender

NOW = 0.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Clock:
    """Seconds that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def bound(staleness: int = 1, patience: float = 60.0, **more: Clock) -> StalenessBound:
    return StalenessBound(
        SemiSyncOptions(max_staleness=staleness, patience_secs=patience), range(1, 4), 1, **more
    )


def test_a_worker_waits_for_the_slowest(pool: ThreadPoolExecutor) -> None:
    steps = bound(staleness=1)
    assert [steps.enter(rank, 1) for rank in (1, 2)] == [0, 0]
    assert steps.turn(1, 1, 0, NOW) == 1
    steps.pushed(Sender(1, 1, 1))
    assert steps.turn(1, 1, 1, NOW) == 1
    steps.pushed(Sender(1, 1, 2))
    assert steps.turn(1, 1, 2, NOW) is None
    waiting = pool.submit(steps.turn, 1, 1, 2, 30.0)
    steps.pushed(Sender(2, 1, 1))
    assert waiting.result(30) == 2
    report = steps.leave(1, 1)
    assert (report.max_lead, report.left_out) == (1, {})


def test_only_workers_count() -> None:
    steps = bound()
    with pytest.raises(ValueError, match=r"ranks \[1, 2, 3\]. Received: rank=0"):
        steps.enter(0, 1)
    steps.pushed(Sender(0, 1, 1))
    assert steps.enter(1, 1) == 0


def test_a_repeated_push_is_one_step() -> None:
    steps = bound(staleness=0)
    for rank in (1, 2):
        steps.enter(rank, 1)
    for _ in range(3):
        steps.pushed(Sender(2, 1, 5))
    steps.pushed(Sender(1, 1, 1))
    assert steps.turn(1, 1, 1, NOW) == 1
    assert steps.turn(2, 1, 2, NOW) is None


def test_who_comes_later_begins_where_the_slowest_is() -> None:
    steps = bound()
    for rank in (1, 2):
        steps.enter(rank, 1)
    for sequence in (1, 2, 3):
        steps.pushed(Sender(1, 1, sequence))
    steps.pushed(Sender(2, 1, 1))
    assert steps.enter(3, 1) == 1
    steps.leave(3, 1)
    steps.leave(2, 1)
    assert steps.enter(3, 2) == 3


def test_who_leaves_or_is_lost_holds_nobody_up(pool: ThreadPoolExecutor) -> None:
    for depart in (lambda steps: steps.leave(2, 1), lambda steps: steps.lost(2, 1)):
        steps = bound(staleness=0)
        for rank in (1, 2):
            steps.enter(rank, 1)
        steps.pushed(Sender(1, 1, 1))
        waiting = pool.submit(steps.turn, 1, 1, 1, 30.0)
        depart(steps)
        assert waiting.result(30) == 1


def test_a_copy_that_was_given_up_cannot_come_back() -> None:
    steps = bound()
    steps.enter(1, 3)
    steps.lost(1, 3)
    with pytest.raises(StaleNodeError, match=r"worker 0 \(rank 1\) has not begun.*incarnation=3"):
        steps.turn(1, 3, 0, NOW)
    with pytest.raises(StaleNodeError, match=r"worker 0 \(rank 1\) was given up.*incarnation=3"):
        steps.enter(1, 3)
    steps.enter(1, 4)
    steps.lost(1, 3)
    assert steps.turn(1, 4, 0, NOW) == 1


def test_a_copy_that_was_replaced_does_not_take_the_place_of_the_new_one() -> None:
    steps = bound()
    steps.enter(1, 4)
    with pytest.raises(StaleNodeError, match=r"was replaced.*incarnation=3, newest=4"):
        steps.enter(1, 3)
    assert steps.turn(1, 4, 0, NOW) == 1


def test_a_silent_worker_is_left_out_until_it_pushes() -> None:
    clock = Clock()
    steps = bound(staleness=0, patience=10.0, clock=clock)
    for rank in (1, 2):
        steps.enter(rank, 1)
    steps.pushed(Sender(1, 1, 1))
    clock.now = 11.0
    assert steps.turn(1, 1, 1, 1.0) == 1
    for sequence in (2, 3):
        steps.pushed(Sender(1, 1, sequence))
    steps.pushed(Sender(2, 1, 1))
    assert steps.turn(2, 1, 1, NOW) == 1, "it goes on where the others are, by numbers of its own"
    steps.pushed(Sender(2, 1, 2))
    assert steps.turn(2, 1, 2, NOW) is None
    assert steps.turn(1, 1, 3, NOW) == 3
    assert steps.leave(2, 1).left_out == {2: 1}


@pytest.mark.parametrize("timeout", [None, -1, float("nan"), "soon"])
def test_a_malformed_question_is_refused(timeout: object) -> None:
    handlers = bound().around({"push": lambda message: message})
    header = {"rank": 1, "incarnation": 1, "sequence": 0}
    handlers["enter_steps"](Message(header))
    with pytest.raises(ValueError, match=r"`timeout` in seconds. Received: timeout="):
        handlers["await_turn"](Message({**header, "timeout": timeout}))
    assert handlers["await_turn"](Message({**header, "timeout": 0})).header == {"last": 1}


def test_the_end_of_the_job_ends_waits(pool: ThreadPoolExecutor) -> None:
    steps = bound(staleness=0)
    for rank in (1, 2):
        steps.enter(rank, 1)
    steps.pushed(Sender(1, 1, 1))
    waiting = pool.submit(steps.turn, 1, 1, 1, 30.0)
    steps.fail(JobEndedError("over"))
    with pytest.raises(JobEndedError, match="over"):
        waiting.result(30)


def test_a_worker_that_was_left_out_goes_on_once_nobody_else_trains() -> None:
    clock = Clock()
    steps = StalenessBound(SemiSyncOptions(max_staleness=0, patience_secs=60.0), range(1, 4), 1, clock)
    assert [steps.enter(rank, 1) for rank in (1, 2)] == [0, 0]
    for sequence in range(1, 6):
        for rank in (1, 2):
            steps.pushed(Sender(rank, 1, sequence))
    steps.pushed(Sender(1, 1, 6))
    clock.now += 61
    assert steps.turn(1, 1, 6, 1.0) == 6, "the other one is left out by now"
    steps.pushed(Sender(1, 1, 7))
    steps.leave(1, 1)
    assert steps.turn(2, 1, 5, NOW) is not None
    assert steps.enter(3, 1) >= 5, "nobody waits for who comes late"
