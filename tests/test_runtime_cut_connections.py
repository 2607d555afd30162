"""Connections that break anywhere in a pull or a push: each takes effect exactly once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.options import Constant, EmbeddingVariableOption, InitializerOption
from deeprec_spark.embedding.store import PullRequest, PushRequest, SparseGradient, TableSpec, UniqueKeys
from deeprec_spark.runtime.channel_server import ChannelServer
from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions
from deeprec_spark.runtime.server import ParameterServer, ServerOptions
from tests.cut_proxy import CutProxy, somewhere

TOKEN = "token"
DIM = 16
KEYS = np.arange(500, dtype=np.int64)
ONES = np.ones(len(KEYS), np.int64)
ZEROS = EmbeddingVariableOption(init_option=InitializerOption(initializer=Constant(0.0)))


@dataclass
class Shop:
    """Servers behind proxies, and a store that goes through these."""

    servers: list[ChannelServer]
    proxies: list[CutProxy]
    store: RemoteStore


@pytest.fixture(params=[1, 2], ids=["one server", "two servers"])
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    number: int = request.param
    services = [
        ParameterServer(LocalStore(shard, number), ServerOptions(number, 1)) for shard in range(number)
    ]
    servers = [ChannelServer(service.handlers(), host="127.0.0.1", token=TOKEN) for service in services]
    proxies = [CutProxy(server.address) for server in servers]
    options = RemoteStoreOptions(
        TOKEN, rank=number, step_timeout=20.0, retry_seconds=20.0, local_sockets=False
    )
    store = RemoteStore([proxy.address for proxy in proxies], options)
    store.create_tables([TableSpec("counts", DIM, ZEROS, SGD(1.0))])
    store.init_dense(np.zeros(1000, np.float32), np.zeros(3, np.float32), SGD(1.0))
    yield Shop(servers, proxies, store)
    store.close()
    for proxy in proxies:
        proxy.close()
    for server in servers:
        server.stop()


def push(store: RemoteStore) -> None:
    gradient = SparseGradient(KEYS, np.full((len(KEYS), DIM), -1, np.float32))
    store.push(PushRequest({"counts": gradient}, np.full(1000, -1, np.float32), np.ones(3, np.float32), 1))


def test_pushes_and_pulls_over_connections_that_break(shop: Shop) -> None:
    chance = random.Random(4)
    size = len(KEYS) * (DIM * 4 + 8) // len(shop.servers)
    rounds = 30
    for number in range(rounds):
        for proxy in shop.proxies:
            proxy.arm(*somewhere(chance, size))
        push(shop.store)
        for proxy in shop.proxies:
            proxy.disarm()
        for proxy in shop.proxies:
            proxy.arm(*somewhere(chance, size // 3))
        reply = shop.store.pull(PullRequest({"counts": UniqueKeys(KEYS, ONES)}))
        for proxy in shop.proxies:
            proxy.disarm()
        assert np.unique(reply.rows["counts"]).tolist() == [number + 1]
        assert reply.dense is not None
        assert reply.state is not None
        assert np.unique(reply.dense).tolist() == [number + 1]
        assert np.unique(reply.state).tolist() == [number + 1]
        assert reply.step == number + 1
    # A pull that was answered but not heard counts its keys once, too.
    assert shop.store.statistics()["counts"]["rows"] == len(KEYS)
    assert sum(proxy.cuts for proxy in shop.proxies) > rounds
