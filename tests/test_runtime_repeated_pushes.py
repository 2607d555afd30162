"""A push that comes again, because the connection broke before its answer: applied once, answered as the first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.store import PushRequest
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.server import ParameterServer, ServerOptions
from deeprec_spark.runtime.store_messages import Sender, encode_push


class SlowStore(LocalStore):
    """Applies pushes once it may, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.error: Exception | None = None
        self.pushes = 0

    def push(self, request: PushRequest) -> int:
        self.pushes += 1
        self.begun.set()
        assert self.may_end.wait(30)
        if self.error is not None:
            raise self.error
        return self.pushes


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def push(sequence: int, rank: int = 1, incarnation: int = 1, position: int | None = None) -> Message:
    where = None if position is None else {"at": position}
    message = encode_push(Sender(rank, incarnation, sequence), PushRequest({}, None, None, 1), where)
    return Message(message.header, {name: np.asarray(array) for name, array in message.arrays.items()})


def twice(store: SlowStore, server: ParameterServer, pool: ThreadPoolExecutor) -> list[Future[Message]]:
    """The same push in two calls, the second while the first is at work."""
    handler = server.handlers()["push"]
    first = pool.submit(handler, push(1))
    assert store.begun.wait(30)
    entered = threading.Event()

    def again() -> Message:
        entered.set()
        return handler(push(1))

    second = pool.submit(again)
    assert entered.wait(30)
    return [first, second]


def test_it_is_not_answered_before_it_is_applied(pool: ThreadPoolExecutor) -> None:
    store = SlowStore()
    server = ParameterServer(store, ServerOptions(1, 2))
    first, second = twice(store, server, pool)
    with pytest.raises(TimeoutError):
        second.result(0.3)
    store.may_end.set()
    assert first.result(30).header == second.result(30).header == {"step": 1}
    assert server.handlers()["push"](push(1)).header == {"step": 1}
    assert store.pushes == 1


def test_it_fails_as_the_first_did(pool: ThreadPoolExecutor) -> None:
    store = SlowStore()
    server = ParameterServer(store, ServerOptions(1, 2))
    store.error = OSError("no space left")
    first, second = twice(store, server, pool)
    store.may_end.set()
    for call in (first, second):
        with pytest.raises(OSError, match="no space left"):
            call.result(30)
    store.error = None
    assert server.handlers()["push"](push(2)).header == {"step": 2}
    assert server.handlers()["push"](push(2)).header == {"step": 2}


class OrderedStore(LocalStore):
    """Counts pushes as they come; the first one returns after all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first_has_begun = threading.Event()
        self.first_may_end = threading.Event()
        self.pushes = 0

    def push(self, request: PushRequest) -> int:
        self.pushes += 1
        step = self.pushes
        if step == 1:
            self.first_has_begun.set()
            assert self.first_may_end.wait(30)
        return step


@pytest.mark.parametrize("rank", [1, 2])
def test_each_is_told_its_own_step_though_the_older_one_ends_last(
    pool: ThreadPoolExecutor, rank: int
) -> None:
    """Two pushes at a time, of two workers or of one."""
    store = OrderedStore()
    server = ParameterServer(store, ServerOptions(1, 2))
    handler = server.handlers()["push"]
    older = pool.submit(handler, push(1, 1, position=1))
    assert store.first_has_begun.wait(30)
    newer = push(2, rank, position=2)
    assert handler(newer).header == {"step": 2}
    store.first_may_end.set()
    assert older.result(30).header == {"step": 1}
    assert handler(newer).header == {"step": 2}
    assert server.fence(rank, 1) == {"at": 2}


def test_others_than_the_jobs_workers_push_nothing() -> None:
    server = ParameterServer(SlowStore(), ServerOptions(1, 2))
    with pytest.raises(ValueError, match=r"Workers of this job are ranks \[1, 2\]. Received: rank=0"):
        server.handlers()["push"](push(1, rank=0))


def test_however_many_copies_of_a_worker_come_memory_does_not_grow() -> None:
    store = SlowStore()
    store.may_end.set()
    server = ParameterServer(store, ServerOptions(1, 2))
    for incarnation in range(1, 101):
        server.handlers()["push"](push(1, 2, incarnation, position=incarnation))
        server.handlers()["push"](push(incarnation, 1, position=incarnation))
    assert [len(copies) for copies in server._copies.values()] == [1, 8]
    # The driver may not have dealt with the loss of the last ones yet.
    assert [server.fence(2, incarnation) for incarnation in (1, 93, 100)] == [None, {"at": 93}, {"at": 100}]
    assert server.fence(1, 1) == {"at": 100}
