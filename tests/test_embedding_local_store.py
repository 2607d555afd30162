"""LocalStore: the protocol, and checkpoints on any number of shards."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash

from deeprec_spark.embedding.dense import dense_range
from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD, Adagrad, Adam, Optimizer
from deeprec_spark.embedding.options import (
    Constant,
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    InitializerOption,
)
from deeprec_spark.embedding.store import (
    EmbeddingStore,
    PullRequest,
    PushRequest,
    SparseGradient,
    TableSpec,
    UniqueKeys,
)
from deeprec_spark.embedding.table_files import bucket_range, table_directory

SPECS = [
    TableSpec("user", 4, optimizer=Adam(0.1), seed=1),
    TableSpec(
        "item/../x y",
        3,
        EmbeddingVariableOption(CounterFilter(2), GlobalStepEvict(5)),
        optimizer=Adagrad(0.1),
    ),
    TableSpec("wide", 1),
]
DENSE = np.linspace(-1, 1, 11).astype(np.float32)
STATE = np.arange(5, dtype=np.float32)


def _store(
    shard: int = 0, shards: int = 1, specs: list[TableSpec] = SPECS, dense: Optimizer | None = None
) -> LocalStore:
    store = LocalStore(shard, shards)
    store.create_tables(specs)
    store.init_dense(DENSE, STATE, dense or Adam(0.01))
    return store


def _mine(store: LocalStore, keys: np.ndarray) -> np.ndarray:
    return keys[bucket(keys).astype(np.int64) * store.num_shards // NUM_BUCKETS == store.shard_index]


def _train(stores: list[LocalStore], steps: int, first: int = 0) -> None:
    """The same updates, whatever the number of shards."""
    for step in range(first, first + steps):
        rng = np.random.default_rng(step)
        keys = {spec.name: np.unique(rng.integers(-3000, 3000, 400)) for spec in SPECS}
        gradients = {spec.name: rng.normal(size=(len(keys[spec.name]), spec.embedding_dim)) for spec in SPECS}
        dense, state = rng.normal(size=len(DENSE)), rng.normal(size=len(STATE)).astype(np.float32)
        for store in stores:
            part = {name: _mine(store, all_keys) for name, all_keys in keys.items()}
            unique = {name: UniqueKeys(own, np.ones(len(own), np.int64)) for name, own in part.items()}
            store.pull(PullRequest(unique))
            start, stop = dense_range(len(DENSE), store.shard_index, store.num_shards)
            first_state, last_state = dense_range(len(STATE), store.shard_index, store.num_shards)
            store.push(
                PushRequest(
                    {
                        name: SparseGradient(
                            own, gradients[name][np.isin(keys[name], own)].astype(np.float32)
                        )
                        for name, own in part.items()
                    },
                    dense[start:stop].astype(np.float32),
                    state[first_state:last_state],
                    samples=1,
                )
            )


def _content(stores: list[LocalStore]) -> dict[str, dict[int, tuple[object, ...]]]:
    """Every row by key with all that belongs to it, and counted keys, over all shards."""
    content: dict[str, dict[int, tuple[object, ...]]] = {}
    for spec in SPECS:
        rows = content.setdefault(spec.name, {})
        for store in stores:
            table = store.table(spec.name)
            for block in table.export():
                for i, key in enumerate(block.key.tolist()):
                    slots = [slot[i].tobytes() for slot in block.slots.values()]
                    rows[key] = (block.frequency[i], block.version[i], block.value[i].tobytes(), *slots)
            _, filtered, counts = table.keys()
            rows.update(
                {key: (count,) for key, count in zip(filtered.tolist(), counts.tolist(), strict=True)}
            )
    return content


def _dense(stores: list[LocalStore]) -> tuple[bytes, bytes]:
    replies = [store.pull(PullRequest({})) for store in stores]
    dense = np.concatenate([reply.dense for reply in replies if reply.dense is not None])
    state = np.concatenate([reply.state for reply in replies if reply.state is not None])
    return dense.tobytes(), state.tobytes()


def test_a_local_store_is_an_embedding_store() -> None:
    store: EmbeddingStore = _store()
    store.close()


def test_pull_and_push_of_all_tables() -> None:
    store = LocalStore()
    store.create_tables(
        [TableSpec("a", 2, _constant(3.0), SGD(1.0)), TableSpec("b", 1, _constant(5.0), SGD(1.0))]
    )
    store.init_dense(np.zeros(3, np.float32), np.ones(1, np.float32), SGD(0.5))
    ones = np.ones(2, np.int64)
    keys = {"b": UniqueKeys(np.array([7, -7]), ones), "a": UniqueKeys(np.array([1, 2]), ones)}
    reply = store.pull(PullRequest(keys))
    assert list(reply.rows) == ["b", "a"]
    assert reply.rows["a"].tolist() == [[3, 3], [3, 3]]
    assert reply.step == 0
    gradient = {"a": SparseGradient(np.array([2]), np.ones((1, 2), np.float32))}
    push = PushRequest(
        gradient, np.ones(3, np.float32), np.full(1, 2.0, np.float32), samples=8, dense_learning_rate=2.0
    )
    assert store.push(push) == 1
    reply = store.pull(PullRequest(keys, train=False))
    assert reply.rows["a"].tolist() == [[3, 3], [2, 2]]
    assert reply.dense is not None
    assert reply.dense.tolist() == [-2, -2, -2]
    assert reply.state is not None
    assert reply.state.tolist() == [3]
    assert store.pull(PullRequest({}, dense=False)).dense is None


def _constant(value: float) -> EmbeddingVariableOption:
    return EmbeddingVariableOption(init_option=InitializerOption(Constant(value)))


def test_an_empty_push_counts_as_a_step_on_every_table() -> None:
    """Servers without keys of a step must keep the same clocks as the others."""
    store = _store()
    nothing = SparseGradient(np.empty(0, np.int64), np.empty((0, 4), np.float32))
    assert store.push(PushRequest({"user": nothing}, None, None, samples=0)) == 1
    assert store.table("user").core.updates == 1


def test_equal_specs_are_one_table_and_others_an_error() -> None:
    store = _store()
    store.create_tables([SPECS[0]])
    with pytest.raises(ValueError, match="exists with another spec"):
        store.create_tables([dataclasses.replace(SPECS[0], embedding_dim=5)])
    with pytest.raises(ValueError, match=r"11 parameters.*Received: 3 parameters"):
        store.init_dense(np.zeros(3, np.float32), STATE, Adam(0.01))
    with pytest.raises(ValueError, match="Received: table='nobody'"):
        store.pull(PullRequest({"nobody": UniqueKeys(np.zeros(1, np.int64), np.ones(1, np.int64))}))
    with pytest.raises(ValueError, match="init_dense first"):
        LocalStore().pull(PullRequest({}))
    with pytest.raises(ValueError, match="shard_index=3, num_shards=3"):
        LocalStore(3, 3)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (1, 3), (3, 1), (3, 8), (8, 3)])
def test_a_checkpoint_restores_on_any_number_of_shards(tmp_path: Path, writers: int, readers: int) -> None:
    before = [_store(i, writers) for i in range(writers)]
    _train(before, 4)
    files = [file for store in before for file in store.save(str(tmp_path))]
    assert len({file.path for file in files}) == len(files)
    for file in files:
        data = (tmp_path / file.path).read_bytes()
        assert (file.num_bytes, file.checksum) == (len(data), f"xxh3-128:{xxhash.xxh3_128(data).hexdigest()}")
    after = [_store(i, readers) for i in range(readers)]
    _train(after, 1, first=50)  # what was there is replaced
    for store in after:
        store.restore(str(tmp_path))
        assert store.step == 4
    assert _content(after) == _content(before)
    assert _dense(after) == _dense(before)
    # Training goes on as if nothing had happened: slots, counts, versions and step counters are all there.
    _train(before, 3, first=4)
    _train(after, 3, first=4)
    assert _content(after) == _content(before)
    assert _dense(after) == _dense(before)


def test_the_number_of_shards_changes_nothing() -> None:
    one, three = [_store()], [_store(i, 3) for i in range(3)]
    _train(one, 5)
    _train(three, 5)
    assert _content(one) == _content(three)
    assert _dense(one) == _dense(three)


def test_rows_do_not_share_the_first_rows_value(tmp_path: Path) -> None:
    """TFRA #363: every restored row had the first row's value."""
    store = _store()
    _train([store], 2)
    store.save(str(tmp_path))
    again = _store()
    again.restore(str(tmp_path))
    values = np.concatenate([block.value for block in again.table("user").export()])
    assert len(np.unique(values, axis=0)) == len(values)


