"""Rounds: every rank takes part, one combination, errors for all."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deeprec_spark.runtime.gather import Gather


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def adder(ranks=(1, 2, 3), timeout=30.0, combine=None):
    order = []

    def total(parts):
        order.append(list(parts))
        return dict.fromkeys(parts, sum(parts.values()))

    return Gather("push", ranks, 1, combine or total, timeout), order


def test_every_rank_gets_the_answer_and_order_is_by_rank(pool):
    gather, order = adder()
    for sequence in (1, 2):
        answers = [pool.submit(gather.exchange, rank, sequence, 10**rank) for rank in (3, 1, 2)]
        assert [answer.result(30) for answer in answers] == [1110] * 3
    assert order == [[1, 2, 3]] * 2


def test_a_repeated_request_gets_the_same_answer_and_counts_once(pool):
    gather, order = adder(ranks=(1, 2))
    first = pool.submit(gather.exchange, 1, 1, 5)
    again = pool.submit(gather.exchange, 1, 1, 5)
    assert gather.exchange(2, 1, 7) == 12
    assert first.result(30) == again.result(30) == 12
    assert gather.exchange(1, 1, 5) == 12
    assert len(order) == 1


def test_a_deadline_names_the_missing_ranks_to_all_who_wait_and_who_come_later(pool):
    gather, _ = adder(timeout=0.3)
    waiting = [pool.submit(gather.exchange, rank, 1, 0) for rank in (1, 3)]
    for one in waiting:
        with pytest.raises(
            TimeoutError, match=r"waited 0.3 s.*deadlines.step_secs.*Missing: worker 1 \(rank 2\)$"
        ):
            one.result(30)
    with pytest.raises(TimeoutError, match="Missing"):
        gather.exchange(2, 1, 0)


def test_an_error_of_the_combination_reaches_all(pool):
    def broken(parts):
        raise ValueError("no such table")

    gather, _ = adder(combine=broken)
    for one in [pool.submit(gather.exchange, rank, 1, 0) for rank in (1, 2, 3)]:
        with pytest.raises(ValueError, match="no such table"):
            one.result(30)


def test_a_slow_combination_is_not_late(pool):
    release = threading.Event()

    def slow(parts):
        release.wait(30)
        return dict.fromkeys(parts, 1)

    gather, _ = adder(ranks=(1, 2), timeout=0.2, combine=slow)
    one = pool.submit(gather.exchange, 1, 1, 0)
    two = pool.submit(gather.exchange, 2, 1, 0)
    with pytest.raises(TimeoutError):
        one.result(0.6)
    release.set()
    assert one.result(30) == two.result(30) == 1


def test_fail_wakes_all(pool):
    gather, _ = adder()
    waiting = pool.submit(gather.exchange, 1, 1, 0)
    gather.fail(RuntimeError("stopped"))
    with pytest.raises(RuntimeError, match="stopped"):
        waiting.result(30)


@pytest.mark.parametrize(
    ("rank", "sequence", "message"), [(9, 1, "rank=9"), (1, 2, "rank=1, 2"), (1, 0, "rank=1, 0")]
)
def test_wrong_ranks_and_rounds_are_refused(rank, sequence, message):
    with pytest.raises(ValueError, match=message):
        adder()[0].exchange(rank, sequence, 0)


def test_a_rank_hears_its_answer_however_many_rounds_went_on_without_it(pool):
    gather = Gather(
        "push", (1, 2, 3), 1, lambda parts: dict.fromkeys(parts, sum(parts.values())), 30.0, needed=2
    )
    lost = pool.submit(gather.exchange, 1, 1, 1)
    gather.exchange(2, 1, 10)
    assert lost.result(30) == 11
    for sequence in (2, 3):
        other = pool.submit(gather.exchange, 3, sequence, 100)
        assert gather.exchange(2, sequence, 10) == 110
        assert other.result(30) == 110
    assert gather.exchange(1, 1, 1) == 11
