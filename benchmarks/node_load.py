"""What more nodes cost the driver: memory, threads, processor time of a real coordinator, and of its nodes' clients."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO

from benchmarks.peer_process import PeerProcess
from benchmarks.server import TOKEN, Process, serve

NODES_PER_PROCESS = 50
CONNECTED = (1, 4, 8)  # parameter servers that workers are connected to; the largest last
LEASES_PER_WORKER = 20


@dataclass(frozen=True)
class NodeLoad:
    """A coordinator with so many nodes that have registered.

    Arguments:
        nodes, servers: how many, and how many of them are servers.
        register_seconds: until all were registered, processes' start included.
        driver_mib, driver_threads: of the process with the coordinator, after a phase.
        driver_idle: processor seconds a second while nodes send heartbeats and wait.
        leases_per_s: leased, begun and completed by all workers together, as fast as they can.
        client_mib: memory of a node's connections to the coordinator, and of their threads.
        store_mib: memory of a worker's connections to parameter servers, after a small step, by the number of servers.
    """

    nodes: int
    servers: int
    register_seconds: float
    driver_mib: float
    driver_threads: int
    driver_idle: float
    leases_per_s: float
    client_mib: float
    store_mib: Mapping[int, float] = field(default_factory=dict)


def measure(counts: Sequence[int], log: IO[str], idle_seconds: float = 5.0) -> list[NodeLoad]:
    """One measurement for each number of nodes; an eighth of them are servers."""
    return [_measure(count, log, idle_seconds) for count in counts]


def _measure(nodes: int, log: IO[str], idle_seconds: float) -> NodeLoad:
    servers = max(1, nodes // 8)
    workers = nodes - servers

    def command(module: str, **settings: object) -> list[str]:
        return [sys.executable, "-m", f"benchmarks.peers.{module}", json.dumps(settings)]

    with ExitStack() as stack:
        driver = stack.enter_context(
            PeerProcess("driver", command("driver", servers=servers, workers=workers), log)
        )
        start = time.perf_counter()
        players = [
            stack.enter_context(
                PeerProcess(
                    "nodes",
                    command(
                        "players",
                        address=driver.ready["address"],
                        token=driver.ready["token"],
                        first=first,
                        count=min(NODES_PER_PROCESS, nodes - first),
                        servers=servers,
                    ),
                    log,
                )
            )
            for first in range(0, nodes, NODES_PER_PROCESS)
        ]
        driver.ask({"op": "wait"})
        registered = time.perf_counter() - start
        items = workers * LEASES_PER_WORKER
        phase = driver.ask({"op": "phase", "items": items})
        before, began = driver.ask({"op": "usage"}), time.perf_counter()
        # Nothing to wait for: heartbeats are what happens in this time.
        time.sleep(idle_seconds)
        after = driver.ask({"op": "usage"})
        passed = time.perf_counter() - began
        used = sum(player.ask({"op": "usage"})["memory"] for player in players)
        before_nodes = sum(player.ready["memory_before"] for player in players)
        stores = _stores(players, nodes, used)
        # Nodes are told to end by the coordinator, while they still live.
        driver.close()
    return NodeLoad(
        nodes=nodes,
        servers=servers,
        register_seconds=registered,
        driver_mib=after["memory"] / 2**20,
        driver_threads=after["threads"],
        driver_idle=(after["processor"] - before["processor"]) / passed,
        leases_per_s=items / phase["seconds"],
        client_mib=(used - before_nodes) / nodes / 2**20,
        store_mib=stores,
    )


def _stores(players: Sequence[PeerProcess], nodes: int, before: float) -> dict[int, float]:
    """What workers that connect to more and more servers use beyond `before` bytes: MiB of each, by servers."""
    found: dict[int, float] = {}
    with ExitStack() as stack:
        servers = [Process(serve, "tcp", os.sched_getaffinity(0), nodes) for _ in range(max(CONNECTED))]
        for server in servers:
            stack.callback(server.close)
        addresses = [server.receive() for server in servers]
        for count in CONNECTED:
            request = {"op": "connect", "addresses": addresses[:count], "token": TOKEN}
            answers = [player.ask(request) for player in players]
            workers = sum(answer["workers"] for answer in answers)
            found[count] = (sum(answer["memory"] for answer in answers) - before) / workers / 2**20
    return found
