"""Connections to the driver that break anywhere in a call: workers go on, and no item is lost or done twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions, Phase
from deeprec_spark.runtime.worker_client import WorkerClient
from tests.cut_proxy import CutProxy, somewhere

ITEMS = 16


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    coordinator = Coordinator(CoordinatorOptions(1, 2, "async", failure_grace=0.2, heartbeat_interval=0.5))
    yield coordinator
    coordinator.stop(timeout=0)


@pytest.fixture
def pool(coordinator: Coordinator) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
        coordinator.finish(timeout=0)  # ends the calls that wait


@pytest.fixture
def proxies(coordinator: Coordinator) -> Iterator[list[CutProxy]]:
    made = [CutProxy(coordinator.address) for _ in range(2)]
    yield made
    for proxy in made:
        proxy.close()


def node(coordinator: Coordinator, rank: int, address: str | None = None) -> WorkerClient:
    client = WorkerClient(address or coordinator.address, token=coordinator.token, rank=rank)
    assert client.claim("first", "host-a", timeout=0.0)["status"] == "accepted"
    client.announce("host-a:1" if rank == 0 else None)
    return client


def test_cut_connections_to_the_driver_lose_no_item(
    coordinator: Coordinator, pool: ThreadPoolExecutor, proxies: list[CutProxy]
) -> None:
    node(coordinator, 0)
    workers = [node(coordinator, rank, proxy.address) for rank, proxy in enumerate(proxies, 1)]
    running = pool.submit(coordinator.run_phase, Phase("train", items=[{"n": n} for n in range(ITEMS)]))

    def work(worker: WorkerClient, proxy: CutProxy) -> list[int]:
        chance, done = random.Random(worker.rank), []

        def cut() -> None:
            proxy.arm(*somewhere(chance, 400))

        cut()
        assert worker.next_phase() is not None
        cut()
        while (item := worker.lease(wait=len(done) % 2 == 0)) is not None:
            cut()
            if not worker.begin(item):
                continue  # the other one had nothing left, and has taken it over
            done.append(item["n"])
            cut()
            worker.progress({"done": len(done)})
            cut()
            assert worker.complete(item)
            cut()
        worker.finish({"done": len(done)})
        proxy.disarm()
        return done

    parts = [pool.submit(work, *pair) for pair in zip(workers, proxies, strict=True)]
    done = [part.result(60) for part in parts]
    results = running.result(30)
    assert Counter(done[0] + done[1]) == Counter(range(ITEMS))
    assert [result.data["done"] for result in results] == [len(part) for part in done]
    assert sum(proxy.cuts for proxy in proxies) > 10


def test_a_request_for_a_lease_that_is_sent_again_gets_the_same(
    coordinator: Coordinator, pool: ThreadPoolExecutor
) -> None:
    """Also while the first one still waits, though its connection is gone."""
    server, one, two = (node(coordinator, rank) for rank in range(3))
    running = pool.submit(coordinator.run_phase, Phase("train", items=[{"n": 1}, {"n": 2}]))
    task = one.next_phase()
    assert task is not None
    two.next_phase()
    held = [one.lease(wait=False), one.lease(wait=False)]
    for item in held:
        assert item is not None
        assert one.begin(item)
    header = {"phase": task.number, "timeout": 20.0, "caller": 7, "request": 1}
    asked = [pool.submit(two._call, "lease", header) for _ in range(2)]
    one.exited(-9)
    order = server.next_order(0)
    assert order is not None
    server.answer(order.number, {"position": None})
    got = [future.result(30).header for future in asked]
    assert got[0] == got[1]
    assert got[0]["status"] == "item"
    assert two._call("lease", header).header == got[0]
    later = two._call("lease", {**header, "request": 2}).header
    assert {got[0]["item"]["n"], later["item"]["n"]} == {1, 2}
    assert two._call("lease", header).header == {"status": "none"}, "its thread no longer waits for this"
    for found in (got[0], later):
        answer = {"phase": task.number, "index": found["index"]}
        assert [two._call("complete", answer).header["counted"] for _ in range(2)] == [True, True]
    two.finish()
    assert len(running.result(30)) == 1
