"""A store that this process reaches becomes a checkpoint, and old ones go."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import keras
import numpy as np

from deeprec_spark import checkpoint
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD, Adagrad
from deeprec_spark.embedding.store import PullRequest, TableSpec
from tests.checkpoints import EDGES, new_store, save, seen


def ahead(directory: str, minutes: int = 5) -> str:
    """A checkpoint as of a driver whose clock is fast."""
    manifest = checkpoint.read_manifest(directory)
    created = datetime.fromisoformat(manifest.created) + timedelta(minutes=minutes)
    checkpoint.commit(directory, manifest.model_copy(update={"created": created.isoformat()}))
    return directory


def test_a_driver_whose_clock_is_behind_neither_deletes_nor_forgets_what_it_saves(tmp_path: Path) -> None:
    store = new_store()
    for step in (100, 200):
        ahead(save(store, tmp_path, step))
    third = save(store, tmp_path, 300, keep_max=2)
    assert checkpoint.steps(str(tmp_path)) == [200, 300]
    save(store, tmp_path, 400, third, keep_max=1)
    assert checkpoint.latest(str(tmp_path)) == str(tmp_path / "checkpoints" / f"{400:012d}")
    assert checkpoint.steps(str(tmp_path)) == [300, 400]


def test_what_was_just_committed_stays_wherever_it_is_in_the_order(tmp_path: Path) -> None:
    """Another driver, whose clock is fast, has committed at the same moment."""
    store = new_store()
    base = save(store, tmp_path, 100)
    mine = save(store, tmp_path, 150, base)
    save(store, tmp_path, 160)
    ahead(save(store, tmp_path, 200))
    assert checkpoint.prune(str(tmp_path), 1, keep=mine) == [160]
    assert checkpoint.steps(str(tmp_path)) == [100, 150, 200]
    assert checkpoint.prune(str(tmp_path), 1) == [100, 150]


def test_what_was_saved_can_be_restored_and_read(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    tables = [TableSpec("t", 4, optimizer=Adagrad())]

    def store() -> LocalStore:
        fresh = LocalStore()
        fresh.create_tables(tables)
        fresh.init_dense(np.zeros(9, np.float32), np.zeros(0, np.float32), SGD())
        return fresh

    filled = store()
    rows = filled.pull(PullRequest({"t": seen(EDGES)})).rows["t"]
    for step in (1, 2, 3):
        directory = checkpoint.save_checkpoint(
            filled.save,
            str(tmp_path),
            model=model,
            tables=tables,
            step=step,
            epoch=step,
            optimizer=SGD(),
            extra={"rate": 0.5},
            keep_max=2,
        )
    assert checkpoint.steps(str(tmp_path)) == [2, 3]
    manifest = checkpoint.load(str(tmp_path))
    assert (manifest.step, manifest.epoch, manifest.extra) == (3, 3, {"rate": 0.5})
    manifest.check_model(tables, checkpoint.weight_records(model))
    again = store()
    again.restore(directory)
    snapshot = checkpoint.SnapshotStore(directory, str(tmp_path / "cache"))
    for reader in (again, snapshot):
        found = reader.pull(PullRequest({"t": seen(EDGES)}, train=False)).rows["t"]
        np.testing.assert_array_equal(found, rows)
