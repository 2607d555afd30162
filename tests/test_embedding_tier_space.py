"""The space of tiers: what is held is counted and bounded, serves every dimension, and goes back; and who owns it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deeprec_spark.embedding import _core
from deeprec_spark.embedding.optimizers import SGD, Adagrad
from deeprec_spark.embedding.options import (
    CacheStrategy,
    DynamicDimensionOption,
    EmbeddingVariableOption,
    StorageOption,
    StorageType,
)
from deeprec_spark.embedding.variable import EmbeddingVariable
from tests.embedding_storage import BLOCKS, DIM, ROW, is_refused, make_table
from tests.libraries import need_library

N = 20_000
OWN = 64 << 10  # what a file system takes for itself


def _disk(path: Path) -> int:
    """Bytes that the files of this process below a directory take, those without a name included."""
    taken = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target, status = os.readlink(f"/proc/self/fd/{name}"), os.stat(f"/proc/self/fd/{name}")
        except OSError:  # the list's own
            continue
        if target.startswith(str(path)):
            taken[status.st_ino] = status.st_blocks * 512
    return sum(taken.values())


def _eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@pytest.mark.parametrize(
    ("kind", "sizes", "blocks"),
    [
        (StorageType.DRAM_SSDHASH, (1 << 20, 48 << 20), 16),
        (StorageType.DRAM_PMEM, (1 << 20, 48 << 20), 16),
        (StorageType.DRAM_PMEM_SSDHASH, (1 << 20, 16 << 20), 8),
    ],
)
def test_no_dimension_starves_another(
    kind: StorageType, sizes: tuple[int, ...], blocks: int, tmp_path: Path
) -> None:
    growth = DynamicDimensionOption(blocks, tuple(range(2, blocks + 1)))
    table = make_table(kind, tmp_path, sizes, dynamic_dimension=growth)
    plain = EmbeddingVariable(
        "t", DIM, option=EmbeddingVariableOption(dynamic_dimension=growth), optimizer=Adagrad(0.1)
    )
    keys = np.arange(N)
    for _ in range(blocks):  # rows of every dimension, one after the other
        np.testing.assert_array_equal(table.lookup(keys, train=True), plain.lookup(keys, train=True))
        for tier, size in zip(table.stats()["tiers"], sizes, strict=False):
            assert tier["bytes"] <= size
    assert next(table.export(N)).blocks.tolist() == [blocks] * N  # type: ignore[union-attr]  # it has blocks
    assert len(table) == N


@pytest.mark.parametrize("kind", [StorageType.PMEM_LIBPMEM, StorageType.DRAM_PMEM, StorageType.DRAM_SSDHASH])
def test_files_stay_within_the_limit(kind: StorageType, tmp_path: Path) -> None:
    need_library(kind, tmp_path)
    limit = 12 << 20
    sizes = (limit,) if kind is StorageType.PMEM_LIBPMEM else (1 << 20, limit)
    table = make_table(kind, tmp_path, sizes)
    start = 0
    while not is_refused(table, np.arange(start, start + 500)):
        start += 500
        assert _disk(tmp_path) - OWN <= table.stats()["tiers"][-1]["bytes"] <= limit
    assert start * (ROW - 8) > 0.7 * limit  # and use most of it
    assert table.stats()["tiers"][-1]["bytes"] <= _disk(tmp_path) + (1 << 20)
    table.clear()
    assert _disk(tmp_path) < 1 << 20


@pytest.mark.parametrize("kind", [StorageType.DRAM_PMEM, StorageType.DRAM_SSDHASH])
def test_a_few_rows_take_little_of_the_disk(kind: StorageType, tmp_path: Path) -> None:
    table = make_table(kind, tmp_path, (64 * 20 * ROW,))
    table.lookup(np.arange(64 * 25), train=True)
    assert table.stats()["tiers"][1]["rows"] > 0
    assert 0 < _disk(tmp_path) - OWN <= table.stats()["tiers"][1]["bytes"] <= 4 << 20


@pytest.mark.parametrize("blocks", [None, BLOCKS])
@pytest.mark.parametrize("kind", [StorageType.DRAM_PMEM, StorageType.DRAM_SSDHASH])
def test_what_was_erased_goes_back_in_the_background(
    kind: StorageType, blocks: DynamicDimensionOption | None, tmp_path: Path
) -> None:
    table = make_table(kind, tmp_path, (64 * 20 * ROW,), dynamic_dimension=blocks)
    keys = np.arange(60_000)
    table.lookup(keys, train=True)
    full = _disk(tmp_path)
    kept, gone = keys[keys % 10 == 0], keys[keys % 10 != 0]
    expected = table.lookup(kept)
    table.erase(gone)
    _eventually(lambda: _disk(tmp_path) < 0.3 * full + (2 << 20))
    assert table.stats()["tiers"][1]["bytes"] < 0.3 * full + (2 << 20)
    np.testing.assert_array_equal(table.lookup(kept), expected)


@pytest.mark.parametrize("kind", [StorageType.DRAM_PMEM, StorageType.DRAM_SSDHASH])
def test_statistics_need_no_disk(kind: StorageType, tmp_path: Path) -> None:
    table = make_table(kind, tmp_path / "gone", (64 * 40 * ROW,))
    table.lookup(np.arange(100), train=True)
    before = table.stats()
    shutil.rmtree(tmp_path / "gone")
    assert table.stats() == before
    assert len(table) == 100


def _child(work: Callable[[], bool]) -> bool:
    """Whether the work returned true in a forked child."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _raises(work: Callable[[], object], message: str) -> bool:
    try:
        work()
    except RuntimeError as error:
        return message in str(error)
    return False


