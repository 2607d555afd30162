"""Libraries that storage tiers use if they are installed: skip, or fail where they must be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deeprec_spark.embedding.options import EmbeddingVariableOption, StorageOption, StorageType
from deeprec_spark.embedding.variable import EmbeddingVariable

NUMA_NODE = 0


def storage_option(kind: StorageType, path: Path) -> StorageOption:
    """A storage option of this type with what it needs."""
    needs_path = {"PMEM_LIBPMEM", "SSDHASH", "LEVELDB"} & set(kind.tiers)
    return StorageOption(
        kind,
        str(path) if needs_path else None,
        numa_node=NUMA_NODE if kind is StorageType.PMEM_MEMKIND else None,
    )


def need_library(kind: StorageType, path: Path) -> None:
    """Skip the test if this machine lacks what the storage type needs; with DEEPREC_TEST_LIBRARIES=1, fail."""
    try:
        EmbeddingVariable("t", 4, option=EmbeddingVariableOption(storage_option=storage_option(kind, path)))
    except ValueError as error:
        if "is not installed: install the package lib" in str(error):
            if os.environ.get("DEEPREC_TEST_LIBRARIES"):
                pytest.fail(str(error))
            pytest.skip(str(error))
        if kind is StorageType.PMEM_MEMKIND and "gives no memory of this NUMA node" in str(error):
            pytest.skip(f"the container forbids binding memory: {error}")
        raise
