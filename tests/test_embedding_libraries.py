"""libpmem, memkind and LevelDB: used where they are installed, named where they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deeprec_spark.embedding.optimizers import Adagrad
from deeprec_spark.embedding.options import EmbeddingVariableOption, StorageOption, StorageType
from deeprec_spark.embedding.variable import EmbeddingVariable
from tests.libraries import NUMA_NODE, need_library, storage_option

DIM = 16
LEVELDB = ("leveldb.so.1d", "leveldb.so.1", "leveldb.so")
KEYS = np.arange(50_000)


def _table(storage: StorageOption) -> EmbeddingVariable:
    return EmbeddingVariable(
        "t", DIM, option=EmbeddingVariableOption(storage_option=storage), optimizer=Adagrad(0.1)
    )


@pytest.mark.parametrize(
    ("kind", "granted"),
    [
        (StorageType.PMEM_LIBPMEM, ("pmem (libpmem, file)", "pmem (libpmem, MAP_SYNC)")),
        (StorageType.PMEM_MEMKIND, (f"memkind (numa node {NUMA_NODE})",)),
        (StorageType.SSDHASH, ("ssd log",)),
        (StorageType.LEVELDB, ("leveldb",)),
    ],
    ids=lambda value: value.value if isinstance(value, StorageType) else "",
)
def test_single_types_work(kind: StorageType, granted: tuple[str, ...], tmp_path: Path) -> None:
    need_library(kind, tmp_path)
    table = _table(storage_option(kind, tmp_path))
    fresh = EmbeddingVariable("t", DIM, optimizer=Adagrad(0.1))
    for other in (table, fresh):
        other.lookup(KEYS, train=True)
        other.apply_gradients(KEYS, np.ones((len(KEYS), DIM)), step=1)
    np.testing.assert_array_equal(table.lookup(KEYS), fresh.lookup(KEYS))
    assert table.stats()["tiers"][-1]["kind"] in granted
    # What was given back is zeroed and used again.
    table.clear()
    fresh.clear()
    np.testing.assert_array_equal(table.lookup(KEYS, train=True), fresh.lookup(KEYS))


SCRIPT = """
import sys
import numpy as np
from deeprec_spark.embedding.options import EmbeddingVariableOption, StorageOption
from deeprec_spark.embedding.variable import EmbeddingVariable

kind, path, sizes = sys.argv[1], sys.argv[2] or None, (1 << 20,) if sys.argv[1].startswith("DRAM_") else ()
option = EmbeddingVariableOption(storage_option=StorageOption(kind, path, sizes))
try:
    table = EmbeddingVariable("t", 16, option=option)
    keys = np.arange(50_000)
    values = table.lookup(keys, train=True)
    assert (table.lookup(keys) == values).all()
    print(table.stats()["tiers"][-1]["kind"])
except ValueError as error:
    print(error)
"""


def _run(kind: StorageType, path: Path, **environment: str) -> str:
    directory = "" if kind is StorageType.PMEM_MEMKIND else str(path)
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind.value, directory],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return process.stdout.strip()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (StorageType.PMEM_LIBPMEM, "install the package libpmem1"),
        (StorageType.PMEM_MEMKIND, "install the package libmemkind0"),
        (StorageType.LEVELDB, "install the package libleveldb1d"),
        (StorageType.DRAM_LEVELDB, "install the package libleveldb1d"),
        (StorageType.DRAM_PMEM, "pmem (file)"),  # what needs no library works
        (StorageType.DRAM_SSDHASH, "ssd log"),
    ],
)
def test_absent_libraries_are_named_and_all_else_works(kind: StorageType, said: str, tmp_path: Path) -> None:
    # The loader takes these files first, and cannot load them.
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for name in ("pmem.so.1", "pmem.so", "memkind.so.0", "memkind.so", *LEVELDB):
        (hidden / f"lib{name}").touch()
    output = _run(kind, tmp_path / "path", LD_LIBRARY_PATH=str(hidden))
    assert said in output
    if "install" in said:
        assert f"Received: storage_type={kind.tiers[-1]}" in output


def test_memkind_takes_its_own_nodes_or_names_the_setting(tmp_path: Path) -> None:
    need_library(StorageType.PMEM_MEMKIND, tmp_path)
    granted = _run(StorageType.PMEM_MEMKIND, tmp_path, MEMKIND_DAX_KMEM_NODES=str(NUMA_NODE))
    assert granted == "memkind (dax kmem)"
    refused = _run(StorageType.PMEM_MEMKIND, tmp_path, MEMKIND_DAX_KMEM_NODES="nonsense")
    assert "set MEMKIND_DAX_KMEM_NODES" in refused
    assert "Received: MEMKIND_DAX_KMEM_NODES=nonsense" in refused


def test_a_node_that_is_not_there_is_named(tmp_path: Path) -> None:
    need_library(StorageType.PMEM_MEMKIND, tmp_path)
    with pytest.raises(ValueError, match="numa_node=999"):
        _table(StorageOption(StorageType.PMEM_MEMKIND, numa_node=999))


def test_a_path_without_room_or_access_is_named(tmp_path: Path) -> None:
    need_library(StorageType.PMEM_LIBPMEM, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises((ValueError, OSError), match="file"):
        _table(StorageOption(StorageType.PMEM_LIBPMEM, str(tmp_path / "file"))).lookup([1], train=True)
