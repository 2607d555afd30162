"""Random operations on a table against a plain Python model of it."""

from __future__ import annotations

import tempfile

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyarrow import fs

from deeprec_spark.embedding.local_snapshot import TableRestore, restore_tables
from deeprec_spark.embedding.optimizers import SGD, Adagrad, Optimizer, RowwiseAdagrad
from deeprec_spark.embedding.options import (
    CacheStrategy,
    CBFFilter,
    CounterFilter,
    DynamicDimensionOption,
    EmbeddingVariableOption,
    GlobalStepEvict,
    InitializerOption,
    StorageOption,
    StorageType,
)
from deeprec_spark.embedding.store import TableSpec
from deeprec_spark.embedding.table_chain import TableChain
from deeprec_spark.embedding.table_files import write_table
from deeprec_spark.embedding.variable import NEVER_UPDATED, EmbeddingVariable
from tests.embedding_reference import ReferenceOptimizer

DIM = 3
THRESHOLDS = (3, 6)  # of a dimension that grows: one element for each block
KEYS = [0, 1, -1, 2**63 - 1, -(2**63), *range(100, 220)]
TIERS = [StorageType.DRAM, StorageType.DRAM_PMEM, StorageType.DRAM_SSDHASH, StorageType.DRAM_PMEM_SSDHASH]
BATCH = st.lists(st.sampled_from(KEYS), max_size=40)


class Row:
    """A row of the model."""

    def __init__(self, optimizer: Optimizer, start: np.ndarray) -> None:
        self.state = ReferenceOptimizer(optimizer, start)
        self.version = NEVER_UPDATED
        self.blocks = DIM

    def value(self) -> np.ndarray:
        """What a lookup reads: zeros for absent blocks."""
        return np.where(np.arange(DIM) < self.blocks, self.state.value, 0.0)


