"""Snapshots: each is the table of its moment, whatever training does while it is read; deltas make the next one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket
from deeprec_spark.embedding.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad
from deeprec_spark.embedding.options import (
    CacheStrategy,
    CBFFilter,
    Constant,
    CounterFilter,
    DynamicDimensionOption,
    EmbeddingVariableOption,
    GlobalStepEvict,
    InitializerOption,
    L2WeightEvict,
    ProbabilityFilter,
    StorageOption,
    StorageType,
    TimeEvict,
)
from deeprec_spark.embedding.snapshot import RowBlock, TableSnapshot
from deeprec_spark.embedding.variable import EmbeddingVariable

DIM = 4
TIERED = 64 * 500

Content = tuple[dict[int, tuple[Any, ...]], dict[int, int], bytes]


def _table(option: EmbeddingVariableOption | None = None, optimizer: Any = None) -> EmbeddingVariable:
    return EmbeddingVariable("t", DIM, option=option, optimizer=optimizer or Adagrad(0.5), seed=3)


def _rows(block: RowBlock) -> Iterator[tuple[int, tuple[Any, ...]]]:
    for i, key in enumerate(block.key.tolist()):
        yield (
            key,
            (
                int(block.frequency[i]),
                int(block.version[i]),
                None if block.time is None else int(block.time[i]),
                None if block.blocks is None else int(block.blocks[i]),
                block.value[i].tobytes(),
                *(slot[i].tobytes() for slot in block.slots.values()),
            ),
        )


def _has_bloom(table: EmbeddingVariable) -> bool:
    return isinstance(table.option.filter_option, CBFFilter)


def _content(table: EmbeddingVariable) -> Content:
    """All that a snapshot must tell, read from the resting table."""
    rows = dict(pair for block in table.export() for pair in _rows(block))
    _, keys, counts = table.keys()
    bloom = table.core.export_bloom(0, NUM_BUCKETS).tobytes() if _has_bloom(table) else b""
    return rows, dict(zip(keys.tolist(), counts.tolist(), strict=True)), bloom


def _apply(
    table: EmbeddingVariable,
    snapshot: TableSnapshot,
    between: Callable[[], None] = lambda: None,
    rows: int = 37,
) -> None:
    """Take a snapshot into a table; `between` is called again and again while it is read."""
    between()
    if not snapshot.changed_only:
        table.clear()
        table.reserve(snapshot.num_rows)
    table.erase(snapshot.tombstones)
    between()
    count, last = 0, -1
    for block in snapshot.blocks(rows):
        places = bucket(block.key)
        assert last <= places[0]
        assert (np.diff(places) >= 0).all()
        last = int(places[-1])
        count += len(block)
        between()  # the block is the caller's: training no longer reaches it
        table.import_rows(block)
    assert count == snapshot.num_rows
    count = 0
    for keys, counts in snapshot.filtered(rows):
        between()
        count += len(keys)
        table.import_filtered(keys, counts)
    assert count == snapshot.num_filtered
    if _has_bloom(table):
        for first in range(0, NUM_BUCKETS, 128):
            for index, counters in enumerate(snapshot.bloom(first, first + 128)):
                table.core.import_bloom(first + index, counters.tobytes())
            between()
    table.core.updates, table.core.calls = snapshot.updates, snapshot.calls


def _storage(kind: StorageType, path: Path, strategy: CacheStrategy = CacheStrategy.LFU) -> StorageOption:
    needs_path = {"PMEM_LIBPMEM", "SSDHASH", "LEVELDB"} & set(kind.tiers)
    sizes = (TIERED, 64 * 4 * 8192)[: len(kind.tiers) - 1]
    return StorageOption(kind, str(path) if needs_path else None, sizes, strategy)


def _options(path: Path) -> dict[str, tuple[EmbeddingVariableOption, Any]]:
    grows = DynamicDimensionOption(4, (3, 5, 8))
    evicts = (GlobalStepEvict(6), L2WeightEvict(0.02), TimeEvict(9))
    pmem = _storage(StorageType.DRAM_PMEM, path)
    three = _storage(StorageType.DRAM_PMEM_SSDHASH, path, CacheStrategy.LRU)
    option = EmbeddingVariableOption
    return {
        "plain": (option(), Adagrad(0.5)),
        "counter": (option(CounterFilter(3), GlobalStepEvict(5)), Adam(0.1)),
        "bloom": (option(CBFFilter(3, 500), evicts), SGD(0.5)),
        "probability": (option(ProbabilityFilter(0.4)), RowwiseAdagrad(0.5)),
        "bfloat16": (option(CounterFilter(2), evicts, value_dtype="bfloat16"), Adagrad(0.5)),
        "grows": (option(dynamic_dimension=grows), Adagrad(0.5)),
        "ranks": (option(dynamic_dimension=DynamicDimensionOption(2, refresh_steps=2)), Adagrad(0.5)),
        "pmem": (option(storage_option=pmem), Adagrad(0.5)),
        "ssd": (option(evict_option=evicts, storage_option=three), Adagrad(0.5)),
        "all": (
            option(CounterFilter(2), evicts, three, value_dtype="bfloat16", dynamic_dimension=grows),
            Adagrad(0.5),
        ),
    }


OPTIONS = list(_options(Path("/")))


class _Training:
    """Random operations on a table."""

    def __init__(self, table: EmbeddingVariable, seed: int, keys: int = 300) -> None:
        self.table = table
        self.rng = np.random.default_rng(seed)
        self.keys = keys
        self.step = 0

    def batch(self, most: int = 40) -> np.ndarray:
        return self.rng.integers(-self.keys, self.keys, self.rng.integers(0, most))

    def imported(self) -> None:
        n, names = len(keys := np.unique(self.batch())), self.table.optimizer.slot_names()
        widths = [self.table.core.slot_width(index) for index in range(len(names))]
        dynamic = self.table.option.dynamic_dimension
        block = RowBlock(
            keys,
            self.rng.integers(0, 2**40, n),
            self.rng.integers(0, 9, n),
            self.rng.normal(size=(n, DIM)).astype(np.float32),
            {
                name: self.rng.random((n, width), np.float32)
                for name, width in zip(names, widths, strict=True)
            },
            blocks=None if dynamic is None else self.rng.integers(1, dynamic.block_num + 1, n),
        )
        self.table.import_rows(block)

    def one(self) -> None:
        keys, which = self.batch(), self.rng.integers(0, 20)
        if which < 7:
            self.table.lookup(keys, self.rng.integers(1, 3, len(keys)), train=True)
        elif which < 8:
            self.table.lookup(keys)
        elif which < 13:
            self.step += 1
            gradients = self.rng.normal(size=(len(keys), DIM)).astype(np.float32)
            self.table.apply_gradients(keys, gradients, step=self.step, now=self.step)
        elif which < 14:
            self.table.upsert(keys, self.rng.normal(size=(len(keys), DIM)))
        elif which < 16:
            self.table.erase(keys)
        elif which < 17:
            self.table.evict(self.step, self.step)
        elif which < 18:
            self.imported()
        elif which < 19:
            if _has_bloom(self.table) or not isinstance(self.table.option.filter_option, ProbabilityFilter):
                self.table.import_filtered(keys, self.rng.integers(1, 2, len(keys)))
        else:
            self.table.core.maintain()

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self.one()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OPTIONS)
def test_full_and_deltas_in_order_are_the_table_at_the_cut(name: str, seed: int, tmp_path: Path) -> None:
    option, optimizer = _options(tmp_path)[name]
    table, copy = _table(option, optimizer), _table(option, optimizer)
    training = _Training(table, seed)
    training.run(60)
    for turn in range(9):
        expected, counters = _content(table), (table.core.updates, table.core.calls)
        with table.snapshot(changed_only=turn % 5 != 0) as snapshot:
            _apply(copy, snapshot, lambda: training.run(6))
        assert _content(copy) == expected, turn
        assert (copy.core.updates, copy.core.calls) == counters
        training.run(20)
        if turn % 3 == 2:  # one that is given up, half read or not at all
            with table.snapshot(changed_only=turn % 2 == 0) as given_up:
                if seed != 2:
                    next(given_up.blocks(11))
                training.run(10)
    assert len(table) > 0


def test_the_first_delta_of_a_new_table_is_all_of_it() -> None:
    table, copy = _table(), _table()
    _Training(table, 1).run(30)
    _apply(copy, table.snapshot(changed_only=True))
    assert _content(copy) == _content(table)


CHANGES: dict[str, Callable[[EmbeddingVariable], object]] = {
    "lookup": lambda table: table.lookup([5], train=True),
    "update": lambda table: table.apply_gradients([5], np.ones((1, DIM)), step=9),
    "upsert": lambda table: table.upsert([5], np.ones((1, DIM))),
    "import": lambda table: table.import_rows(dataclasses.replace(next(table.export(keys=np.array([5]))))),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_delta_has_what_changed_and_nothing_else(change: str) -> None:
    table = _table()
    table.lookup(np.arange(100), train=True)
    with table.snapshot() as full:
        assert (full.num_rows, full.num_filtered) == (100, 0)
        assert sum(len(block) for block in full.blocks()) == 100
    table.lookup(np.arange(200))  # reading changes nothing
    with table.snapshot(changed_only=True) as nothing:
        assert (nothing.num_rows, list(nothing.blocks()), nothing.tombstones.tolist()) == (0, [], [])
    CHANGES[change](table)
    with table.snapshot(changed_only=True) as delta:
        assert [block.key.tolist() for block in delta.blocks()] == [[5]]
    with table.snapshot(changed_only=True) as nothing:
        assert nothing.num_rows == 0


def test_growing_alone_is_a_change() -> None:
    table = _table(EmbeddingVariableOption(dynamic_dimension=DynamicDimensionOption(2, (3,))))
    table.lookup([1, 2], counts=[2, 1], train=True)
    table.mark_saved()
    table.lookup([1], train=True)
    with table.snapshot(changed_only=True) as delta:
        (block,) = delta.blocks()
        assert block.blocks is not None
        assert (block.key.tolist(), block.blocks.tolist()) == ([1], [2])


def test_counts_that_changed_are_in_the_delta_and_admitted_ones_are_rows() -> None:
    table = _table(EmbeddingVariableOption(CounterFilter(3)))
    table.lookup([1, 2, 3, 3], train=True)
    table.mark_saved()
    table.lookup([2, 3], train=True)
    with table.snapshot(changed_only=True) as delta:
        table.lookup([2, 2, 3, 1], train=True)
        assert [block.key.tolist() for block in delta.blocks()] == [[3]]
        assert [(keys.tolist(), counts.tolist()) for keys, counts in delta.filtered()] == [([2], [2])]


def test_tombstones_are_what_is_gone_at_the_cut() -> None:
    """Deltas without tombstones create evicted rows again."""
    table = _table(EmbeddingVariableOption(CounterFilter(2), GlobalStepEvict(3)))
    keys = np.arange(8)
    table.lookup(np.concatenate([keys, keys, [20, 21, 22]]), train=True)
    table.apply_gradients(keys, np.ones((8, DIM)), step=1)
    table.erase([7])  # before there was anything to take it from
    with table.snapshot() as full:
        assert full.tombstones.tolist() == []
        table.erase([0, 1, 2, 20, 99])
        list(full.blocks())
        list(full.filtered())
    table.lookup([1, 1, 2], train=True)  # 1 is a row again, 2 is counted
    table.apply_gradients([3, 4], np.ones((2, DIM)), step=4)
    assert sorted(table.evict(5)) == [5, 6]
    with table.snapshot(changed_only=True) as delta:
        table.erase([3])  # belongs to the next one
        assert sorted(delta.tombstones) == [0, 2, 5, 6, 20]
        assert sorted(key for block in delta.blocks() for key in block.key) == [1, 3, 4]
        assert [(keys.tolist(), counts.tolist()) for keys, counts in delta.filtered()] == [([2], [1])]
    with table.snapshot(changed_only=True) as delta:
        assert delta.tombstones.tolist() == [3]


def test_a_snapshot_that_was_not_read_to_its_end_leaves_its_changes_to_the_next() -> None:
    table, copy = _table(), _table()
    table.lookup(np.arange(1000), train=True)
    with table.snapshot() as full:
        _apply(copy, full)
        with pytest.raises(RuntimeError, match=r"running already.*table='t'"):
            table.snapshot()
    table.erase(np.arange(10))
    table.lookup(np.arange(10, 500), train=True)
    with table.snapshot(changed_only=True) as delta:
        next(delta.blocks(100))
        table.erase(np.arange(300, 310))
    with pytest.raises(RuntimeError, match="closed"):
        next(delta.blocks())
    delta.close()
    with table.snapshot(changed_only=True) as delta:
        assert (delta.num_rows, len(delta.tombstones)) == (480, 20)
        _apply(copy, delta)
    assert _content(copy) == _content(table)


@pytest.mark.parametrize("changes", [100, 30_000])
def test_few_and_many_changes_are_found(changes: int) -> None:
    """Few are listed as they happen, many are looked for in the index."""
    option = EmbeddingVariableOption(CounterFilter(2))
    table, copy = _table(option), _table(option)
    keys = np.arange(40_000)
    table.lookup(np.repeat(keys, 2), train=True)
    with table.snapshot() as full:
        _apply(copy, full, rows=10_000)
    for start in (0, 5_000, 100_000):
        table.lookup(np.arange(start, start + changes), train=True)
        table.erase(np.arange(start, start + changes // 8))
        table.lookup(np.arange(start, start + changes // 16), train=True)
    expected = _content(table)
    with table.snapshot(changed_only=True) as delta:
        assert delta.num_rows < 50_000
        _apply(copy, delta, lambda: table.lookup(keys[:2000], train=True), rows=10_000)
    assert _content(copy) == expected


def test_removals_alone_are_not_lost_with_a_snapshot_that_nobody_read() -> None:
    table = _table()
    table.lookup(np.arange(9), train=True)
    table.mark_saved()
    table.erase([3])
    table.snapshot(changed_only=True).close()
    with table.snapshot(changed_only=True) as delta:
        assert list(delta.blocks()) == list(delta.filtered()) == []  # half read: no tombstones
    with table.snapshot(changed_only=True) as delta:
        assert delta.tombstones.tolist() == [3]
    with table.snapshot(changed_only=True) as delta:
        assert delta.tombstones.tolist() == []
    empty = _table()
    empty.lookup([1], train=True)
    empty.mark_saved()
    empty.erase([1])
    empty.snapshot().close()
    with empty.snapshot(changed_only=True) as delta:
        assert delta.tombstones.tolist() == [1]


def test_a_row_can_be_read_once_and_only_where_there_is_one() -> None:
    table = _table()
    table.lookup(np.arange(10), train=True)
    with table.snapshot() as snapshot:
        snapshot.block(0, 4)
        with pytest.raises(ValueError, match="only once"):
            snapshot.block(3, 5)
        with pytest.raises(ValueError, match="no such rows"):
            snapshot.block(9, 11)


def test_what_was_read_is_not_copied() -> None:
    table = _table()
    table.lookup(np.arange(1000), train=True)
    with table.snapshot() as snapshot:
        assert snapshot.copied == 0
        blocks = snapshot.blocks(400)
        read = next(blocks).key
        table.apply_gradients(read, np.ones((400, DIM)), step=1)
        assert snapshot.copied == 0
        table.apply_gradients(np.arange(1000), np.ones((1000, DIM)), step=2)
        assert snapshot.copied == 600
        list(blocks)
        assert snapshot.copied == 0


def test_clearing_while_a_snapshot_is_pending_keeps_its_rows_and_ends_deltas() -> None:
    option = EmbeddingVariableOption(CBFFilter(2, 100), init_option=InitializerOption(Constant(1.0)))
    table, copy = _table(option), _table(option)
    table.lookup(np.repeat(np.arange(100), 2), train=True)
    table.lookup(np.arange(1000, 1100), train=True)
    expected = _content(table)
    with table.snapshot() as full:
        table.clear()
        table.lookup([3, 3], train=True)
        _apply(copy, full)
    assert _content(copy) == expected
    with pytest.raises(ValueError, match=r"full one\. Received: table='t'"):
        table.snapshot(changed_only=True)
    with table.snapshot() as full:
        _apply(copy, full)
    with table.snapshot(changed_only=True) as delta:
        _apply(copy, delta)
    assert _content(copy) == _content(table)


def test_more_removals_than_rows_are_not_kept() -> None:
    """A job that evicts for days between full checkpoints must not pay for deltas that it never takes."""
    table = _table()
    table.mark_saved()
    for start in range(0, 400_000, 50_000):
        keys = np.arange(start, start + 50_000)
        table.lookup(keys, train=True)
        table.erase(keys)
    with pytest.raises(ValueError, match="full one"):
        table.snapshot(changed_only=True)
    table.mark_saved()
    with table.snapshot(changed_only=True) as delta:
        assert delta.num_rows == 0


def test_the_same_keys_may_come_and_go_for_ever() -> None:
    table = _table()
    table.lookup(np.arange(10_000), train=True)
    table.mark_saved()
    for _ in range(100):
        table.lookup(np.arange(20_000, 21_000), train=True)
        table.erase(np.arange(20_000, 21_000))
    with table.snapshot(changed_only=True) as delta:
        assert sorted(delta.tombstones) == list(range(20_000, 21_000))
