"""Small checkpoints for tests, made without TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from deeprec_spark import checkpoint
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD, Adagrad, Optimizer
from deeprec_spark.embedding.options import CounterFilter, EmbeddingVariableOption, InitializerOption
from deeprec_spark.embedding.store import Int64Array, PullRequest, TableSpec, UniqueKeys

LIMITS = np.iinfo(np.int64)
EDGES = np.array([0, -1, -2, 1, LIMITS.min, LIMITS.min + 1, LIMITS.max, LIMITS.max - 1], np.int64)
DENSE = np.arange(7, dtype=np.float32)
STATE = np.array([0.5, 0.25], np.float32)


def table_specs(optimizer: Optimizer | None = None) -> list[TableSpec]:
    """A plain table, and one whose ids need two occurrences."""
    option = EmbeddingVariableOption(
        filter_option=CounterFilter(filter_freq=2),
        init_option=InitializerOption(default_value_no_permission=0.25),
    )
    return [
        TableSpec("a/b c", 3, optimizer=optimizer or Adagrad()),
        TableSpec("filtered", 2, option, optimizer or Adagrad()),
    ]


def seen(keys: Int64Array, count: int = 1) -> UniqueKeys:
    """Distinct keys that occurred `count` times each."""
    return UniqueKeys(keys, np.full(len(keys), count, np.int64))


@dataclass
class Written:
    """A checkpoint of a filled LocalStore."""

    store: LocalStore
    directory: str
    manifest: checkpoint.Manifest


def write(model_dir: Path, *, step: int = 10, rows: int = 100, seed: int = 0, num_shards: int = 1) -> Written:
    """Fill tables with `rows` random keys beside the edges of int64, and commit a checkpoint.

    With several shards the files are what as many servers would write.
    """
    keys = np.unique(
        np.concatenate([EDGES, np.random.default_rng(seed).integers(LIMITS.min, LIMITS.max, rows)])
    )
    directory = checkpoint.directory_of(str(model_dir), step)
    files = []
    for shard in range(num_shards):
        store = LocalStore(shard, num_shards)
        store.create_tables(table_specs())
        store.init_dense(DENSE, STATE, SGD())
        if num_shards > 1:
            from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket

            mine = keys[bucket(keys).astype(np.int64) * num_shards // NUM_BUCKETS == shard]
        else:
            mine = keys
        store.pull(PullRequest({"a/b c": seen(mine)}))
        store.pull(PullRequest({"filtered": seen(mine[::2], 2)}))
        store.pull(PullRequest({"filtered": seen(mine[1::2], 1)}))
        files += store.save(directory)
    weights = (
        checkpoint.WeightRecord(path="kernel", shape=(2, 3), trainable=True),
        checkpoint.WeightRecord(path="bias", shape=(1,), trainable=True),
        checkpoint.WeightRecord(path="mean", shape=(2,), trainable=False),
    )
    manifest = checkpoint.Manifest(
        step=step,
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        epoch=1,
        tables=tuple(checkpoint.TableRecord.of(spec) for spec in table_specs()),
        files=tuple(checkpoint.FileRecord.of(file) for file in files),
        model=checkpoint.ModelRecord(name="small", weights=weights),
    )
    checkpoint.commit(directory, manifest)
    return Written(store, directory, manifest)
