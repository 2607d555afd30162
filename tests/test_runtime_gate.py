"""The gate between a worker's steps, held and released from another thread."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from deeprec_spark.runtime.gate import Standing, StepGate, rows_of


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_steps_pass_until_held_and_go_on_after_release(pool):
    gate = StepGate()
    gate.enter(1)
    assert gate.begin({3: 10})
    assert gate.hold(1) == 1
    waiting = pool.submit(gate.begin, {3: 20})
    reached = pool.submit(gate.run_to, 1, -1, 30.0)
    assert not reached.done(), "the step that had begun is not done"
    gate.end()
    assert reached.result(30) == Standing(1, 1, {3: 10})
    assert not waiting.done()
    assert gate.release() > 0
    assert waiting.result(30)
    gate.end()


def test_a_synchronous_worker_catches_up_with_the_others(pool):
    gate = StepGate()
    gate.enter(1)
    assert gate.hold(1) == 0
    reached = pool.submit(gate.run_to, 1, 2, 30.0)
    for _ in range(2):
        assert gate.begin()
        gate.end()
    assert reached.result(30).steps == 2
    assert gate.begin(wait=False) is None, "not a third one"


def test_a_hold_waits_for_a_worker_that_has_not_entered_the_phase(pool):
    gate = StepGate()
    assert gate.hold(5) == 0
    assert gate.run_to(5, -1, 1.0) == Standing(5)
    gate.enter(5)
    waiting = pool.submit(gate.begin)
    gate.release()
    assert waiting.result(30)


def test_a_finished_worker_holds_nobody_up():
    gate = StepGate()
    gate.enter(1)
    for _ in range(2):
        gate.begin({0: 1})
        gate.end()
    gate.forget(0)
    gate.leave()
    assert gate.hold(1) == 2
    assert gate.run_to(1, 9, 1.0) == Standing(1, 2, {}, True)


def test_steps_in_flight_are_waited_for_and_pushes_tell_their_own_position(pool):
    gate = StepGate()
    gate.enter(1)
    gate.begin({0: 8})
    gate.begin({0: 16, 1: 4})
    assert gate.position() == {"phase": 1, "rows": [[0, 8]]}
    assert gate.hold(1) == 2
    gate.end()
    assert gate.position() == {"phase": 1, "rows": [[0, 16], [1, 4]]}
    gate.end()
    assert gate.run_to(1, -1, 1.0).rows == {0: 16, 1: 4}


def test_a_phase_can_be_ended_between_two_steps(pool):
    gate = StepGate()
    gate.enter(2)
    gate.begin()
    gate.end()
    gate.hold(2)
    waiting = pool.submit(gate.begin)
    gate.release(stop=True)
    assert waiting.result(30) is False
    gate.enter(3)
    assert gate.begin(), "the next phase is not ended"


def test_the_waits_have_deadlines():
    gate = StepGate(hold_timeout=0.1)
    gate.enter(1)
    gate.hold(1)
    with pytest.raises(TimeoutError, match="has not let it go on within 0 s"):
        gate.begin()
    with pytest.raises(TimeoutError, match=r"Step 1 was not done within 0 s. Received: 0 steps done"):
        gate.run_to(1, 1, 0.1)
    gate.release()
    with pytest.raises(ValueError, match="Hold the gate first"):
        gate.run_to(1, 1, 0.1)


def test_no_step_runs_while_held_whatever_the_timing():
    gate, stop, running = StepGate(), threading.Event(), []
    gate.enter(1)

    def train():
        while not stop.is_set():
            assert gate.begin()
            running.append(1)
            running.pop()
            gate.end()

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(200):
        gate.hold(1)
        standing = gate.run_to(1, -1, 30.0)
        assert not running
        assert gate.run_to(1, -1, 30.0) == standing
        gate.release()
    stop.set()
    thread.join(30)


def test_a_batch_is_waited_for_until_no_step_may_begin(pool):
    gate, batch = StepGate(), Future()
    gate.enter(1)
    assert gate.begin()
    waiting = pool.submit(gate.wait_for, batch)
    gate.hold(2)
    with pytest.raises(TimeoutError):
        waiting.result(0.1)  # of another phase
    gate.release()
    gate.hold(1)
    assert waiting.result(10) is False
    assert gate.wait_for(batch) is False
    reached = pool.submit(gate.run_to, 1, 2, 30.0)
    assert gate.begin(), "the save lets this step pass"
    assert pool.submit(gate.wait_for, batch).result(10) is False, "and no other"
    gate.end()
    gate.end()
    assert reached.result(10).steps == 2
    gate.release()
    waiting = pool.submit(gate.wait_for, batch)
    batch.set_result(None)
    assert waiting.result(10) is True
    gate.hold(1)
    assert gate.wait_for(batch) is True, "begin says what holds it"


def test_standing_survives_json():
    standing = Standing(3, 7, {1: 5, 0: 2}, True)
    assert Standing.from_dict(standing.to_dict()) == standing
    for wrong in (None, [[1]], [[1, -2]], [["1", 2]]):
        with pytest.raises(ValueError, match="Received"):
            rows_of(wrong)
