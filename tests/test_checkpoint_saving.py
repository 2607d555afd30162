"""A store that this process reaches becomes a checkpoint, and old ones go."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

from deeprec_spark import checkpoint
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD, Adagrad
from deeprec_spark.embedding.store import PullRequest, TableSpec
from tests.checkpoints import EDGES, seen


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
