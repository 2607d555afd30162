"""Nodes without tables or models: each registers, sends heartbeats, listens for orders and leases work as real ones do.

start      python -m benchmarks.peers.players '{"address": "…", "token": "…", "first": 0, "count": 50, "servers": 8}'
answer     {"ready": true, "memory_before": …, "memory": …}      # all of these nodes run
request    {"op": "usage"}
answer     {"memory": …, "threads": …, "processor": …}
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from benchmarks.peers.driver import usage
from benchmarks.peers.protocol import answer, settings
from deeprec_spark.runtime.node_control import NodeControl
from deeprec_spark.runtime.worker_client import Heartbeat, NodeClient, WorkerClient


class Player:
    """One node."""

    def __init__(self, options: dict[str, Any], rank: int) -> None:
        address, token = options["address"], options["token"]
        self.client = WorkerClient(address, token=token, rank=rank)
        accepted = self.client.claim(f"attempt-{rank}", "localhost")
        if accepted["status"] != "accepted":
            raise RuntimeError(f"The coordinator refused a node. Received: {accepted}")
        server = rank < options["servers"]
        self.client.announce("127.0.0.1:1" if server else None)
        control = NodeClient(address, token=token, rank=rank, incarnation=self.client.incarnation)
        self._left = threading.Lock()
        self.control = NodeControl(control, {}, self.leave)
        self.beats = Heartbeat(
            self.client,
            interval=accepted["heartbeat_interval"],
            timeout=accepted["heartbeat_timeout"],
            on_stop=lambda reason: self.leave(),
        )
        self.thread = threading.Thread(target=self.work, daemon=True)
        if not server:
            self.thread.start()

    def leave(self) -> None:
        """The job is over: say so, once."""
        if self._left.acquire(blocking=False):
            self.client.exited(0)

    def work(self) -> None:
        """A worker's phases: each item is leased, begun and completed at once."""
        while self.client.next_phase() is not None:
            for _ in self.client.items():
                pass
            self.client.finish({})


def main() -> None:
    """Play the nodes until standard input closes."""
    options = settings()
    before = usage()["memory"]
    first, count = options["first"], options["count"]
    players = [Player(options, rank) for rank in range(first, first + count)]
    answer({"ready": True, "memory_before": before, **usage()})
    for line in sys.stdin:
        assert json.loads(line)["op"] == "usage"
        answer({"nodes": len(players), **usage()})


if __name__ == "__main__":
    main()
