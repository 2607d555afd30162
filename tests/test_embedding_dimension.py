"""Dimensions that grow with frequency, bfloat16 values, and lookups of several features at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD, Adagrad, RowwiseAdagrad
from deeprec_spark.embedding.options import (
    Constant,
    CounterFilter,
    DynamicDimensionOption,
    EmbeddingVariableOption,
    InitializerOption,
    StorageOption,
    StorageType,
)
from deeprec_spark.embedding.store import TableSpec
from deeprec_spark.embedding.variable import EmbeddingVariable
from deeprec_spark.runtime.placement import split_keys

DIM = 8
GROWING = DynamicDimensionOption(block_num=4, thresholds=(3, 5, 9))


def _growing(**options: object) -> EmbeddingVariableOption:
    return EmbeddingVariableOption(dynamic_dimension=GROWING, **options)  # type: ignore[arg-type]  # by name


def _blocks(table: EmbeddingVariable) -> dict[int, int]:
    block = next(table.export())
    assert block.blocks is not None
    return dict(zip(block.key.tolist(), block.blocks.tolist(), strict=True))


def test_blocks_come_with_frequency_and_hold_their_start_values() -> None:
    table = EmbeddingVariable("t", DIM, option=_growing(), optimizer=Adagrad(0.1), seed=4)
    full = EmbeddingVariable("f", DIM, seed=4).lookup([1])[0]
    for occurrence in range(1, 12):
        row = table.lookup([1], train=True)[0]
        blocks = 1 + sum(occurrence >= threshold for threshold in (3, 5, 9))
        np.testing.assert_array_equal(row[: 2 * blocks], full[: 2 * blocks])
        assert (row[2 * blocks :] == 0).all()
        np.testing.assert_array_equal(table.lookup([1])[0], row)
    assert _blocks(table) == {1: 4}


def test_an_unseen_key_reads_one_block() -> None:
    table = EmbeddingVariable("t", DIM, option=_growing(), seed=4)
    row = table.lookup([7])[0]
    np.testing.assert_array_equal(row[:2], EmbeddingVariable("f", DIM, seed=4).lookup([7])[0, :2])
    assert (row[2:] == 0).all()


@pytest.mark.parametrize("optimizer", [Adagrad(0.1), RowwiseAdagrad(0.1)])
def test_learned_values_and_slots_survive_growth_and_absent_blocks_take_no_gradient(
    optimizer: Adagrad | RowwiseAdagrad,
) -> None:
    table = EmbeddingVariable("t", DIM, option=_growing(), optimizer=optimizer, seed=4)
    table.lookup([1], train=True)
    table.apply_gradients([1], np.ones((1, DIM)), step=1)
    before = next(table.export())
    assert (before.value[0, 2:] == 0).all()
    table.lookup([1], counts=[4], train=True)  # three blocks
    after = next(table.export())
    np.testing.assert_array_equal(after.value[0, :2], before.value[0, :2])
    np.testing.assert_array_equal(
        after.value[0, 2:6], EmbeddingVariable("f", DIM, seed=4).lookup([1])[0, 2:6]
    )
    accumulator = after.slots["accumulator"][0]
    if isinstance(optimizer, RowwiseAdagrad):
        np.testing.assert_allclose(accumulator, [1.1], rtol=1e-6)
    else:
        np.testing.assert_allclose(accumulator, [1.1] * 2 + [0.1] * 6, rtol=1e-6)
    assert after.version.tolist() == [1]


def test_one_batch_reads_one_dimension() -> None:
    table = EmbeddingVariable("t", DIM, option=_growing())
    rows = table.lookup(np.full(5, 3), train=True)
    assert (rows == rows[0]).all()
    assert (rows[0, 4:6] != 0).all()


def test_growth_works_with_filters_tiers_and_checkpoints(tmp_path: Path) -> None:
    storage = StorageOption(StorageType.DRAM_SSDHASH, str(tmp_path / "ssd"), (64 * 200,))
    option = _growing(filter_option=CounterFilter(2), storage_option=storage)
    spec = TableSpec("t", DIM, option, Adagrad(0.1), seed=4)
    plain = TableSpec("t", DIM, _growing(filter_option=CounterFilter(2)), Adagrad(0.1), seed=4)
    stores = []
    for one in (spec, plain):
        store = LocalStore()
        store.create_tables([one])
        rng = np.random.default_rng(0)
        for step in range(1, 9):
            keys = (rng.zipf(1.3, 3000) % 2000).astype(np.int64)
            store.table("t").lookup(keys, train=True)
            store.table("t").apply_gradients(keys, rng.normal(size=(3000, DIM)), step=step)
        stores.append(store)
    everything = np.arange(2000)
    tiered, reference = (store.table("t") for store in stores)
    np.testing.assert_array_equal(tiered.lookup(everything), reference.lookup(everything))
    assert _blocks(tiered) == _blocks(reference)
    assert set(_blocks(tiered).values()) == {1, 2, 3, 4}
    assert tiered.stats()["demoted"] > 0
    stores[0].save(str(tmp_path / "save"))
    again = LocalStore()
    again.create_tables([plain])
    again.restore(str(tmp_path / "save"))
    np.testing.assert_array_equal(again.table("t").lookup(everything), reference.lookup(everything))
    assert _blocks(again.table("t")) == _blocks(reference)


@pytest.mark.parametrize("stride", [1, 2])
def test_the_rank_rule_gives_more_blocks_to_more_frequent_keys(stride: int) -> None:
    """Ranks were refreshed at multiples of refresh_steps only: odd steps never reach one."""
    rule = DynamicDimensionOption(block_num=4, rank_base=2.0, refresh_steps=10)
    table = EmbeddingVariable(
        "t", DIM, option=EmbeddingVariableOption(dynamic_dimension=rule), optimizer=SGD()
    )
    keys = np.arange(1000)
    counts = 100_000 // (keys + 1)  # key k is the k-th most frequent
    for step in range(1, 1 + 30 * stride, stride):
        table.lookup(keys, counts, train=True)
        table.apply_gradients(keys[:1], np.zeros((1, DIM)), step=step)
    blocks = _blocks(table)
    by_rank = [blocks[key] for key in keys.tolist()]
    assert by_rank == sorted(by_rank, reverse=True)
    # Block k reaches the (2^(5-k) - 1) / 31 most frequent part, ties included.
    for block, share in ((2, 7 / 31), (3, 3 / 31), (4, 1 / 31)):
        reached = sum(value >= block for value in by_rank) / len(keys)
        assert share - 0.01 <= reached <= share * 1.5 + 0.01, (block, reached)


def test_the_rank_rule_divides_equally_frequent_keys_too() -> None:
    rule = DynamicDimensionOption(block_num=4, rank_base=2.0, refresh_steps=1)
    table = EmbeddingVariable(
        "t", DIM, option=EmbeddingVariableOption(dynamic_dimension=rule), optimizer=SGD()
    )
    keys = np.arange(10_000)
    for step in range(1, 8):
        table.lookup(keys, train=True)
        table.apply_gradients(keys[:1], np.zeros((1, DIM)), step=step)
        reached = np.array(list(_blocks(table).values()))
        for block, share in ((2, 7 / 31), (3, 3 / 31), (4, 1 / 31)):
            part = (reached >= block).mean()
            assert part <= share + 0.001, (step, block)
            assert step == 1 or part >= share - 0.001, (step, block)


def _servers(spec: TableSpec, n: int) -> list[LocalStore]:
    stores = [LocalStore(index, n) for index in range(n)]
    for store in stores:
        store.create_tables([spec])
    return stores


def _train(stores: list[LocalStore], steps: range) -> list[bytes]:
    """What lookups read at each step of a training that depends on the step alone."""
    read = []
    for step in steps:
        rng = np.random.default_rng(step)
        keys, counts = np.unique((rng.zipf(1.3, 300) + 20 * step) % 700, return_counts=True)
        gradients = rng.normal(size=(len(keys), DIM)).astype(np.float32)
        rows = np.zeros((len(keys), DIM), np.float32)
        for store, (place,) in zip(stores, split_keys([keys], len(stores)), strict=True):
            table = store.table("t")
            rows[place] = table.lookup(keys[place], counts[place], train=True)
            table.apply_gradients(keys[place], gradients[place], step=step)
            if step % 6 == 0:
                table.erase(keys[:3])
        read.append(rows.tobytes())
    return read


def _save(
    stores: list[LocalStore], path: Path, save_id: str, base: str | None, between: range
) -> list[bytes]:
    """A save during which training goes on."""
    for store in stores:
        store.snapshot(save_id, base)
    read = _train(stores, between)
    for store in stores:
        store.write_snapshot(save_id, str(path))
    return read


def _ranked(tmp_path: Path, **options: object) -> TableSpec:
    rule = DynamicDimensionOption(block_num=4, refresh_steps=3)
    option = EmbeddingVariableOption(dynamic_dimension=rule, **options)  # type: ignore[arg-type]  # by name
    return TableSpec("t", DIM, option, Adagrad(0.1), seed=4)


@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("deltas", [0, 2])
@pytest.mark.parametrize("servers", [1, 2])
def test_training_by_rank_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    servers: int, deltas: int, tiered: bool, tmp_path: Path
) -> None:
    """Ranks and thresholds were lost: no row grew until a refresh took the whole lifetime's frequency for new."""
    spec = _ranked(tmp_path)
    stores = _servers(spec, servers)
    if tiered:
        storage = StorageOption(StorageType.DRAM_SSDHASH, str(tmp_path / "ssd"), (64 * 200,))
        stores = _servers(_ranked(tmp_path, storage_option=storage), servers)
    _train(stores, range(1, 21))
    chain, save_id, base, step = [], "", None, 21
    for turn in range(
        deltas + 1
    ):  # with refreshes between what is fixed and what is written, and between saves
        chain.append(tmp_path / str(turn))
        save_id = f"save{turn}"
        expected = _save(stores, chain[-1], save_id, base, range(step, step + 8))
        base, cut, step = save_id, step, step + 8
        if turn < deltas:
            _train(stores, range(step, step + 8))
            step += 8
    expected += _train(stores, range(step, step + 30))
    again = _servers(spec, servers)
    _train(again, range(1, 9))  # is replaced
    for store in again:
        store.restore([str(path) for path in chain], save_id)
    assert _train(again, range(cut, step + 30)) == expected
    for one, other in zip(stores, again, strict=True):
        assert one.table("t").core.ranks() == other.table("t").core.ranks()
        assert _blocks(one.table("t")) == _blocks(other.table("t"))
        assert set(_blocks(other.table("t")).values()) == {1, 2, 3, 4}


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 2), (2, 3)])
def test_ranks_restore_on_another_number_of_servers(before: int, after: int, tmp_path: Path) -> None:
    """Thresholds are then those that a refresh of the same rows gives."""
    spec = _ranked(tmp_path)
    stores = _servers(spec, before)
    _train(stores, range(1, 22))  # the last step refreshes, and nothing occurs or goes after that
    _save(stores, tmp_path / "0", "save", None, range(0))
    direct = _servers(spec, after)
    _train(direct, range(1, 22))
    again = _servers(spec, after)
    for store in again:
        store.restore([str(tmp_path / "0")], "save")
    for one, other in zip(direct, again, strict=True):
        assert one.table("t").core.ranks() == other.table("t").core.ranks()
        assert one.table("t").core.ranks()[0] == 7


