"""RemoteStore over real servers equals LocalStore, for any number of servers, bit for bit."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD, Adagrad, Adam
from deeprec_spark.embedding.options import CounterFilter, EmbeddingVariableOption
from deeprec_spark.embedding.store import PullRequest, PushRequest, SparseGradient, TableSpec, UniqueKeys
from deeprec_spark.runtime import remote_store
from deeprec_spark.runtime.channel import Channel
from deeprec_spark.runtime.channel_server import ChannelServer
from deeprec_spark.runtime.errors import ConnectionLostError, StaleNodeError
from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions, merge_statistics
from deeprec_spark.runtime.server import ParameterServer, ServerOptions
from deeprec_spark.runtime.store_messages import Sender, encode_pull, encode_push
from deeprec_spark.training.buffers import concatenate

TOKEN = "token"
EXTREMES = [-(2**63), 2**63 - 1, 0, -1, -2, 1]
SPECS = [
    TableSpec("a", 16, optimizer=Adagrad(learning_rate=0.1), seed=1),
    TableSpec("b", 3, optimizer=Adam(learning_rate=0.01), seed=2),
    TableSpec(
        "c", 4, EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=3)), SGD(learning_rate=0.5)
    ),
]


class Cluster:
    """Servers in this process, and stores that talk to them."""

    def __init__(self, num_ps, num_workers=1, mode="async", sync_timeout=60.0):
        self.num_ps = num_ps
        options = ServerOptions(num_ps, num_workers, mode, sync_timeout)
        self.locals = [LocalStore(shard_index=shard, num_shards=num_ps) for shard in range(num_ps)]
        self.services = [ParameterServer(store, options) for store in self.locals]
        self.servers = [
            ChannelServer(service.handlers(), host="127.0.0.1", token=TOKEN) for service in self.services
        ]
        self.stores = []

    def store(self, worker=0, incarnation=1, **options):
        addresses = [server.address for server in self.servers]
        common = {
            "token": TOKEN,
            "rank": self.num_ps + worker,
            "incarnation": incarnation,
            "step_timeout": 60.0,
        }
        self.stores.append(RemoteStore(addresses, RemoteStoreOptions(**{**common, **options})))
        return self.stores[-1]

    def close(self):
        for service in self.services:
            service.stop()
        for store in self.stores:
            store.close()
        for server in self.servers:
            server.stop()


@pytest.fixture
def start_cluster():
    clusters = []

    def start(*arguments, **options):
        clusters.append(Cluster(*arguments, **options))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.close()


def prepared(store):
    store.create_tables(SPECS)
    store.init_dense(
        np.linspace(-1, 1, 11, dtype=np.float32), np.arange(5, dtype=np.float32), Adam(learning_rate=0.1)
    )
    return store


def batch(chance, size=40):
    """Unique keys by table, some extreme, some tables empty."""
    found = {}
    for spec in SPECS:
        pool = np.unique(np.concatenate([chance.integers(-50, 50, chance.integers(0, size)), EXTREMES]))
        keys = chance.permutation(pool)[: chance.integers(0, len(pool) + 1)].astype(np.int64)
        found[spec.name] = UniqueKeys(keys, chance.integers(1, 4, len(keys)))
    return found


def gradients(chance, keys):
    return {
        spec.name: SparseGradient(
            keys[spec.name].keys,
            chance.normal(size=(len(keys[spec.name].keys), spec.embedding_dim)).astype(np.float32),
        )
        for spec in SPECS
    }


def push_request(chance, keys, samples=8):
    return PushRequest(
        gradients(chance, keys),
        chance.normal(size=11).astype(np.float32),
        chance.normal(size=5).astype(np.float32),
        samples,
        sparse_learning_rate=float(chance.choice([0.1, 0.2])),
    )


def assert_same_reply(got, expected):
    assert list(got.rows) == list(expected.rows)
    for table, rows in expected.rows.items():
        assert got.rows[table].shape == rows.shape
        assert got.rows[table].tobytes() == rows.tobytes(), table
    for name in ("dense", "state"):
        one, other = getattr(got, name), getattr(expected, name)
        assert (one is None) == (other is None)
        assert one is None or one.tobytes() == other.tobytes()
    assert got.step == expected.step


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_training_equals_local_store_bit_for_bit(start_cluster, servers):
    remote, local = prepared(start_cluster(servers).store()), prepared(LocalStore())
    chance = np.random.default_rng(servers)
    for step in range(12):
        keys = batch(chance)
        unknown = "default" if step % 8 == 7 else "start"
        request = PullRequest(keys, train=step % 4 != 3, dense=step % 3 != 2, unknown=unknown)
        assert_same_reply(remote.pull(request), local.pull(request))
        update = push_request(chance, keys)
        assert remote.push(update) == local.push(update) == step + 1
    assert {table: stats["rows"] for table, stats in remote.statistics().items()} == {
        table: stats["rows"] for table, stats in local.statistics().items()
    }


@pytest.mark.parametrize("servers", [1, 2])
def test_bfloat16_rounds_rows_and_gradients_but_no_dense_parameter(start_cluster, servers):
    narrow, local = prepared(start_cluster(servers).store(wire_dtype="bfloat16")), prepared(LocalStore())

    def rounded(array):
        return array.astype(ml_dtypes.bfloat16).astype(np.float32)

    chance = np.random.default_rng(servers)
    for _ in range(4):
        keys = batch(chance)
        got, exact = narrow.pull(PullRequest(keys)), local.pull(PullRequest(keys))
        rows = {table: rounded(part) for table, part in exact.rows.items()}
        assert_same_reply(got, replace(exact, rows=rows))
        update = push_request(chance, keys)
        narrow.push(update)
        gradients_of = {
            table: SparseGradient(part.keys, rounded(part.gradient))
            for table, part in update.gradients.items()
        }
        local.push(replace(update, gradients=gradients_of))


def test_a_pull_that_asks_for_other_numbers_is_refused(start_cluster):
    store = prepared(start_cluster(1).store(wire_dtype="float8"))
    with pytest.raises(ValueError, match=r"A pull says how rows are sent\. Received: wire=float8"):
        store.pull(PullRequest({}))


def test_rows_of_one_width_lie_one_after_the_other(start_cluster):
    """So that a step takes them as one tensor, uncopied."""
    store = start_cluster(1).store()
    store.create_tables([TableSpec(name, dim) for name, dim in (("a", 3), ("b", 3), ("c", 16), ("d", 16))])
    counts = {"a": 5, "b": 2, "c": 3, "d": 0}
    keys = {name: UniqueKeys(np.arange(n), np.ones(n, np.int64)) for name, n in counts.items()}
    rows = store.pull(PullRequest(keys, dense=False)).rows
    assert {name: part.shape[0] for name, part in rows.items()} == counts
    for first, second, width in (("a", "b", 3), ("c", "d", 16)):
        assert rows[first].ctypes.data % 64 == 0
        joined = concatenate([rows[first], rows[second]], (width,), np.float32)
        assert np.shares_memory(joined, rows[first])
        assert np.array_equal(joined, np.concatenate([rows[first], rows[second]]))
        assert joined.shape == (counts[first] + counts[second], width)


@pytest.mark.parametrize("servers", [1, 3])
def test_rows_are_aligned_and_writable(start_cluster, servers):
    store = prepared(start_cluster(servers).store())
    reply = store.pull(PullRequest(batch(np.random.default_rng(0))))
    for array in [*reply.rows.values(), reply.dense, reply.state]:
        assert array.ctypes.data % 64 == 0
        assert array.flags.writeable
        assert array.dtype == np.float32


@pytest.mark.parametrize("servers", [1, 2])
def test_empty_requests(start_cluster, servers):
    store = prepared(start_cluster(servers).store())
    reply = store.pull(PullRequest({}, dense=False))
    assert (dict(reply.rows), reply.dense, reply.state, reply.step) == ({}, None, None, 0)
    nothing = UniqueKeys(np.empty(0, np.int64), np.empty(0, np.int64))
    assert store.pull(PullRequest({"a": nothing})).rows["a"].shape == (0, 16)
    assert store.push(PushRequest({}, None, None, 0)) == 1
    empty = SparseGradient(np.empty(0, np.int64), np.empty((0, 16), np.float32))
    assert store.push(PushRequest({"a": empty}, None, None, 0)) == 2


def test_save_and_restore_on_another_number_of_servers(start_cluster, tmp_path):
    chance = np.random.default_rng(3)
    two, three = prepared(start_cluster(2).store()), prepared(start_cluster(3).store())
    for _ in range(5):
        keys = batch(chance)
        two.pull(PullRequest(keys))
        two.push(push_request(chance, keys))
    files = two.save(str(tmp_path))
    assert {file.table for file in files} == {"a", "b", "c", None}
    assert all((tmp_path / file.path).stat().st_size == file.num_bytes for file in files)
    three.restore(str(tmp_path))
    for _ in range(5):
        keys = batch(chance)
        request, update = PullRequest(keys), push_request(chance, keys)
        assert_same_reply(three.pull(request), two.pull(request))
        assert three.push(update) == two.push(update)


def test_eviction_and_statistics_are_summed(start_cluster):
    cluster = start_cluster(2)
    store = prepared(cluster.store())
    keys = np.arange(100, dtype=np.int64)
    store.pull(PullRequest({"a": UniqueKeys(keys, np.ones(100, np.int64))}))
    per_server = [local.statistics()["a"]["rows"] for local in cluster.locals]
    assert min(per_server) > 0
    assert store.statistics()["a"]["rows"] == sum(per_server) == 100
    assert set(store.evict()) == {"a", "b", "c"}


def test_merging_statistics():
    shards = [
        {"a": {"rows": 1, "bytes": 2.5, "kind": "x", "on": True}},
        {"a": {"rows": 3, "bytes": 1.0, "kind": "x", "on": True}},
    ]
    assert merge_statistics(shards) == {"a": {"rows": 4, "bytes": 3.5, "kind": "x", "on": True}}


@pytest.mark.parametrize("servers", [1, 2])
def test_errors_of_servers_arrive(start_cluster, servers):
    store = prepared(start_cluster(servers).store())
    with pytest.raises(ValueError, match="exists with another spec"):
        store.create_tables([TableSpec("a", 8)])
    with pytest.raises(ValueError, match="no such table"):
        store.pull(PullRequest({"unknown": UniqueKeys(np.array([1]), np.array([1]))}))
    with pytest.raises(ValueError, match="another model"):
        store.init_dense(np.zeros(3, np.float32), np.zeros(5, np.float32), Adam(learning_rate=0.1))
    assert store.pull(PullRequest({})).step == 0


def test_a_server_that_is_gone_is_named(start_cluster):
    cluster = start_cluster(2)
    store = prepared(cluster.store(retry_seconds=0.2))
    cluster.servers[1].stop()
    with pytest.raises(ConnectionLostError, match=cluster.servers[1].address):
        store.pull(PullRequest({}))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_push_whose_answer_is_lost_is_applied_once(start_cluster, monkeypatch, mode):
    """The connection breaks after the server applied the request: the client sends it again."""
    cluster = start_cluster(2, 2 if mode == "sync" else 1, mode)
    stores = [prepared(cluster.store(worker)) for worker in range(2 if mode == "sync" else 1)]
    local = prepared(LocalStore())
    lost = []
    real = remote_store.Channel.call

    def unreliable(connection, method, message, *, timeout=None):
        answer = real(connection, method, message, timeout=timeout)
        mark = (connection.address, method, message.header.get("rank"), message.header.get("sequence"))
        if method in ("pull", "push") and mark not in lost:
            lost.append(mark)
            raise ConnectionLostError("the answer was lost")
        return answer

    monkeypatch.setattr(remote_store.Channel, "call", unreliable)
    chance = np.random.default_rng(5)
    with ThreadPoolExecutor(2) as pool:
        for step in range(3):
            keys = batch(chance)
            request, update = PullRequest(keys), push_request(chance, keys)
            expected = local.pull(
                PullRequest({t: UniqueKeys(k.keys, k.counts * len(stores)) for t, k in keys.items()})
            )
            for reply in pool.map(lambda store, r=request: store.pull(r), stores):
                assert_same_reply(reply, expected)
            assert local.push(update) == step + 1
            assert list(pool.map(lambda store, u=update: store.push(u), stores)) == [step + 1] * len(stores)
    assert len(lost) == 2 * 3 * 2 * len(stores)


def test_a_replaced_worker_is_turned_away_by_the_servers(start_cluster):
    cluster = start_cluster(1)
    old, new = cluster.store(incarnation=4), cluster.store(incarnation=7)
    prepared(old)
    assert old.push(PushRequest({}, None, None, 1)) == 1
    assert new.push(PushRequest({}, None, None, 1)) == 2
    with pytest.raises(StaleNodeError, match=r"worker 0 \(rank 1\) was replaced.*newest=7"):
        old.push(PushRequest({}, None, None, 1))


def test_two_asynchronous_workers_lose_no_update(start_cluster):
    cluster = start_cluster(2, 2)
    stores = [cluster.store(worker) for worker in range(2)]
    for store in stores:
        store.create_tables([TableSpec("n", 2, optimizer=SGD(learning_rate=1.0))])
        store.init_dense(np.zeros(3, np.float32), np.zeros(1, np.float32), SGD(learning_rate=1.0))
    keys = UniqueKeys(np.arange(10, dtype=np.int64), np.ones(10, np.int64))
    before = stores[0].pull(PullRequest({"n": keys}))
    update = PushRequest(
        {"n": SparseGradient(keys.keys, np.full((10, 2), -1, np.float32))},
        np.full(3, -1, np.float32), np.ones(1, np.float32), samples=1,
    )  # fmt: skip

    def train(store):
        for _ in range(50):
            store.pull(PullRequest({"n": keys}))
            store.push(update)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, stores))
    after = stores[1].pull(PullRequest({"n": keys}))
    np.testing.assert_allclose(after.rows["n"] - before.rows["n"], 100, rtol=1e-5)
    assert after.dense.tolist() == [100.0] * 3
    assert after.state.tolist() == [100.0]
    assert after.step == 100


def _train_synchronously(cluster, order, steps=6):
    """Two workers, of which the second one runs out of data; all rows, dense and state at the end, as bytes."""
    stores = [prepared(cluster.store(worker)) for worker in range(2)]

    def train(worker):
        chance = np.random.default_rng(100 + worker)
        for step in range(steps):
            keys = batch(chance)
            samples = 8 if worker == 0 or step < steps - 2 else 0
            if not samples:
                keys = {t: UniqueKeys(k.keys[:0], k.counts[:0]) for t, k in keys.items()}
            stores[worker].pull(PullRequest(keys))
            assert stores[worker].push(push_request(chance, keys, samples)) == step + 1

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, order))
    everything = {
        spec.name: UniqueKeys(np.array([*range(-60, 60), *EXTREMES[:2]]), np.ones(122, np.int64))
        for spec in SPECS
    }
    reply = stores[0].pull(PullRequest(everything, train=False))
    return [reply.rows[spec.name].tobytes() for spec in SPECS] + [
        reply.dense.tobytes(),
        reply.state.tobytes(),
    ]


def test_synchronous_training_is_bit_identical_whatever_arrives_first_and_however_many_servers(start_cluster):
    runs = [
        _train_synchronously(start_cluster(servers, 2, "sync"), order)
        for servers, order in ((1, (0, 1)), (1, (1, 0)), (3, (0, 1)))
    ]
    assert runs[0] == runs[1] == runs[2]


def test_one_synchronous_worker_equals_local_store(start_cluster):
    remote, local = prepared(start_cluster(2, 1, "sync").store()), prepared(LocalStore())
    chance = np.random.default_rng(9)
    for _ in range(4):
        keys = batch(chance)
        request, update = PullRequest(keys), push_request(chance, keys)
        assert_same_reply(remote.pull(request), local.pull(request))
        assert remote.push(update) == local.push(update)


def test_a_fenced_worker_is_turned_away_and_its_last_position_known(start_cluster):
    cluster = start_cluster(1, 2)
    places = iter([{"phase": 1, "rows": [[0, 4]]}, {"phase": 1, "rows": [[0, 8]]}, None])
    lost = prepared(cluster.store(0, incarnation=3, position=lambda: next(places)))
    other = prepared(cluster.store(1, incarnation=4))
    [server] = cluster.services
    assert server.fence(1, 2) is None, "an earlier copy has pushed nothing"
    lost.push(PushRequest({}, None, None, 1))
    lost.push(PushRequest({}, None, None, 1))
    assert server.fence(1, 3) == {"phase": 1, "rows": [[0, 8]]}
    with pytest.raises(StaleNodeError, match=r"worker 0 \(rank 1\) was replaced"):
        lost.push(PushRequest({}, None, None, 1))
    assert other.push(PushRequest({}, None, None, 1)) == 3
    assert cluster.store(0, incarnation=5).push(PushRequest({}, None, None, 1)) == 4


def test_a_missing_rank_is_named_after_the_deadline(start_cluster):
    cluster = start_cluster(2, 2, "sync", sync_timeout=0.4)
    store = prepared(cluster.store(0))
    with pytest.raises(
        TimeoutError, match=r"waited 0.4 s.*deadlines.step_secs.*Missing: worker 1 \(rank 3\)"
    ):
        store.pull(PullRequest({}))


def test_evaluation_pulls_do_not_wait_for_other_ranks(start_cluster):
    cluster = start_cluster(1, 2, "sync", sync_timeout=5.0)
    store = prepared(cluster.store(0))
    assert store.pull(PullRequest(batch(np.random.default_rng(0)), train=False)).step == 0


def test_no_servers():
    with pytest.raises(ValueError, match=r"Received: addresses=\[\]"):
        RemoteStore([], RemoteStoreOptions(token=TOKEN))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("table", "nowhere"),
        ("width", "width"),
        ("dense", "as long as the dense vector"),
        ("counts", "count of at least 0"),
        ("unknown", "nowhere"),
    ],
)
def test_what_does_not_fit_is_refused_to_its_sender_and_the_round_goes_on(start_cluster, kind, message):
    cluster = start_cluster(1, 2, "sync", sync_timeout=20.0)
    first, second = (prepared(cluster.store(worker)) for worker in range(2))
    keys, dim = np.array([1], np.int64), SPECS[0].embedding_dim
    bad = {
        "table": PushRequest({"nowhere": SparseGradient(keys, np.ones((1, dim), np.float32))}, None, None, 1),
        "width": PushRequest(
            {SPECS[0].name: SparseGradient(keys, np.ones((1, dim + 1), np.float32))}, None, None, 1
        ),
        "dense": PushRequest({}, np.ones(3, np.float32), None, 1),
        "counts": PullRequest({SPECS[0].name: UniqueKeys(keys, np.array([-1], np.int64))}),
        "unknown": PullRequest({"nowhere": UniqueKeys(keys, keys)}),
    }[kind]
    sender = Sender(rank=1, incarnation=1, sequence=1)
    connection = Channel(cluster.servers[0].address, token=TOKEN)
    with ThreadPoolExecutor(1) as pool:
        pulls = isinstance(bad, PullRequest)
        waiting = pool.submit(
            second.pull if pulls else second.push,
            PullRequest({}) if pulls else PushRequest({}, None, None, 1),
        )
        encoded = encode_pull(sender, bad) if pulls else encode_push(sender, bad)
        with pytest.raises((ValueError, KeyError), match=message):
            connection.call("pull" if pulls else "push", encoded)
        assert not waiting.done()
        answer = first.pull(PullRequest({})).step if pulls else first.push(PushRequest({}, None, None, 1))
        answered = waiting.result(timeout=20)
        assert (answered.step if pulls else answered) == answer
    connection.close()
