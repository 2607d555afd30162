"""Small checkpoints for tests, made without TensorFlow."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from deeprec_spark import checkpoint
from deeprec_spark.embedding.hashing import NUM_BUCKETS
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD, Adagrad, Optimizer
from deeprec_spark.embedding.options import (
    CBFFilter,
    CounterFilter,
    EmbeddingVariableOption,
    InitializerOption,
)
from deeprec_spark.embedding.store import (
    CheckpointFile,
    Int64Array,
    PullRequest,
    PushRequest,
    SparseGradient,
    TableSpec,
    UniqueKeys,
)

LIMITS = np.iinfo(np.int64)
EDGES = np.array([0, -1, -2, 1, LIMITS.min, LIMITS.min + 1, LIMITS.max, LIMITS.max - 1], np.int64)
DENSE = np.arange(7, dtype=np.float32)
STATE = np.array([0.5, 0.25], np.float32)
WEIGHTS = (
    checkpoint.WeightRecord(path="kernel", shape=(2, 3), trainable=True),
    checkpoint.WeightRecord(path="bias", shape=(1,), trainable=True),
    checkpoint.WeightRecord(path="mean", shape=(2,), trainable=False),
)


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
    manifest = checkpoint.Manifest(
        step=step,
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        epoch=1,
        tables=tuple(checkpoint.TableRecord.of(spec) for spec in table_specs()),
        files=tuple(checkpoint.FileRecord.of(file) for file in files),
        model=checkpoint.ModelRecord(name="small", weights=WEIGHTS),
    )
    checkpoint.commit(directory, manifest)
    return Written(store, directory, manifest)


def chain_specs() -> list[TableSpec]:
    """Tables whose checkpoints have files of every kind."""
    bloom = EmbeddingVariableOption(filter_option=CBFFilter(2, max_element_size=4096))
    return [*table_specs(), TableSpec("bloom", 2, bloom, Adagrad())]


def new_store(shard: int = 0, num_shards: int = 1) -> LocalStore:
    """An empty store of `chain_specs`."""
    store = LocalStore(shard, num_shards)
    store.create_tables(chain_specs())
    store.init_dense(DENSE, STATE, SGD())
    return store


def save(
    store: LocalStore, model_dir: str | Path, step: int, base: str | None = None, keep_max: int | None = None
) -> str:
    """Commit a checkpoint of a store of `chain_specs`; `base` is the directory of the one it builds on."""
    save_id = uuid.uuid4().hex
    store.snapshot(save_id, None if base is None else checkpoint.read_manifest(base).save_id)

    def writer(directory: str) -> list[CheckpointFile]:
        return store.write_snapshot(save_id, directory)

    return checkpoint.save_checkpoint(
        writer,
        str(model_dir),
        model=checkpoint.ModelRecord(name="small", weights=WEIGHTS),
        tables=chain_specs(),
        step=step,
        base=base,
        save_id=save_id,
        keep_max=keep_max,
    )


def change(store: LocalStore, seed: int, rows: int = 40) -> None:
    """Some updates, an erased row and counts, in every table."""
    rng = np.random.default_rng(seed)
    keys = np.unique(np.concatenate([EDGES, rng.integers(-500, 500, rows)]))
    names = [spec.name for spec in chain_specs()]
    store.pull(PullRequest(dict.fromkeys(names, seen(keys))))
    gradients = {
        spec.name: SparseGradient(keys, rng.normal(size=(len(keys), spec.embedding_dim)).astype(np.float32))
        for spec in chain_specs()
    }
    dense = rng.normal(size=len(DENSE)).astype(np.float32)
    store.push(PushRequest(gradients, dense, np.ones(len(STATE), np.float32), samples=1))
    store.pull(PullRequest({"filtered": seen(rng.integers(1000, 1 << 40, 3))}))
    for name in names:
        store.table(name).erase(rng.choice(keys, 2))


def write_chain(model_dir: str | Path, deltas: int = 2, rows: int = 40) -> tuple[LocalStore, list[str]]:
    """A full checkpoint at step 10 and incremental ones at 20, 30, …; the store, and the directories."""
    store = new_store()
    change(store, 0, rows)
    change(store, 1, rows)
    directories = [save(store, model_dir, 10)]
    for number in range(deltas):
        change(store, 2 + number, rows=5)
        directories.append(save(store, model_dir, 20 + 10 * number, directories[-1]))
    return store, directories


def content(store: LocalStore) -> dict[str, Any]:
    """All that a store of `chain_specs` holds, comparable with `==`."""
    found: dict[str, Any] = {"step": store.step}
    for spec in chain_specs():
        table = store.table(spec.name)
        rows = {}
        for block in table.export():
            floats = np.concatenate([block.value, *block.slots.values()], 1)
            for index, key in enumerate(block.key.tolist()):
                rows[key] = (int(block.frequency[index]), int(block.version[index]), floats[index].tobytes())
        _, keys, counts = table.keys()
        found[spec.name] = (rows, dict(zip(keys.tolist(), counts.tolist(), strict=True)))
    found["bloom counters"] = store.table("bloom").core.export_bloom(0, NUM_BUCKETS).tobytes()
    reply = store.pull(PullRequest({}, train=False))
    assert reply.dense is not None
    assert reply.state is not None
    found["dense"] = (reply.dense.tobytes(), reply.state.tobytes())
    return found
