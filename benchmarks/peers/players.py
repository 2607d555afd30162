"""Nodes without tables or models: each registers, sends heartbeats, listens for orders and leases work as real ones do.

start      python -m benchmarks.peers.players '{"address": "…", "token": "…", "first": 0, "count": 50, "servers": 8}'
answer     {"ready": true, "memory_before": …, "memory": …}      # all of these nodes run
request    {"op": "usage"}
answer     {"memory": …, "threads": …, "processor": …}
request    {"op": "connect", "addresses": ["…"], "token": "…"}    # all workers, to these parameter servers only
answer     {"workers": …, "memory": …, "threads": …, "processor": …}
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.peers.driver import usage
from benchmarks.peers.protocol import answer, settings
from deeprec_spark.embedding.optimizers import Adagrad
from deeprec_spark.embedding.store import PullRequest, PushRequest, SparseGradient, TableSpec, UniqueKeys
from deeprec_spark.runtime.node_control import NodeControl
from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions
from deeprec_spark.runtime.worker_client import Heartbeat, NodeClient, WorkerClient


class Player:
    """One node."""

    def __init__(self, options: dict[str, Any], rank: int) -> None:
        address, token = options["address"], options["token"]
        self.client = WorkerClient(address, token=token, rank=rank)
        accepted = self.client.claim(f"attempt-{rank}", "localhost")
        if accepted["status"] != "accepted":
            raise RuntimeError(f"The coordinator refused a node. Received: {accepted}")
        self.server = rank < options["servers"]
        self.client.announce("127.0.0.1:1" if self.server else None)
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
        self.store: RemoteStore | None = None
        if not self.server:
            self.thread.start()

    def connect(self, addresses: Sequence[str], token: str) -> None:
        """A worker's connections to servers, as over a network, and one small step over them."""
        if self.store is not None:
            self.store.close()
        # A later copy of the worker each time, since a new store counts its requests anew.
        options = RemoteStoreOptions(
            token, rank=self.client.rank + 1, incarnation=len(addresses), local_sockets=False
        )
        self.store = RemoteStore(addresses, options)
        self.store.create_tables([TableSpec("t", 16, optimizer=Adagrad(0.01))])
        keys = UniqueKeys(np.arange(1024), np.ones(1024, np.int64))
        rows = self.store.pull(PullRequest({"t": keys}, dense=False)).rows["t"]
        self.store.push(PushRequest({"t": SparseGradient(keys.keys, rows)}, None, None, 1))

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
        request = json.loads(line)
        workers = [player for player in players if not player.server]
        if request["op"] == "connect":
            for player in workers:
                player.connect(request["addresses"], request["token"])
        answer({"nodes": len(players), "workers": len(workers), **usage()})


if __name__ == "__main__":
    main()
