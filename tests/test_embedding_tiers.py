"""Storage tiers: hard limits, demotion and promotion, full disks, every type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deeprec_spark.embedding import _core
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import Adagrad
from deeprec_spark.embedding.options import (
    CacheStrategy,
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    StorageOption,
    StorageType,
)
from deeprec_spark.embedding.store import TableSpec
from deeprec_spark.embedding.variable import EmbeddingVariable
from tests.embedding_storage import BLOCKS, DIM, ROW, make_storage, make_table
from tests.libraries import need_library

N = 20_000

TIERED = [
    StorageType.DRAM_PMEM,
    StorageType.DRAM_SSDHASH,
    StorageType.DRAM_LEVELDB,
    StorageType.DRAM_PMEM_SSDHASH,
]
SMALL = {3: (N // 10 * ROW, N // 4 * ROW), 2: (N // 10 * ROW,)}


def _small(
    kind: StorageType, path: Path, strategy: CacheStrategy = CacheStrategy.LFU, **options: object
) -> EmbeddingVariable:
    need_library(kind, path)
    return make_table(kind, path, SMALL[len(kind.tiers)], strategy, **options)


@pytest.mark.parametrize("strategy", list(CacheStrategy))
@pytest.mark.parametrize("kind", TIERED)
def test_rows_keep_everything_on_their_way_through_tiers(
    kind: StorageType, strategy: CacheStrategy, tmp_path: Path
) -> None:
    """DeepRec #534: frequencies and versions were not kept on SSD."""
    tiered = _small(kind, tmp_path, strategy, evict_option=GlobalStepEvict(4))
    plain = EmbeddingVariable(
        "t", DIM, option=EmbeddingVariableOption(evict_option=GlobalStepEvict(4)), optimizer=Adagrad(0.1)
    )
    rng = np.random.default_rng(0)
    for step in range(1, 8):
        keys = rng.integers(0, N, N // 2)
        gradients = rng.normal(size=(len(keys), DIM))
        for table in (tiered, plain):
            table.lookup(keys, train=True)
            table.apply_gradients(keys, gradients, step=step)
        if step == 6:
            assert tiered.evict(step).tolist() == plain.evict(step).tolist()
    np.testing.assert_array_equal(tiered.lookup(np.arange(N)), plain.lookup(np.arange(N)))
    for ours, theirs in zip(tiered.export(), plain.export(), strict=True):
        for name in ("key", "frequency", "version", "value"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        np.testing.assert_array_equal(ours.slots["accumulator"], theirs.slots["accumulator"])
    stats = tiered.stats()
    assert stats["demoted"] > 0
    assert stats["promoted"] > 0
    assert sum(tier["rows"] for tier in stats["tiers"]) == stats["rows"] == len(plain)
    assert stats["tiers"][0]["bytes"] <= SMALL[len(kind.tiers)][0]
    assert stats["tiers"][-1]["rows"] > 0


@pytest.mark.parametrize("kind", TIERED)
def test_a_cache_smaller_than_a_batch_works(kind: StorageType, tmp_path: Path) -> None:
    """DeepRec #308: "MultiLevel EV's Cache size should large than IDs in batch"."""
    tiered = _small(kind, tmp_path)
    fresh = EmbeddingVariable("t", DIM, optimizer=Adagrad(0.1))
    keys = np.arange(N)
    np.testing.assert_array_equal(tiered.lookup(keys, train=True), fresh.lookup(keys))
    tiered.apply_gradients(keys, np.ones((N, DIM)), step=1)
    fresh.apply_gradients(keys, np.ones((N, DIM)), step=1)
    np.testing.assert_array_equal(tiered.lookup(keys[::-1]), fresh.lookup(keys[::-1]))
    assert tiered.stats()["tiers"][0]["rows"] < N // 9


@pytest.mark.parametrize("strategy", list(CacheStrategy))
def test_a_hit_below_moves_a_row_up(strategy: CacheStrategy, tmp_path: Path) -> None:
    """DeepRec #534: hits in a lower tier were not moved up."""
    table = _small(StorageType.DRAM_PMEM, tmp_path, strategy)
    table.lookup(np.arange(N), train=True)
    table.core.maintain()
    hot = np.arange(100)
    for _ in range(3):
        table.lookup(hot, train=True)
    before = table.stats()["promoted"]
    assert before > 0
    table.lookup(hot, train=True)
    assert table.stats()["promoted"] == before  # they are up by now
    # And they stay while cold keys pass through.
    if strategy is CacheStrategy.LFU:
        table.lookup(np.arange(N, 2 * N), train=True)
        before = table.stats()["promoted"]
        table.lookup(hot, train=True)
        assert table.stats()["promoted"] == before


def test_lru_keeps_the_recent_and_lfu_the_frequent(tmp_path: Path) -> None:
    frequent, recent = np.arange(500), np.arange(1000, 1500)
    promoted = {}
    for strategy in CacheStrategy:
        table = _small(StorageType.DRAM_SSDHASH, tmp_path, strategy)
        for _ in range(5):
            table.lookup(frequent, train=True)
        for start in range(2000, N, 1000):
            table.lookup(np.arange(start, start + 1000), train=True)
        table.lookup(recent, train=True)
        before = table.stats()["promoted"]
        table.lookup(frequent, train=True)
        middle = table.stats()["promoted"]
        promoted[strategy] = middle - before
    assert promoted[CacheStrategy.LFU] == 0
    assert promoted[CacheStrategy.LRU] > 400


@pytest.mark.parametrize("kind", [StorageType.DRAM_PMEM, StorageType.DRAM_SSDHASH])
def test_a_full_last_tier_is_a_clear_error_and_loses_no_row(kind: StorageType, tmp_path: Path) -> None:
    table = make_table(kind, tmp_path, (64 * 40 * ROW, 4 << 20))
    made = 0

    def fill() -> None:
        nonlocal made
        for start in range(0, 100_000, 500):
            table.lookup(np.arange(start, start + 500), train=True)
            made = start + 500

    with pytest.raises(_core.StorageFullError, match="storage_size=4194304"):
        fill()
    stats = table.stats()
    assert stats["rows"] >= made
    assert stats["tiers"][1]["bytes"] <= 4 << 20
    fresh = EmbeddingVariable("t", DIM, optimizer=Adagrad(0.1))
    np.testing.assert_array_equal(table.lookup(np.arange(made)), fresh.lookup(np.arange(made)))
    # Room made by eviction is used again.
    table.erase(np.arange(made))
    table.core.maintain()
    table.lookup(np.arange(made // 2), train=True)


def test_a_full_disk_is_a_clear_error_and_loses_no_row(tmp_path: Path) -> None:
    """/dev/full has no directory; a limit on file sizes is the closest that a test may do anywhere."""
    import resource

    table = make_table(StorageType.DRAM_SSDHASH, tmp_path, (64 * 40 * ROW,))
    table.lookup(np.arange(64 * 20), train=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(_core.StorageFullError, match=r"Cannot reserve .* storage_path="):
            table.lookup(np.arange(64 * 200), train=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    fresh = EmbeddingVariable("t", DIM, optimizer=Adagrad(0.1))
    np.testing.assert_array_equal(table.lookup(np.arange(64 * 20)), fresh.lookup(np.arange(64 * 20)))
    table.lookup(np.arange(64 * 200), train=True)  # with space again, it goes on
    assert len(table) == 64 * 200


def test_a_directory_that_goes_away_is_an_error_of_the_call_and_not_of_the_process(tmp_path: Path) -> None:
    table = make_table(StorageType.DRAM_PMEM, tmp_path / "gone", (64 * 40 * ROW,))
    (tmp_path / "gone").rmdir()
    with pytest.raises(ValueError, match=r"Cannot make a file in storage_path.*gone"):
        table.lookup(np.arange(64 * 200), train=True)
    fresh = EmbeddingVariable("t", DIM, optimizer=Adagrad(0.1))
    np.testing.assert_array_equal(table.lookup(np.arange(100)), fresh.lookup(np.arange(100)))
    (tmp_path / "gone").mkdir()
    table.lookup(np.arange(64 * 200), train=True)
    table.core.maintain()
    assert len(table) == 64 * 200


def test_one_tier_with_a_limit_is_full_at_its_limit(tmp_path: Path) -> None:
    table = make_table(StorageType.DRAM, tmp_path, (64 * 40 * ROW,))
    with pytest.raises(_core.StorageFullError, match=f"storage_size={64 * 40 * ROW}"):
        table.lookup(np.arange(64 * 80), train=True)
    assert table.stats()["tiers"][0]["bytes"] <= 64 * 40 * ROW
    with pytest.raises(ValueError, match=r"room for 64 rows.*storage_size=1000"):
        make_table(StorageType.DRAM, tmp_path, (1000,))


SMALLEST, LARGEST = 2 * 4 * DIM // 4, 2 * 4 * DIM  # of a row that grows, without metadata


def _full(table: EmbeddingVariable, keys: np.ndarray, occurrences: int, limit: int) -> int:
    """How many rows fit, a few keys at a time; each time within the limit."""
    for start in range(0, len(keys), 64):
        part = keys[start : start + 64]
        try:
            table.lookup(part, np.full(len(part), occurrences), train=True)
        except _core.StorageFullError:
            return len(table)
        finally:
            assert table.stats()["tiers"][0]["bytes"] <= limit
    raise AssertionError("the table never got full")


def test_cells_that_rows_of_one_dimension_left_serve_those_of_another(tmp_path: Path) -> None:
    limit = 64 * 100 * ROW
    table = make_table(StorageType.DRAM, tmp_path, (limit,), dynamic_dimension=BLOCKS)
    few = _full(table, np.arange(10_000), 4, limit)
    table.erase(np.arange(10_000))
    many = _full(table, np.arange(50_000), 1, limit)
    assert few * (LARGEST + 8) > 0.75 * limit  # shards fill up unevenly
    assert many * (SMALLEST + 8) > 0.75 * limit
    table.erase(np.arange(50_000))
    again = _full(table, np.arange(10_000), 4, limit)
    assert again == few
    # Rows that grow where they are need the room of those that grew before them.
    table.erase(np.arange(10_000))
    kept = np.arange(few // 2)
    for occurrences in (1, 2, 3, 4):
        table.lookup(kept, np.full(len(kept), 1), train=True)
        assert table.stats()["tiers"][0]["bytes"] <= limit, occurrences
    assert next(table.export(keys=kept)).blocks.tolist() == [4] * len(kept)  # type: ignore[union-attr]  # it has blocks


@pytest.mark.parametrize("kind", [StorageType.DRAM_PMEM, StorageType.DRAM_SSDHASH])
def test_rows_that_grow_keep_to_the_limits_of_tiers_and_to_their_values(
    kind: StorageType, tmp_path: Path
) -> None:
    limit, below = 64 * 30 * ROW, 16 << 20
    tiered = make_table(
        kind, tmp_path, (limit, below), dynamic_dimension=BLOCKS, evict_option=GlobalStepEvict(6)
    )
    plain = EmbeddingVariable(
        "t",
        DIM,
        option=EmbeddingVariableOption(dynamic_dimension=BLOCKS, evict_option=GlobalStepEvict(6)),
        optimizer=Adagrad(0.1),
    )
    rng = np.random.default_rng(0)
    for step in range(1, 25):
        keys = rng.integers(step * 300, step * 300 + 6000, 4000)
        gradients = rng.normal(size=(len(keys), DIM)).astype(np.float32)
        for table in (tiered, plain):
            table.lookup(keys, train=True)
            table.apply_gradients(keys, gradients, step=step)
        if step % 4 == 0:
            assert tiered.evict(step).tolist() == plain.evict(step).tolist()
        assert tiered.stats()["tiers"][0]["bytes"] <= limit
        assert tiered.stats()["tiers"][1]["bytes"] <= below
    for ours, theirs in zip(tiered.export(), plain.export(), strict=True):
        for name in ("key", "frequency", "version", "value", "blocks"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        np.testing.assert_array_equal(ours.slots["accumulator"], theirs.slots["accumulator"])


def test_a_mapped_tier_gives_chunks_of_one_dimension_to_another(tmp_path: Path) -> None:
    limit, below = 64 * 20 * ROW, 8 << 20
    table = make_table(StorageType.DRAM_PMEM, tmp_path, (limit, below), dynamic_dimension=BLOCKS)
    small = _full(table, np.arange(400_000), 1, limit)
    kept = np.arange(0, small, 16)
    table.erase(np.setdiff1d(np.arange(400_000), kept))
    values = table.lookup(kept)
    large = _full(table, np.arange(1_000_000, 1_400_000), 4, limit) - len(kept)
    fresh = make_table(StorageType.DRAM_PMEM, tmp_path, (limit, below), dynamic_dimension=BLOCKS)
    assert large > 0.75 * _full(fresh, np.arange(1_000_000, 1_400_000), 4, limit)
    np.testing.assert_array_equal(table.lookup(kept), values)
    assert table.stats()["tiers"][1]["bytes"] <= below


def test_a_log_gives_dead_space_back(tmp_path: Path) -> None:
    table = make_table(StorageType.DRAM_SSDHASH, tmp_path, (64 * 20 * ROW, 12 << 20))
    keys = np.arange(40_000)
    table.lookup(keys, train=True)
    full = table.stats()["tiers"][1]["bytes"]
    table.erase(keys[keys % 4 != 0])
    for _ in range(20):
        table.core.maintain()
    assert table.stats()["tiers"][1]["bytes"] < 0.6 * full
    fresh = EmbeddingVariable("t", DIM, optimizer=Adagrad(0.1))
    np.testing.assert_array_equal(table.lookup(keys), fresh.lookup(keys))
    assert len(table) == len(keys[keys % 4 == 0])


def test_no_file_is_left_behind(tmp_path: Path) -> None:
    table = make_table(StorageType.DRAM_PMEM_SSDHASH, tmp_path, SMALL[3])
    table.lookup(np.arange(N), train=True)
    assert list(tmp_path.iterdir()) == []  # unnamed files: a killed process leaves none either


def test_filters_work_in_tiers_and_a_checkpoint_moves_between_storages(tmp_path: Path) -> None:
    storage = make_storage(StorageType.DRAM_SSDHASH, tmp_path / "ssd", (64 * 20 * ROW,))
    option = EmbeddingVariableOption(CounterFilter(2), storage_option=storage)
    store = LocalStore()
    store.create_tables([TableSpec("t", DIM, option, Adagrad(0.1))])
    table = store.table("t")
    keys = np.arange(10_000)
    table.lookup(np.concatenate([keys, keys[:6000]]), train=True)
    table.apply_gradients(keys, np.ones((len(keys), DIM)), step=1)
    assert (len(table), table.stats()["filtered"]) == (6000, 4000)
    store.save(str(tmp_path / "save"))
    again = LocalStore()
    again.create_tables([TableSpec("t", DIM, EmbeddingVariableOption(CounterFilter(2)), Adagrad(0.1))])
    again.restore(str(tmp_path / "save"))
    np.testing.assert_array_equal(again.table("t").lookup(keys), table.lookup(keys))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StorageOption(StorageType.DRAM_SSDHASH), "needs storage_path"),
        (lambda: StorageOption(StorageType.DRAM, "/tmp"), "no meaning"),
        (lambda: StorageOption(StorageType.HBM_DRAM), "HBM tiers need a GPU"),
        (lambda: StorageOption(StorageType.DRAM, storage_size=(1, 2)), r"storage_size=\(1, 2\)"),
        (lambda: StorageOption(cache_strategy="FIFO"), "cache_strategy='FIFO'"),  # type: ignore[arg-type]  # on purpose
    ],
)
def test_options_are_checked(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]  # a lambda


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises((ValueError, OSError), match="file"):
        make_table(StorageType.DRAM_PMEM, tmp_path / "file").lookup([1], train=True)


@pytest.mark.parametrize("kind", [StorageType.DRAM, StorageType.DRAM_PMEM, StorageType.DRAM_SSDHASH])
def test_a_full_tier_names_its_table_and_itself(kind: StorageType, tmp_path: Path) -> None:
    sizes = (64 * 40 * ROW, 4 << 20)[: len(kind.tiers)]
    table = make_table(kind, tmp_path, sizes)
    with pytest.raises(
        _core.StorageFullError, match=rf"Table 't': The {kind.tiers[-1]} tier is full.*={sizes[-1]}"
    ):
        table.lookup(np.arange(100_000), train=True)
    with pytest.raises(_core.StorageFullError, match="Table 't': "):
        table.upsert(np.arange(200_000, 300_000), np.ones((100_000, DIM)))
