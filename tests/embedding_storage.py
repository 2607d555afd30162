"""Tables in every kind of storage, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deeprec_spark.embedding import _core
from deeprec_spark.embedding.optimizers import Adagrad
from deeprec_spark.embedding.options import (
    CacheStrategy,
    DynamicDimensionOption,
    EmbeddingVariableOption,
    StorageOption,
    StorageType,
)
from deeprec_spark.embedding.variable import EmbeddingVariable

DIM = 16
ROW = 2 * 4 * DIM + 24  # value, accumulator, metadata
BLOCKS = DynamicDimensionOption(4, (2, 3, 4))


def make_storage(
    kind: StorageType, path: Path, sizes: tuple[int, ...] = (), strategy: CacheStrategy = CacheStrategy.LFU
) -> StorageOption:
    needs_path = {"PMEM_LIBPMEM", "SSDHASH", "LEVELDB"} & set(kind.tiers)
    return StorageOption(kind, str(path) if needs_path else None, sizes, strategy)


def make_table(
    kind: StorageType,
    path: Path,
    sizes: tuple[int, ...] = (),
    strategy: CacheStrategy = CacheStrategy.LFU,
    **options: object,
) -> EmbeddingVariable:
    option = EmbeddingVariableOption(storage_option=make_storage(kind, path, sizes, strategy), **options)  # type: ignore[arg-type]  # by name
    return EmbeddingVariable("t", DIM, option=option, optimizer=Adagrad(0.1))


def fill(table: EmbeddingVariable, most: int = 1_000_000, times: int = 60) -> np.ndarray:
    """Makes rows until the table has refused some in most of its shards; returns the keys that have one."""
    refused = 0
    for start in range(0, most, 64):
        refused += is_refused(table, np.arange(start, start + 64))
        if refused == times:
            return np.sort(table.keys()[0])
    raise AssertionError("the table never got full")


def is_refused(table: EmbeddingVariable, keys: np.ndarray) -> bool:
    """Whether a training lookup finds no room."""
    try:
        table.lookup(keys, train=True)
    except _core.StorageFullError:
        return True
    return False
