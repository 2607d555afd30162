"""Random operations on a table against a plain Python model of it."""

from __future__ import annotations

import dataclasses
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
    L2WeightEvict,
    StorageOption,
    StorageType,
    TimeEvict,
)
from deeprec_spark.embedding.snapshot import TableSnapshot
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
NORM = 1.0  # of L2WeightEvict; rounding decides about no norm of the values here
RowState = tuple[int, int, int, int, np.ndarray, dict[str, np.ndarray]]


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest, to even where two are as near."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Row:
    """A row of the model."""

    def __init__(self, optimizer: Optimizer, start: np.ndarray) -> None:
        self.state = ReferenceOptimizer(optimizer, start)
        self.version = NEVER_UPDATED
        self.time = 0
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
        timed=st.sampled_from([None, 0, 3]),
        weak=st.booleans(),
        bfloat16=st.booleans(),
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
        timed: int | None,
        weak: bool,
        bfloat16: bool,
    ) -> None:
        # The first tier has room for one row of each shard, so rows move all the time.
        self.directory = tempfile.TemporaryDirectory()
        row = 4 * (
            DIM + (0 if optimizer == SGD(0.5) else 1 if isinstance(optimizer, RowwiseAdagrad) else DIM)
        )
        tiered = storage is not StorageType.DRAM
        sizes = (64 * (row + 56), 64 * 4 * 4096)[: len(storage.tiers) - 1]
        self.grows = grows and not isinstance(optimizer, RowwiseAdagrad)  # its reference knows no blocks
        self.bloom: dict[int, int] | None = {} if bloom and freq is not None and freq > 1 else None
        # So large a filter has no false positives here.
        counter = None if freq is None else CBFFilter(freq, 20_000, 1e-6) if bloom else CounterFilter(freq)
        option = EmbeddingVariableOption(
            filter_option=counter,
            dynamic_dimension=DynamicDimensionOption(DIM, THRESHOLDS) if self.grows else None,
            evict_option=(GlobalStepEvict(live), TimeEvict(timed), L2WeightEvict(NORM if weak else -1.0)),
            init_option=InitializerOption(default_value_no_permission=9.0),
            storage_option=StorageOption(storage, self.directory.name if tiered else None, sizes, strategy),
            value_dtype="bfloat16" if bfloat16 else "float32",
        )
        self.spec = TableSpec("t", DIM, option, optimizer, seed=5)
        self.table = self.make()
        self.fresh = EmbeddingVariable("f", DIM, seed=5)
        self.bfloat16, self.timed, self.weak = bfloat16, timed, weak
        # Takes in every snapshot; `pending` is one that is not read yet, and what it must be.
        self.copy = EmbeddingVariable(
            "t",
            DIM,
            option=dataclasses.replace(option, storage_option=StorageOption()),
            optimizer=optimizer,
            seed=5,
        )
        self.pending: tuple[TableSnapshot, dict[int, RowState], dict[int, int]] | None = None
        self.based = True  # the next snapshot may be of changes
        self.optimizer = optimizer
        self.threshold = freq if freq is not None and freq > 1 else 0
        self.filtering = self.threshold > 1
        self.live = live
        self.rows: dict[int, Row] = {}
        self.counts: dict[int, int] = {}
        self.step = 0
        self.now = 0

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
        start = self.fresh.lookup([key])[0]
        return nearest_bfloat16(start) if self.bfloat16 else start

    def expected(self, key: int) -> np.ndarray:
        if key in self.rows:
            return self.rows[key].value()
        default = np.full(DIM, 9.0) if self.filtering else self.start_value(key)
        return np.where(np.arange(DIM) < 1, default, 0.0) if self.grows and not self.filtering else default

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
        self.now += self.step % 2
        self.table.apply_gradients(np.array(keys, np.int64), gradients, step=self.step, now=self.now)
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
            self.rows[key].time = self.now
            if self.bfloat16:
                self.take_rounded(key)

    def take_rounded(self, key: int) -> None:
        """A stochastically rounded value is one of the two neighbours of the exact one; the model goes on with it."""
        row = self.rows[key]
        read = self.table.lookup([key])[0]
        exact = row.value()
        assert (np.abs(read - exact) <= np.abs(exact) * 2**-7 + 1e-6).all()
        assert (nearest_bfloat16(read) == read).all()
        row.state.value[: row.blocks] = read[: row.blocks]

    @rule(keys=BATCH)
    def upsert(self, keys: list[int]) -> None:
        values = np.arange(len(keys) * DIM, dtype=np.float32).reshape(-1, DIM)
        self.table.upsert(np.array(keys, np.int64), values)
        values = nearest_bfloat16(values) if self.bfloat16 else values
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

    @rule(steps=st.integers(0, 3), seconds=st.integers(0, 4))
    def evict(self, steps: int, seconds: int) -> None:
        self.step += steps
        self.now += seconds
        gone = set()
        for key, row in self.rows.items():
            old = (
                self.live is not None and row.version != NEVER_UPDATED and self.step - row.version > self.live
            )
            late = self.timed is not None and row.time != 0 and self.now - row.time > self.timed
            if old or late or (self.weak and np.linalg.norm(row.value()) < NORM):
                gone.add(key)
                continue
            # What was never updated starts to age now.
            if self.live is not None and row.version == NEVER_UPDATED:
                row.version = self.step
            if self.timed is not None and row.time == 0:
                row.time = self.now
        for key in gone:
            del self.rows[key]
            del self.counts[key]
        assert set(self.table.evict(self.step, self.now).tolist()) == gone

    @rule(changed_only=st.booleans())
    def begin_snapshot(self, changed_only: bool) -> None:
        if self.pending is None:
            snapshot = self.table.snapshot(changed_only=changed_only and self.based)
            self.pending = (snapshot, self.row_states(), self.filtered())

    @rule(rows=st.integers(1, 50))
    def read_snapshot(self, rows: int) -> None:
        if self.pending is None:
            return
        snapshot, states, filtered = self.pending
        with snapshot:
            if not snapshot.changed_only:
                self.copy.clear()
            self.copy.erase(snapshot.tombstones)
            for block in snapshot.blocks(rows):
                self.copy.import_rows(block)
            for keys, counts in snapshot.filtered(rows):
                self.copy.import_filtered(keys, counts)
        self.pending = None
        self.based = True
        self.check_content(self.copy, states, filtered)

    @rule(rows=st.integers(0, 50))
    def give_up_snapshot(self, rows: int) -> None:
        """Half read or not at all: what it had is in the next one."""
        if self.pending is not None:
            snapshot = self.pending[0]
            if rows and snapshot.num_rows > 1:
                next(snapshot.blocks(min(rows, snapshot.num_rows // 2)))
            snapshot.close()
            self.pending = None

    def row_states(self) -> dict[int, RowState]:
        """The rows of the model as of now."""
        return {
            key: (
                self.counts[key],
                row.version,
                row.time,
                row.blocks,
                row.value().copy(),
                {name: slot.copy() for name, slot in row.state.slots.items()},
            )
            for key, row in self.rows.items()
        }

    def filtered(self) -> dict[int, int]:
        """The counts of keys without a row."""
        return {key: count for key, count in self.counts.items() if key not in self.rows}

    @rule(shards=st.integers(1, 3))
    def save_and_restore(self, shards: int) -> None:
        if self.pending is not None:
            self.pending[0].close()
            self.pending = None
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
            self.based = False

    @invariant()
    def content_is_equal(self) -> None:
        if not hasattr(self, "table"):
            return
        self.check_content(self.table, self.row_states(), self.filtered())
        stats = self.table.stats()
        assert stats["rows"] == len(self.rows)
        if self.bloom is None:  # which estimates
            assert stats["filtered"] == len(self.filtered())
        # No key reads a row that it has no right to, through a Bloom filter neither.
        missing = [key for key in KEYS if key not in self.rows]
        rows = self.table.lookup(np.array(missing, np.int64))
        np.testing.assert_array_equal(rows, np.reshape([self.expected(key) for key in missing], (-1, DIM)))

    def check_content(
        self, table: EmbeddingVariable, states: dict[int, RowState], filtered: dict[int, int]
    ) -> None:
        keys, counted, counts = table.keys()
        assert set(keys.tolist()) == set(states)
        assert dict(zip(counted.tolist(), counts.tolist(), strict=True)) == filtered
        for block in table.export():
            for i, key in enumerate(block.key.tolist()):
                frequency, version, time, blocks, value, slots = states[key]
                np.testing.assert_allclose(block.value[i], value, rtol=1e-4, atol=1e-4)
                assert block.blocks is None or block.blocks[i] == blocks
                assert block.time is None or block.time[i] == time
                for name, slot in block.slots.items():
                    np.testing.assert_allclose(slot[i], slots[name], rtol=1e-4, atol=1e-4)
                assert (block.frequency[i], block.version[i]) == (frequency, version)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