def test_a_checkpoint_without_ranks_restores_and_ranks_begin_anew(tmp_path: Path) -> None:
    spec = _ranked(tmp_path)
    stores = _servers(spec, 1)
    _train(stores, range(1, 22))
    _save(stores, tmp_path / "0", "save", None, range(0))
    (path,) = (tmp_path / "0" / "tables" / "t").glob("part-*")
    data = pq.read_table(path)
    info = json.loads(data.schema.metadata[b"deeprec_spark"])
    assert info.pop("ranks")["refreshes"] == 7
    old = data.drop_columns(["rank", "rank_refresh"]).replace_schema_metadata(
        {b"deeprec_spark": json.dumps(info).encode()}
    )
    pq.write_table(old, path)
    again = _servers(spec, 1)
    again[0].restore([str(tmp_path / "0")], "save")
    table = again[0].table("t")
    assert _blocks(table) == _blocks(stores[0].table("t"))
    assert table.core.ranks() == (0, [2**64 - 1] * 3)
    _train(again, range(22, 30))
    assert table.core.ranks()[0] == 2


def test_a_key_without_permission_reads_its_default_in_every_block() -> None:
    option = _growing(
        filter_option=CounterFilter(2), init_option=InitializerOption(default_value_no_permission=9.0)
    )
    table = EmbeddingVariable("t", DIM, option=option)
    np.testing.assert_array_equal(table.lookup([1], train=True), np.full((1, DIM), 9.0, np.float32))
    own = table.lookup([1], train=True)[0]
    assert (own[: DIM // 4] != 9.0).all()
    assert (own[DIM // 4 :] == 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DynamicDimensionOption(17), "block_num=17"),
        (lambda: DynamicDimensionOption(3, (5, 2)), r"thresholds=\(5, 2\)"),
        (lambda: DynamicDimensionOption(3, (5,)), r"thresholds=\(5,\)"),
        (lambda: DynamicDimensionOption(3, rank_base=1.0), "rank_base=1.0"),
        (lambda: EmbeddingVariable("t", 6, option=_growing()), "embedding_dim=6, block_num=4"),
        (lambda: EmbeddingVariableOption(value_dtype="float16"), "value_dtype='float16'"),
    ],
)
def test_options_are_checked(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]  # a lambda


# bfloat16


def _bfloat16(**options: object) -> EmbeddingVariableOption:
    return EmbeddingVariableOption(value_dtype="bfloat16", **options)  # type: ignore[arg-type]  # by name


def test_bfloat16_rounds_to_nearest_and_halves_values() -> None:
    tf = pytest.importorskip("tensorflow")
    table = EmbeddingVariable("t", 33, option=_bfloat16())
    values = np.random.default_rng(0).normal(size=(500, 33)).astype(np.float32)
    values[0, :5] = [np.inf, -np.inf, 0.0, -0.0, 1e38]
    table.upsert(np.arange(500), values)
    expected = tf.cast(tf.cast(values, tf.bfloat16), tf.float32).numpy()
    np.testing.assert_array_equal(table.lookup(np.arange(500)), expected)
    unseen = EmbeddingVariable("t", 33).lookup([9999])
    np.testing.assert_allclose(table.lookup([9999]), unseen, rtol=2**-8)
    wide, narrow = (
        EmbeddingVariable("w", 64, optimizer=SGD()),
        EmbeddingVariable("n", 64, option=_bfloat16(), optimizer=SGD()),
    )
    for one in (wide, narrow):
        one.lookup(np.arange(50_000), train=True)
    assert narrow.stats()["bytes"] < 0.65 * wide.stats()["bytes"]


def test_bfloat16_keeps_small_updates_on_average_and_repeatably() -> None:
    """Rounded to the nearest, 1 + 0.001 is 1 for ever."""
    start = EmbeddingVariableOption(value_dtype="bfloat16", init_option=InitializerOption(Constant(1.0)))
    tables = [EmbeddingVariable("t", 16, option=start, optimizer=SGD(1.0)) for _ in range(2)]
    keys = np.arange(1000)
    for step in range(1, 101):
        for table in tables:
            table.apply_gradients(keys, np.full((1000, 16), -0.001), step=step)
    rows = tables[0].lookup(keys)
    np.testing.assert_array_equal(rows, tables[1].lookup(keys))
    assert abs(rows.mean() - 1.1) < 0.002


def test_bfloat16_keeps_slots_in_float32_and_checkpoints(tmp_path: Path) -> None:
    spec = TableSpec("t", 5, _bfloat16(), Adagrad(0.1))
    store = LocalStore()
    store.create_tables([spec])
    table = store.table("t")
    gradients = np.random.default_rng(1).normal(size=(100, 5)).astype(np.float32)
    table.apply_gradients(np.arange(100), gradients, step=1)
    block = next(table.export(keys=np.arange(100)))
    np.testing.assert_allclose(block.slots["accumulator"], 0.1 + gradients**2, rtol=1e-6)
    store.save(str(tmp_path))
    again = LocalStore()
    again.create_tables([spec])
    again.restore(str(tmp_path))
    np.testing.assert_array_equal(again.table("t").lookup(np.arange(100)), table.lookup(np.arange(100)))
    other = LocalStore()
    other.create_tables([TableSpec("t", 5, optimizer=Adagrad(0.1))])
    with pytest.raises(ValueError, match="value_dtype=bfloat16 in the checkpoint, float32 in the table"):
        other.restore(str(tmp_path))


# Several features


def test_features_that_share_a_table_are_looked_up_once() -> None:
    """TFRA #450: features that shared a table had indices out of range."""
    table = EmbeddingVariable("t", 4)
    features = [np.array([5, 5, -1]), np.empty(0, np.int64), np.array([-1, 7, 5, 8])]
    keys, rows, inverse = table.lookup_unique(features, train=True)
    assert keys.tolist() == [5, -1, 7, 8]
    assert rows.shape == (4, 4)
    for feature, where in zip(features, inverse, strict=True):
        np.testing.assert_array_equal(keys[where], feature)
        np.testing.assert_array_equal(rows[where], table.lookup(feature))
    frequency = next(table.export(keys=keys)).frequency
    assert frequency.tolist() == [3, 2, 1, 1]
    assert table.lookup_unique([])[1].shape == (0, 4)