def test_counts_of_filtered_keys_survive(tmp_path: Path) -> None:
    """DeepRec #135: admission counts were lost on restore."""
    store = _store()
    name = SPECS[1].name
    store.table(name).lookup([1, 2], train=True)
    store.save(str(tmp_path))
    again = _store()
    again.restore(str(tmp_path))
    assert again.statistics()[name]["filtered"] == 2
    assert len(again.table(name)) == 0
    again.table(name).lookup([2], train=True)
    assert again.table(name).keys()[0].tolist() == [2]


def test_a_new_threshold_judges_counted_keys_and_keeps_admitted_ones(tmp_path: Path) -> None:
    store = _store()
    name = SPECS[1].name
    store.table(name).lookup([1, 1, 2], train=True)
    store.save(str(tmp_path))
    stricter = dataclasses.replace(
        SPECS[1], option=EmbeddingVariableOption(CounterFilter(10), GlobalStepEvict(9))
    )
    again = _store(specs=[SPECS[0], stricter, SPECS[2]])
    again.restore(str(tmp_path))
    assert again.table(name).keys()[0].tolist() == [1]
    looser = dataclasses.replace(SPECS[1], option=EmbeddingVariableOption())
    open_ = _store(specs=[SPECS[0], looser, SPECS[2]])
    open_.restore(str(tmp_path))
    open_.table(name).lookup([2], train=True)
    assert sorted(open_.table(name).keys()[0]) == [1, 2]


