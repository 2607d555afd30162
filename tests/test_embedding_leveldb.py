"""LevelDB as a tier: what a full disk does to it, what its files take, and what a killed process leaves."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from deeprec_spark.embedding import _core
from deeprec_spark.embedding.options import (
    CacheStrategy,
    EmbeddingVariableOption,
    StorageOption,
    StorageType,
)
from deeprec_spark.embedding.variable import EmbeddingVariable
from tests.libraries import need_library

DIM = 4
STEP = 2000


@pytest.fixture(autouse=True)
def _library(tmp_path: Path) -> None:
    need_library(StorageType.DRAM_LEVELDB, tmp_path / "probe")


def _table(path: Path, *sizes: int) -> EmbeddingVariable:
    storage = StorageOption(StorageType.DRAM_LEVELDB, str(path), sizes, CacheStrategy.LRU)
    return EmbeddingVariable("t", DIM, option=EmbeddingVariableOption(storage_option=storage))


def _values(keys: np.ndarray) -> np.ndarray:
    return np.repeat(keys[:, None], DIM, 1).astype(np.float32)


def _disk(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):  # LevelDB has merged it with others just now
            total += file.stat().st_size if file.is_file() else 0
    return total


def _upsert(
    table: EmbeddingVariable, first: int, last: int, holds: Callable[[], bool] = lambda: True
) -> None:
    for start in range(first, last, STEP):
        keys = np.arange(start, start + STEP)
        table.upsert(keys, _values(keys))
        assert holds(), start


@contextmanager
def _file_size_limit(limit: int) -> Iterator[None]:
    """A disk that takes no more, as far as a test may have one anywhere."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_breaks_nothing_for_longer_than_it_is_full(tmp_path: Path) -> None:
    table = _table(tmp_path / "db", 64 * 64 * 40)
    n, step = 10_000, STEP
    table.upsert(np.arange(n), _values(np.arange(n)))
    with _file_size_limit(1 << 20):
        with pytest.raises(_core.StorageFullError, match="LevelDB"):
            _upsert(table, n, 1_000_000)
        n = len(table) // step * step
        for _ in range(2):  # reading needs no room, and moves nothing that it cannot
            for start in range(0, n, step):
                keys = np.arange(start, start + step)
                np.testing.assert_array_equal(table.lookup(keys), _values(keys))
    # With space again, it goes on, and has lost nothing.
    _upsert(table, n, n + 20_000)
    everything = np.arange(n + 20_000)
    np.testing.assert_array_equal(table.lookup(everything), _values(everything))
    assert table.erase(everything) == len(everything) == 20_000 + n
    assert len(table) == 0


def test_the_limit_is_of_the_files(tmp_path: Path) -> None:
    path, limit = tmp_path / "db", 16 << 20
    table = _table(path, 1 << 20, limit)
    n, step = 80_000, STEP
    for turn in range(5):
        for start in range(0, n, step):
            keys = np.arange(start, start + step)
            if turn == 0:
                table.upsert(keys, _values(keys))
            else:
                np.testing.assert_array_equal(table.lookup(keys), _values(keys))
            assert _disk(path) <= limit
    assert 0.5 * _disk(path) <= table.stats()["tiers"][1]["bytes"] <= limit
    table.clear()
    assert _disk(path) < 1 << 20
    table.upsert(np.arange(n), _values(np.arange(n)))
    np.testing.assert_array_equal(table.lookup(np.arange(n)), _values(np.arange(n)))
    with pytest.raises(_core.StorageFullError, match=f"storage_size={limit}"):
        _upsert(table, n, 5_000_000, lambda: _disk(path) <= limit)
    n = len(table) // step * step
    assert n > 100_000
    np.testing.assert_array_equal(table.lookup(np.arange(n)), _values(np.arange(n)))
    table.erase(np.arange(0, n, 2))
    table.upsert(np.arange(n, n + n // 4), _values(np.arange(n, n + n // 4)))
    assert _disk(path) <= limit


SCRIPT = """
import sys
import numpy as np
from deeprec_spark.embedding.options import EmbeddingVariableOption, StorageOption
from deeprec_spark.embedding.variable import EmbeddingVariable

option = EmbeddingVariableOption(storage_option=StorageOption("DRAM_LEVELDB", sys.argv[1], (1 << 20,)))
table = EmbeddingVariable("t", 4, option=option)
table.lookup(np.arange(50_000), train=True)
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_goes_with_the_next_table(tmp_path: Path) -> None:
    path = tmp_path / "db"
    mine = _table(path, 1 << 20)
    own = set(path.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        other = set(path.iterdir()) - own
        assert len(other) == 1
        _table(path, 1 << 20)
        assert set(path.iterdir()) == own | other  # both live
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert other <= set(path.iterdir())
    next_one = _table(path, 1 << 20)
    assert not other & set(path.iterdir())
    assert own <= set(path.iterdir())
    del mine, next_one
    assert list(path.iterdir()) == []