@pytest.mark.parametrize("kind", [StorageType.DRAM_PMEM, StorageType.DRAM_SSDHASH, StorageType.PMEM_LIBPMEM])
def test_a_forked_child_cannot_harm_its_parents_rows(kind: StorageType, tmp_path: Path) -> None:
    need_library(kind, tmp_path)
    sizes = () if kind is StorageType.PMEM_LIBPMEM else (64 * 64 * 40,)
    option = EmbeddingVariableOption(
        storage_option=StorageOption(kind, str(tmp_path), sizes, CacheStrategy.LRU)
    )
    table = EmbeddingVariable("t", 4, option=option, optimizer=SGD(1.0))
    keys = np.arange(N)
    values = np.repeat(keys[:, None], 4, 1).astype(np.float32)
    table.upsert(keys, values)
    rng = np.random.default_rng(1)
    forked = "forked off"

    def read() -> bool:
        right = all((table.lookup(part) == values[part]).all() for part in rng.integers(0, N, (50, 2000)))
        return right and bool((next(table.export(N, keys)).value == values).all())

    assert _child(read)
    one = np.ones((N, 4), np.float32)
    for write in (
        lambda: table.lookup(keys, train=True),
        lambda: table.apply_gradients(keys, one, step=1),
        lambda: table.upsert(keys, one),
        lambda: table.erase(keys),
        table.clear,
        lambda: table.snapshot().close(),
    ):
        assert _child(lambda write=write: _raises(write, forked))  # type: ignore[misc]  # mypy knows no such lambda

    def make_one() -> bool:
        own = EmbeddingVariable("t", 4, option=option, optimizer=SGD(1.0))
        own.upsert(keys, values)
        return bool((own.lookup(keys) == values).all())

    assert _child(make_one)
    assert (table.lookup(keys) == values).all()
    # A child that goes on after its parent changed the files learns that.
    reader, writer = os.pipe()

    def read_late() -> bool:
        os.read(reader, 1)
        return _raises(lambda: table.lookup(keys), forked)

    child = os.fork()
    if child == 0:
        os._exit(0 if read_late() else 1)
    table.apply_gradients(keys, one, step=1)
    os.write(writer, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(reader)
    os.close(writer)
    np.testing.assert_array_equal(table.lookup(keys), values - 1)


def test_rows_that_are_only_read_move_up_too(tmp_path: Path) -> None:
    table = make_table(StorageType.DRAM_PMEM, tmp_path, (N // 10 * ROW,), CacheStrategy.LFU)
    cold, frequent = np.arange(100), np.arange(100, N // 4)
    table.lookup(cold, train=True)
    for _ in range(3):
        table.lookup(frequent, train=True)
    table.core.maintain()
    expected = table.lookup(cold)
    before = table.stats()["promoted"]
    for _ in range(200):
        np.testing.assert_array_equal(table.lookup(cold), expected)
    assert table.stats()["promoted"] - before >= 90  # each of them claimed a place
    assert table.stats()["promoted"] - before < 200 * 100 // 32  # but they do not move all the time


def test_a_full_limit_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must have room for .* bytes.*storage_size=4096"):
        make_table(StorageType.DRAM_PMEM, tmp_path, (1 << 20, 4096))
    table = make_table(StorageType.DRAM_PMEM, tmp_path, (64 * 40 * ROW, 1 << 20))
    with pytest.raises(_core.StorageFullError, match="storage_size=1048576"):
        table.lookup(np.arange(N), train=True)
