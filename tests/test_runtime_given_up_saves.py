"""Saves and restores that fail: what may be done then, and what may not. Nodes are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.store import TableSpec
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions
from deeprec_spark.runtime.cut import Cutter
from deeprec_spark.runtime.errors import NodeError
from deeprec_spark.runtime.gate import StepGate
from deeprec_spark.runtime.node_control import NodeControl, OrderHandler, store_orders, worker_orders
from deeprec_spark.runtime.orders import OrderError, StorageError
from deeprec_spark.runtime.worker_client import NodeClient

Start = Callable[[int, Mapping[str, OrderHandler]], None]


@pytest.fixture
def stores() -> Iterator[list[LocalStore]]:
    made = [LocalStore(shard, 2) for shard in range(2)]
    for store in made:
        store.create_tables([TableSpec("rows", 2, optimizer=SGD(1.0))])
    yield made
    for store in made:
        store.close()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    coordinator = Coordinator(CoordinatorOptions(2, 1, "async", failure_grace=0.1, order_timeout=0.5))
    yield coordinator
    coordinator.stop(timeout=0)


@pytest.fixture
def start(coordinator: Coordinator) -> Iterator[Start]:
    """Starts a node that carries out orders."""
    controls = []

    def begin(rank: int, handlers: Mapping[str, OrderHandler]) -> None:
        client = NodeClient(coordinator.address, token=coordinator.token, rank=rank)
        assert client.claim("first", "host-a", timeout=0.0)["status"] == "accepted"
        client.announce(f"host-a:{rank + 1}" if rank < 2 else None)
        controls.append(NodeControl(client, handlers, lambda: None))

    yield begin
    coordinator.finish(timeout=0)  # ends the nodes' polls
    for control in controls:
        control.close()


def can_be_fixed(store: LocalStore) -> bool:
    with store.table("rows").snapshot():
        return True


def test_a_server_that_is_late_does_not_end_all_saving(
    stores: list[LocalStore], coordinator: Coordinator, start: Start
) -> None:
    orders = [store_orders(store) for store in stores]
    awake, fixed = threading.Event(), threading.Event()

    def late(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        assert awake.wait(30)
        try:
            return orders[1]["snapshot"](payload)
        finally:
            fixed.set()

    start(0, orders[0])
    start(1, {**orders[1], "snapshot": late})
    cutter = Cutter(coordinator)
    try:
        with pytest.raises(NodeError, match=r"'snapshot' was not answered.*server 1 \(rank 1\)"):
            cutter.take()
        assert can_be_fixed(stores[0]), "the punctual server was told that this save is given up"
    finally:
        awake.set()
    # It never hears that: the order was withdrawn when it was late, too.
    assert fixed.wait(30)
    coordinator.options = replace(coordinator.options, order_timeout=30.0)
    cutter.drop(cutter.take().save_id)


def test_a_save_whose_workers_are_not_released_leaves_nothing_fixed(
    stores: list[LocalStore], coordinator: Coordinator, start: Start
) -> None:
    def broken(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        raise OSError("no release")

    for rank, store in enumerate(stores):
        start(rank, store_orders(store))
    start(2, {**worker_orders(StepGate(), lambda: None), "release": broken})
    with pytest.raises(OrderError, match=r"worker 0.*could not release: OSError"):
        Cutter(coordinator).take()
    assert all(can_be_fixed(store) for store in stores)


@pytest.mark.parametrize(
    ("error", "kind"), [(OSError("S3 is away"), StorageError), (ValueError("another model"), OrderError)]
)
def test_whether_a_restore_may_succeed_later(
    stores: list[LocalStore], coordinator: Coordinator, start: Start, error: Exception, kind: type[OrderError]
) -> None:
    def broken(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        raise error

    start(0, {**store_orders(stores[0]), "restore": lambda payload: ({"step": 0}, b"")})
    start(1, {**store_orders(stores[1]), "restore": broken})
    with pytest.raises(OrderError, match=f"could not restore: {type(error).__name__}: {error}") as caught:
        Cutter(coordinator).restore([], None)
    assert type(caught.value) is kind