@pytest.mark.parametrize(
    ("change", "sides"),
    [
        ({"embedding_dim": 5}, ["embedding_dim=4 in the checkpoint", "5 in the table"]),
        ({"optimizer": Adagrad()}, ["Adam", "Adagrad"]),
        ({"optimizer": Adam(0.1, beta_1=0.5)}, ["0.9", "0.5"]),
        ({"seed": 9}, ["seed=1", "9"]),
        ({"option": _constant(1.0)}, ["Uniform", "Constant"]),
    ],
)
def test_a_table_of_another_kind_is_refused(
    tmp_path: Path, change: dict[str, object], sides: list[str]
) -> None:
    store = _store()
    _train([store], 1)
    store.save(str(tmp_path))
    other = _store(specs=[dataclasses.replace(SPECS[0], **change), *SPECS[1:]])  # type: ignore[arg-type]  # by name
    with pytest.raises(ValueError, match="'user'") as caught:
        other.restore(str(tmp_path))
    assert all(side in str(caught.value) for side in sides), caught.value


def test_another_model_or_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    for store in (_store(0, 2), _store(1, 2)):
        store.save(str(tmp_path))
    with pytest.raises(ValueError, match=r"tables differ.*'extra'"):
        _store(specs=[*SPECS, TableSpec("extra", 2)]).restore(str(tmp_path))
    with pytest.raises(ValueError, match="another optimizer"):
        _store(dense=SGD()).restore(str(tmp_path))
    wider = LocalStore()
    wider.create_tables(SPECS)
    wider.init_dense(np.zeros(12, np.float32), STATE, Adam(0.01))
    with pytest.raises(ValueError, match=r"11 parameters.*12"):
        wider.restore(str(tmp_path))
    (tmp_path / "store-00001.json").unlink()
    with pytest.raises(ValueError, match="not complete: it needs 2"):
        _store().restore(str(tmp_path))
    with pytest.raises(ValueError, match="at least 1"):
        _store().restore(str(tmp_path / "nowhere"))


def test_a_learning_rate_may_change(tmp_path: Path) -> None:
    store = _store()
    _train([store], 1)
    store.save(str(tmp_path))
    other = _store(specs=[dataclasses.replace(SPECS[0], optimizer=Adam(0.5)), *SPECS[1:]], dense=Adam(0.9))
    other.restore(str(tmp_path))
    assert _content([other]) == _content([store])