class TableMachine(RuleBasedStateMachine):
    """Rows and counts of the model are plain dicts; start values come from a table that is never written."""

    @initialize(
        freq=st.sampled_from([None, 0, 1, 2, 4]),
        live=st.sampled_from([None, 0, 2]),
        optimizer=st.sampled_from([SGD(0.5), SGD(0.5, momentum=0.5), Adagrad(0.5), RowwiseAdagrad(0.5)]),
        storage=st.sampled_from(TIERS),
        strategy=st.sampled_from(list(CacheStrategy)),
        bloom=st.booleans(),
        grows=st.booleans(),
    )
    def start(
        self,
        freq: int | None,
        live: int | None,
        optimizer: Optimizer,
        storage: StorageType,
        strategy: CacheStrategy,
        bloom: bool,
        grows: bool,
    ) -> None:
        # The first tier has room for one row of each shard, so rows move all the time.
        self.directory = tempfile.TemporaryDirectory()
        row = 4 * (
            DIM + (0 if optimizer == SGD(0.5) else 1 if isinstance(optimizer, RowwiseAdagrad) else DIM)
        )
        tiered = storage is not StorageType.DRAM
        sizes = (64 * (row + 48), 64 * 4 * 4096)[: len(storage.tiers) - 1]
        self.grows = grows and not isinstance(optimizer, RowwiseAdagrad)  # its reference knows no blocks
        self.bloom: dict[int, int] | None = {} if bloom and freq is not None and freq > 1 else None
        # So large a filter has no false positives here.
        counter = None if freq is None else CBFFilter(freq, 20_000, 1e-6) if bloom else CounterFilter(freq)
        option = EmbeddingVariableOption(
            filter_option=counter,
            dynamic_dimension=DynamicDimensionOption(DIM, THRESHOLDS) if self.grows else None,
            evict_option=GlobalStepEvict(live),
            init_option=InitializerOption(default_value_no_permission=9.0),
            storage_option=StorageOption(storage, self.directory.name if tiered else None, sizes, strategy),
        )
        self.spec = TableSpec("t", DIM, option, optimizer, seed=5)
        self.table = self.make()
        self.fresh = EmbeddingVariable("f", DIM, seed=5)
        self.optimizer = optimizer
        self.threshold = freq if freq is not None and freq > 1 else 0
        self.filtering = self.threshold > 1
        self.live = live
        self.rows: dict[int, Row] = {}
        self.counts: dict[int, int] = {}
        self.step = 0

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cleanup()

    @rule()
    def maintain(self) -> None:
        self.table.core.maintain()

    def make(self) -> EmbeddingVariable:
        spec = self.spec
        return EmbeddingVariable("t", DIM, option=spec.option, optimizer=spec.optimizer, seed=spec.seed)

    def start_value(self, key: int) -> np.ndarray:
        return self.fresh.lookup([key])[0]

    def expected(self, key: int) -> np.ndarray:
        if key in self.rows:
            return self.rows[key].value()
        default = np.full(DIM, 9.0) if self.filtering else self.start_value(key)
        return np.where(np.arange(DIM) < 1, default, 0.0) if self.grows else default

    def add_row(self, key: int) -> Row:
        row = self.rows[key] = Row(self.optimizer, self.start_value(key))
        row.blocks = 1 if self.grows else DIM
        return row

    def count(self, key: int, count: int) -> None:
        """One key of a training lookup: a Bloom filter counts what has no row, and forgets nothing."""
        if self.bloom is None or key in self.rows:
            self.counts[key] = self.counts.get(key, 0) + count
        else:
            self.bloom[key] = self.bloom.get(key, 0) + count
        admitted = (self.counts if self.bloom is None else self.bloom).get(key, 0) >= self.threshold
        if key not in self.rows and admitted:
            self.add_row(key)
            if self.bloom is not None:
                self.counts[key] = self.bloom[key]

    @rule(keys=BATCH, train=st.booleans(), weigh=st.booleans())
    def lookup(self, keys: list[int], train: bool, weigh: bool) -> None:
        counts = [1 + i % 3 for i in range(len(keys))] if weigh else [1] * len(keys)
        if train:
            for key, count in zip(keys, counts, strict=True):
                self.count(key, count)
            for key in set(keys) & set(self.rows) if self.grows else ():
                blocks = 1 + sum(self.counts[key] >= threshold for threshold in THRESHOLDS)
                self.rows[key].blocks = max(self.rows[key].blocks, blocks)
        rows = self.table.lookup(
            np.array(keys, np.int64), np.array(counts, np.int64) if weigh else None, train=train
        )
        assert rows.shape == (len(keys), DIM)
        for key, row in zip(keys, rows, strict=True):
            np.testing.assert_allclose(row, self.expected(key), rtol=1e-4, atol=1e-4)

    @rule(keys=BATCH)
    def apply(self, keys: list[int]) -> None:
        self.step += 1
        gradients = np.array(
            [[(i * 7 + j) % 5 - 2 for j in range(DIM)] for i in range(len(keys))], np.float32
        )
        gradients = gradients.reshape(len(keys), DIM)
        self.table.apply_gradients(np.array(keys, np.int64), gradients, step=self.step)
        for key in dict.fromkeys(keys):
            if key not in self.rows:
                if self.filtering:
                    continue
                self.add_row(key)
                self.counts.setdefault(key, 0)
            total = sum(g for k, g in zip(keys, gradients.astype(np.float64), strict=True) if k == key)
            present = np.arange(DIM) < self.rows[key].blocks
            self.rows[key].state.update(np.where(present, total, 0.0), self.step)
            self.rows[key].version = self.step

    @rule(keys=BATCH)
    def upsert(self, keys: list[int]) -> None:
        values = np.arange(len(keys) * DIM, dtype=np.float32).reshape(-1, DIM)
        self.table.upsert(np.array(keys, np.int64), values)
        for key, value in zip(keys, values, strict=True):
            row = self.rows.get(key) or self.add_row(key)
            row.state.value[:] = value
            row.blocks = DIM
            self.counts[key] = max(self.counts.get(key, 0), self.threshold)

    @rule(keys=BATCH)
    def erase(self, keys: list[int]) -> None:
        known = {key for key in keys if key in self.rows or key in self.counts}
        assert self.table.erase(np.array(keys, np.int64)) == len(known)
        for key in known:
            self.rows.pop(key, None)
            self.counts.pop(key, None)

    @rule(steps=st.integers(0, 3))
    def evict(self, steps: int) -> None:
        self.step += steps
        gone = set()
        if self.live is not None:
            for key, row in self.rows.items():
                if row.version == NEVER_UPDATED:
                    row.version = self.step
                elif self.step - row.version > self.live:
                    gone.add(key)
        for key in gone:
            del self.rows[key]
            del self.counts[key]
        assert set(self.table.evict(self.step).tolist()) == gone

    @rule(shards=st.integers(1, 3))
    def save_and_restore(self, shards: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            with self.table.snapshot() as state:
                write_table(
                    fs.LocalFileSystem(),
                    directory,
                    self.spec,
                    self.table,
                    state,
                    shard_index=0,
                    step=self.step,
                )
            chain = TableChain([directory], self.spec.name)
            parts = []
            for shard in range(shards):
                part = self.make()
                restore_tables([TableRestore(self.spec, part, chain)], shard, shards)
                parts.append(part)
            assert sum(len(part) for part in parts) == len(self.rows)
            restored = self.make()
            restore_tables([TableRestore(self.spec, restored, chain)], 0, 1)
            self.table = restored

    @invariant()
    def content_is_equal(self) -> None:
        if not hasattr(self, "table"):
            return
        keys, filtered, counts = self.table.keys()
        assert set(keys.tolist()) == set(self.rows)
        assert dict(zip(filtered.tolist(), counts.tolist(), strict=True)) == {
            key: count for key, count in self.counts.items() if key not in self.rows
        }
        for block in self.table.export():
            for i, key in enumerate(block.key.tolist()):
                row = self.rows[key]
                np.testing.assert_allclose(block.value[i], row.value(), rtol=1e-4, atol=1e-4)
                assert block.blocks is None or block.blocks[i] == row.blocks
                for name, slot in block.slots.items():
                    np.testing.assert_allclose(slot[i], row.state.slots[name], rtol=1e-4, atol=1e-4)
                assert block.version[i] == row.version
                assert block.frequency[i] == self.counts[key]
        stats = self.table.stats()
        assert (stats["rows"], stats["filtered"]) == (len(self.rows), len(self.counts) - len(self.rows))


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
