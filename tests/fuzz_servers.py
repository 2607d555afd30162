"""A server of each kind, and workers that train on it as they should."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from deeprec_spark.embedding.optimizers import SGD, Adagrad
from deeprec_spark.embedding.options import (
    Constant,
    CounterFilter,
    EmbeddingVariableOption,
    InitializerOption,
)
from deeprec_spark.embedding.store import PullRequest, PushRequest, SparseGradient, TableSpec, UniqueKeys
from deeprec_spark.runtime.backup import BackupServer, BackupStore
from deeprec_spark.runtime.calls import Handler
from deeprec_spark.runtime.channel_server import ChannelServer
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions
from deeprec_spark.runtime.semi_sync import SemiSyncOptions
from deeprec_spark.runtime.server import ParameterServer, ServerOptions
from deeprec_spark.runtime.staleness import StalenessBound, StepTurns
from deeprec_spark.runtime.store_messages import Sender, encode_pull, encode_push, spec_to_dict
from tests.fuzzing import GuardedStore

Kind = Literal["async", "staleness", "sync", "backup"]

TOKEN = "fuzz-token"
DIM = 4
KEYS = np.array([1, -1, 2**62], np.int64)
ONES = np.ones(len(KEYS), np.int64)
STORMING = 3
"""The rank in whose name malformed messages come."""
INCARNATION = 5
"""Of those who train as they should."""
NEVER = 4711
"""A number that no request of theirs has: whatever comes under it must not pass for one."""

_WORKERS = 3
_SPEC = TableSpec(
    "mine",
    DIM,
    EmbeddingVariableOption(init_option=InitializerOption(initializer=Constant(0.0))),
    SGD(1.0),
)


class Job:
    """A server, and the workers of its job.

    Arguments:
        kind: how its workers keep step.
        sync_timeout: seconds that they wait for each other.
        patience: seconds that a bound waits for a worker that pushes nothing.
    """

    def __init__(self, kind: Kind, sync_timeout: float = 10.0, patience: float = 0.3) -> None:
        self.kind = kind
        self.steps = 0
        store = GuardedStore()
        mode: Literal["async", "sync"] = "sync" if kind in ("sync", "backup") else "async"
        options = ServerOptions(1, _WORKERS, mode, sync_timeout)
        self.service: ParameterServer | BackupServer = (
            BackupServer(store, options, backup_workers=1)
            if kind == "backup"
            else ParameterServer(store, options)
        )
        handlers: Mapping[str, Handler] = self.service.handlers()
        if kind == "staleness":
            semi_sync = SemiSyncOptions(max_staleness=0, patience_secs=patience)
            handlers = StalenessBound(semi_sync, options.worker_ranks, 1).around(handlers)
        self.methods = list(handlers)
        self._server = ChannelServer(handlers, host="127.0.0.1", token=TOKEN)
        # Only a synchronous step waits for the rank that the malformed messages come from.
        ranks = (1, 2, STORMING) if kind == "sync" else (1, 2)
        wires: Any = ("float32", "bfloat16", "float32")
        self.stores = {
            rank: (BackupStore if kind == "backup" else RemoteStore)(
                [self.address],
                RemoteStoreOptions(TOKEN, rank, INCARNATION, step_timeout=20.0, wire_dtype=wires[rank - 1]),
            )
            for rank in ranks
        }
        self.stores[1].create_tables([_SPEC])
        self._pool = ThreadPoolExecutor(len(ranks))
        self._turns = {rank: StepTurns(store.ask_first) for rank, store in self.stores.items()}

    @property
    def address(self) -> str:
        """Of the server."""
        return self._server.address

    def check(self) -> None:
        """All workers take a step; afterwards every row holds how many were taken."""
        list(self._pool.map(self._step, self.stores, timeout=60))
        self.steps += 1 if self.kind in ("sync", "backup") else len(self.stores)
        request = PullRequest({"mine": UniqueKeys(KEYS, ONES)}, train=False, dense=False)
        for store in self.stores.values():
            np.testing.assert_array_equal(store.pull(request).rows["mine"], np.float32(self.steps))

    def close(self) -> None:
        """End the server and its workers."""
        for store in self.stores.values():
            store.close()
        self._pool.shutdown(wait=False)
        self.service.stop()
        self._server.stop()

    def _step(self, rank: int) -> None:
        turns = self._turns[rank]
        if self.kind == "staleness":
            turns.enter()
            turns.may_begin(wait=True)
            turns.begun()
        store = self.stores[rank]
        store.pull(PullRequest({"mine": UniqueKeys(KEYS, ONES)}, dense=False))
        store.push(
            PushRequest({"mine": SparseGradient(KEYS, -np.ones((len(KEYS), DIM), np.float32))}, None, None, 1)
        )
        if self.kind == "staleness":
            turns.ended()
            turns.leave()


def specs() -> list[TableSpec]:
    """The tables that malformed messages are about."""
    option = EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=2))
    return [TableSpec("rows", DIM, optimizer=SGD(1.0)), TableSpec("more", 3, option, Adagrad(0.1), seed=3)]


def step_messages(sender: Sender) -> list[tuple[str, Message]]:
    """Valid pulls and pushes, of float32 and of bfloat16."""
    pull = PullRequest({table: UniqueKeys(KEYS, ONES) for table in ("rows", "more")})
    gradients = {
        name: SparseGradient(KEYS, np.zeros((len(KEYS), dim), np.float32))
        for name, dim in (("rows", DIM), ("more", 3))
    }
    zeros = np.zeros(5, np.float32)
    push = PushRequest(gradients, zeros, zeros, 1, 0.1, 0.1)
    return [
        ("pull", encode_pull(sender, pull)),
        ("pull", encode_pull(sender, pull, "bfloat16")),
        ("push", encode_push(sender, push, {"phase": 1, "rows": []})),
        ("push", encode_push(sender, push, None, "bfloat16")),
    ]


def server_messages(methods: list[str]) -> list[tuple[str, Message]]:
    """A valid message for each method of a server, or several; none of them is one that `Job` waits for."""
    sender = Sender(STORMING, 1, NEVER)
    zeros = np.zeros(5, np.float32)
    found = [
        ("create_tables", Message({"specs": [spec_to_dict(spec) for spec in specs()]})),
        ("init_dense", Message({"optimizer": SGD(1.0).to_dict()}, {"dense": zeros, "state": zeros})),
        *step_messages(sender),
        ("save", Message({"directory": "nowhere"})),
        ("snapshot", Message({"save_id": "one", "base": None})),
        ("write_snapshot", Message({"save_id": "one", "directory": "nowhere"})),
        ("drop_snapshot", Message({"save_id": "one"})),
        ("restore", Message({"chain": ["nowhere"], "directory": "nowhere", "save_id": "one"})),
    ]
    known = {method for method, _ in found}
    common = Message({**sender.to_header(), "timeout": 0.0})
    return found + [(method, common) for method in methods if method not in known]
