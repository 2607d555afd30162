"""Who is part of a step, decided once; rounds of fewer parts than ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.runtime.backup import Admissions, BackupServer
from deeprec_spark.runtime.gather import Gather
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.server import ServerOptions
from deeprec_spark.runtime.store_messages import Sender


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_the_first_that_ask_are_in_and_the_answer_stays() -> None:
    admissions = Admissions(needed=2)
    assert admissions.admit(3, 1) == (True, 1)
    assert admissions.admit(3, 1) == (True, 1)
    assert admissions.admit(1, 1) == (True, 2)
    assert admissions.admit(2, 1) == (False, 2)
    assert admissions.admit(3, 1) == (True, 2), "its answer was lost"
    assert admissions.admit(2, 2) == (True, 2)
    with pytest.raises(ValueError, match=r"Step 2 is the current one. Received: rank=1, step=3"):
        admissions.admit(1, 3)


@pytest.fixture
def server() -> Iterator[BackupServer]:
    store = LocalStore()
    server = BackupServer(store, ServerOptions(1, 3, "sync", 30.0), backup_workers=1)
    yield server
    server.stop()
    store.close()


def test_only_workers_are_admitted(server: BackupServer) -> None:
    handlers = server.handlers()
    with pytest.raises(ValueError, match=r"ranks \[1, 2, 3\]. Received: rank=0"):
        handlers["admit"](Message(Sender(0, 1, 1).to_header()))
    assert handlers["admit"](Message(Sender(1, 1, 1).to_header())).header == {"admitted": True, "current": 1}


def summed(timeout: float = 30.0) -> Gather[int, int]:
    def combine(parts: Mapping[int, int]) -> dict[int, int]:
        return dict.fromkeys(parts, sum(parts.values()))

    return Gather("push", (1, 2, 3), 1, combine, timeout, needed=2)


def test_a_round_of_two_of_three(pool: ThreadPoolExecutor) -> None:
    gather = summed()
    for sequence, ranks in enumerate([(1, 3), (2, 3), (1, 2)], start=1):
        waiting = pool.submit(gather.wait_for, sequence + 1)
        answers = [pool.submit(gather.exchange, rank, sequence, 10**rank) for rank in ranks]
        assert [answer.result(30) for answer in answers] == [sum(10**rank for rank in ranks)] * 2
        waiting.result(30)
        gather.wait_for(sequence)


def test_a_round_that_is_far_ahead_is_not_waited_for() -> None:
    gather = summed()
    with pytest.raises(ValueError, match=r"push 1 is next; nobody is more than one ahead of it. Received: 3"):
        gather.wait_for(3)


def test_a_deadline_says_how_many_are_missing(pool: ThreadPoolExecutor) -> None:
    gather = summed(timeout=0.2)
    with pytest.raises(TimeoutError, match=r"Missing: 1 of worker 0 \(rank 1\), worker 2 \(rank 3\)$"):
        gather.exchange(2, 1, 0)
    later = summed(timeout=0.2)
    with pytest.raises(TimeoutError, match=r"push 1 was not there after 0.2 s.*Missing: 2 of worker 0"):
        later.wait_for(2)