def test_table_files_are_plain_parquet_sorted_by_bucket(tmp_path: Path) -> None:
    store = _store()
    _train([store], 2)
    store.save(str(tmp_path))
    data = pq.read_table(tmp_path / table_directory("user") / "part-00000-00000.parquet")
    assert data.column_names == ["key", "frequency", "version", "value", "m", "v"]
    keys = data.column("key").to_numpy()
    assert (np.diff(bucket(keys)) >= 0).all()
    rows = np.stack(data.column("value").to_numpy())
    np.testing.assert_array_equal(rows, store.table("user").lookup(keys))


def test_bucket_ranges_cover_every_bucket_once() -> None:
    for shards in (1, 3, 7, 64, 1000):
        ranges = [bucket_range(i, shards) for i in range(shards)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == NUM_BUCKETS
        for i, (first, last) in enumerate(ranges):
            assert all(b * shards // NUM_BUCKETS == i for b in range(first, last))
            assert i == 0 or ranges[i - 1][1] == first


@pytest.mark.timeout(120)
def test_a_save_during_training_never_mixes_a_row(tmp_path: Path) -> None:
    """DeepRec #1023: weights and slots were snapshotted apart; Paddle #32958: NaN while a server saved."""
    spec = TableSpec("t", 8, _constant(0.0), SGD(1.0, momentum=0.5))
    option = dataclasses.replace(spec.option, evict_option=GlobalStepEvict(2))
    spec = dataclasses.replace(spec, option=option)
    store = LocalStore()
    store.create_tables([spec])
    stop = threading.Event()
    failures: list[BaseException] = []

    def train(worker: int) -> None:
        try:
            rng = np.random.default_rng(worker)
            while not stop.is_set():
                keys = np.unique(rng.integers(0, 2000, 1000))
                store.pull(PullRequest({"t": UniqueKeys(keys, np.ones(len(keys), np.int64))}, dense=False))
                gradient = np.repeat(rng.integers(-3, 3, (len(keys), 1)), 8, 1).astype(np.float32)
                store.push(PushRequest({"t": SparseGradient(keys, gradient)}, None, None, samples=1))
                store.evict()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    try:
        for round_ in range(8):
            root = tmp_path / str(round_)
            store.save(str(root))
            again = LocalStore()
            again.create_tables([spec])
            again.restore(str(root))
            for block in again.table("t").export():
                # All elements of a row get equal updates, so a torn row shows; a mixed row breaks value = f(slot).
                assert np.isfinite(block.value).all()
                assert (block.value == block.value[:, :1]).all()
                assert (block.slots["momentum"] == block.slots["momentum"][:, :1]).all()
                fresh = block.version == -1
                assert (block.value[fresh] == 0).all()
                assert (block.slots["momentum"][fresh] == 0).all()
                assert len(np.unique(block.key)) == len(block.key)
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=30)
    assert not failures


def test_what_unknown_keys_read_can_be_what_a_checkpoint_gives() -> None:
    option = EmbeddingVariableOption(init_option=InitializerOption(Constant(2.0), 0.5))
    filtered = EmbeddingVariableOption(CounterFilter(2), init_option=InitializerOption(Constant(2.0), 0.25))
    store = LocalStore()
    store.create_tables([TableSpec("plain", 2, option), TableSpec("filtered", 2, filtered)])
    known = UniqueKeys(np.array([1]), np.array([1]))
    store.pull(PullRequest({"plain": known, "filtered": known}, dense=False))
    asked = UniqueKeys(np.array([7, 1]), np.array([1, 1]))

    def read(**how: object) -> dict[str, list[list[float]]]:
        request = PullRequest({"plain": asked, "filtered": asked}, dense=False, train=False, **how)
        return {name: rows.tolist() for name, rows in store.pull(request).rows.items()}

    assert read() == {"plain": [[2.0, 2.0], [2.0, 2.0]], "filtered": [[0.25, 0.25]] * 2}
    assert read(unknown="default") == {"plain": [[0.5, 0.5], [2.0, 2.0]], "filtered": [[0.25, 0.25]] * 2}
    assert store.statistics()["plain"]["rows"] == 1
