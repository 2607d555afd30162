"""A store that reaches one of its servers in process equals one that reaches all of them over the network."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD, Adagrad, Adam
from deeprec_spark.embedding.store import PullRequest, PushRequest, SparseGradient, TableSpec, UniqueKeys
from deeprec_spark.runtime.channel_server import ChannelServer
from deeprec_spark.runtime.loopback import Loopback
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions
from deeprec_spark.runtime.server import ParameterServer, ServerOptions

NODES = 2
SPECS = [TableSpec("a", 5, optimizer=Adagrad(0.1), seed=1), TableSpec("b", 3, optimizer=Adam(0.01), seed=2)]


def test_a_method_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"no method.*'missing'"):
        Loopback({}).call("missing", Message())


def test_errors_are_those_of_the_handler() -> None:
    def failing(message: Message) -> Message:
        raise ZeroDivisionError("as it was")

    with pytest.raises(ZeroDivisionError, match="as it was"):
        Loopback({"fail": failing}).call("fail", Message())


def test_lists_of_arrays_arrive_in_one_piece() -> None:
    given = Message({"x": 1}, {"some": [np.arange(2), np.arange(3)], "none": []})
    got = Loopback({"same": lambda message: message}).call("same", given)
    assert got.array("some", np.int64).tolist() == [0, 1, 0, 1, 2]
    assert got.array("none", np.uint8).tolist() == []
    assert got.header == {"x": 1}


class Nodes:
    """Nodes of one process that hold a shard each, and a synchronous worker's store beside each of them."""

    def __init__(self, stack: ExitStack, *, in_process: bool) -> None:
        options = ServerOptions(0, NODES, "sync", 60.0, placement="colocated")
        services = []
        for shard in range(NODES):
            store = LocalStore(shard_index=shard, num_shards=NODES)
            services.append(ParameterServer(store, options))
            stack.callback(store.close)
        servers = [ChannelServer(one.handlers(), host="127.0.0.1", token="t") for one in services]
        for server in servers:
            stack.callback(server.stop)
        for service in services:
            stack.callback(service.stop)
        addresses = [server.address for server in servers]
        self.stores = [
            RemoteStore(
                addresses,
                RemoteStoreOptions(token="t", rank=rank),
                {rank: Loopback(services[rank].handlers())} if in_process else None,
            )
            for rank in range(NODES)
        ]
        for store in self.stores:
            stack.callback(store.close)
            store.create_tables(SPECS)
            store.init_dense(np.linspace(-1, 1, 7, dtype=np.float32), np.zeros(3, np.float32), SGD(0.1))

    def train(self, steps: int) -> list[bytes]:
        """All that the workers saw, step by step."""
        with ThreadPoolExecutor(NODES) as pool:
            return [
                part for one in pool.map(lambda rank: self._train(rank, steps), range(NODES)) for part in one
            ]

    def _train(self, rank: int, steps: int) -> list[bytes]:
        chance, store = np.random.default_rng(rank), self.stores[rank]
        seen = []
        for _ in range(steps):
            keys = {spec.name: np.unique(chance.integers(-50, 50, 30)) for spec in SPECS}
            reply = store.pull(
                PullRequest({t: UniqueKeys(k, np.ones(len(k), np.int64)) for t, k in keys.items()})
            )
            assert reply.dense is not None
            seen += [*(rows.tobytes() for rows in reply.rows.values()), reply.dense.tobytes()]
            gradients = {
                spec.name: SparseGradient(
                    keys[spec.name],
                    chance.normal(size=(len(keys[spec.name]), spec.embedding_dim)).astype(np.float32),
                )
                for spec in SPECS
            }
            dense = chance.normal(size=7).astype(np.float32)
            store.push(PushRequest(gradients, dense, np.ones(3, np.float32), samples=3 + rank))
        return seen


def test_training_is_the_same_with_and_without_the_network_to_the_own_shard() -> None:
    with ExitStack() as stack:
        near = Nodes(stack, in_process=True).train(steps=8)
        far = Nodes(stack, in_process=False).train(steps=8)
    assert len(near) == NODES * 8 * 3
    assert near == far
