"""A driver that trains one model in several placements, for the tests of placements: run as a process of its own."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
import threading
from typing import Any

import keras
import numpy as np
import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # Spark's name

from deeprec_spark.checkpoint import SnapshotStore, latest, load
from deeprec_spark.embedding.optimizers import Adagrad
from deeprec_spark.embedding.options import CounterFilter, EmbeddingVariableOption
from deeprec_spark.estimator import Estimator, KerasEstimator
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.recovery import RestartOptions
from deeprec_spark.runtime.semi_sync import SemiSyncOptions
from deeprec_spark.saving import CheckpointOptions
from deeprec_spark.session import init_session
from deeprec_spark.training.pipeline import PipelineOptions

ROWS, BATCH = 6000, 128
COLOCATED: dict[str, Any] = {"placement": "colocated", "num_workers": 2}
SEPARATE: dict[str, Any] = {"num_ps": 1, "num_workers": 2}
Found = dict[str, Any]


def creator(config: dict[str, Any]) -> keras.Model:
    """Two tables, one of them with a filter; what draws at random, and what keeps a moving average."""
    option = EmbeddingVariableOption(filter_option=CounterFilter(3))
    a = keras.Input((), dtype="int64", name="a")
    b = keras.Input((), dtype="int64", name="b")
    x = keras.layers.Concatenate()(
        [SparseEmbedding(8, name="ta", ev_option=option)(a), SparseEmbedding(8, name="tb")(b)]
    )
    x = keras.layers.Dropout(0.1)(keras.layers.Dense(16, activation="relu")(x))
    x = keras.layers.BatchNormalization()(x)
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


class Killer(keras.callbacks.Callback):
    """kill -9 of the process of one node, once, in the middle of the second epoch."""

    def __init__(self, victim: str, application: str) -> None:
        super().__init__()
        self.victim, self.application = victim, application
        self.epoch = 0
        # Not a plain value: a job that starts again takes back what callbacks have counted, but this stays done.
        self.done = threading.Event()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch != 1 or self.done.is_set():
            return
        self.done.set()
        lines = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        [found] = [
            process
            for process, line in lines
            if "deeprec_spark.runtime.node" in line
            and any(part.startswith(self.victim) for part in line)
            # Not one of another job on this machine.
            and any(self.application in parent.cmdline() for parent in process.parents())
        ]
        found.kill()


def checksums(model_dir: str) -> dict[str, str]:
    """What the newest checkpoint holds, whichever shards wrote it."""
    directory = latest(model_dir)
    assert directory is not None
    store = SnapshotStore(directory)
    found = {"dense": store.dense, "state": store.state}
    for name, table in store.tables.items():
        order = np.argsort(table.rows.keys)
        found[name + " keys"], found[name + " values"] = table.rows.keys[order], table.rows.values[order]
    return {name: hashlib.sha256(np.ascontiguousarray(array)).hexdigest() for name, array in found.items()}


class Scenes:
    """What the tests ask for, by name."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self.spark, self.folder = spark, folder
        self.data = folder + "/data"
        rows = spark.range(ROWS).select(
            (F.col("id") % 97).alias("a"),
            (F.col("id") % 13 - 6).alias("b"),
            F.when((F.col("id") % 97) % 3 == 0, 1).otherwise(0).alias("y"),
        )
        rows.coalesce(2).write.mode("ignore").parquet(self.data)

    def equal(self) -> Found:
        """Two nodes that hold the tables, twice, and two workers beside a server, with and without a pipeline."""
        plain = {**SEPARATE, "pipeline": PipelineOptions(depth=0)}
        nodes = [("first", COLOCATED), ("second", COLOCATED), ("separate", SEPARATE), ("one by one", plain)]
        return {name: self.train(self.estimator(name, **options)) for name, options in nodes}

    def moves(self) -> Found:
        """An epoch in one placement, another in the next: from servers to nodes, to more nodes, and back."""
        stayed = self.estimator("stayed", **SEPARATE)
        found: Found = {"first": self.train(stayed, 1)}
        shutil.copytree(f"{self.folder}/model-stayed", f"{self.folder}/model-moved")
        moved = self.estimator("moved", **COLOCATED)
        found["evaluated"] = [moved.evaluate(self.frame), stayed.evaluate(self.frame)]
        found["second"] = [self.train(stayed, 1), self.train(moved, 1)]
        three = self.estimator("moved", placement="colocated", num_workers=3)
        found["three"] = self.train(three, 1)
        found["back"] = self.train(self.estimator("moved", **SEPARATE), 1)
        return found

    def killed(self) -> Found:
        """kill -9 of a node that holds tables and trains."""
        saves = CheckpointOptions(save_secs=None, incremental_steps=10)
        quick = RestartOptions(backoff_secs=0.2)
        found: Found = {}
        for name in ("undisturbed", "disturbed"):
            estimator = self.estimator(name, checkpoints=saves, restarts=quick, **COLOCATED)
            killer = Killer("worker 1 ", self.spark.sparkContext.applicationId)
            found[name] = self.train(
                estimator, 3, [killer] if name == "disturbed" else [], validation_data=self.data
            )
            found[name]["killed"] = killer.done.is_set()
        return found

    def semi_sync(self) -> Found:
        """Nodes with tables, in both ways between async and sync."""
        bounded = self.estimator(
            "bounded", mode="async", semi_sync=SemiSyncOptions(max_staleness=1), **COLOCATED
        )
        backup = self.estimator(
            "backup", placement="colocated", num_workers=3, semi_sync=SemiSyncOptions(backup_workers=1)
        )
        return {"bounded": self.train(bounded), "backup": self.train(backup, 4)}

    @property
    def frame(self) -> DataFrame:
        """The rows."""
        return self.spark.read.parquet(self.data)

    def estimator(self, name: str, **options: Any) -> KerasEstimator:
        """One with a model_dir of this name."""
        return Estimator.from_keras(
            model_creator=creator, sparse_optimizer=Adagrad(0.05), model_dir=f"{self.folder}/model-{name}",
            spark=self.spark, seed=5, **{"mode": "sync", **options},
        )  # fmt: skip

    def train(
        self, estimator: KerasEstimator, epochs: int = 2, callbacks: Any = (), validation_data: Any = None
    ) -> Found:
        """Fit, and what came of it."""
        history = estimator.fit(
            self.data, epochs=epochs, batch_size=BATCH, feature_cols=["a", "b"], label_cols=["y"],
            callbacks=callbacks, validation_data=validation_data, verbose=0,
        )  # fmt: skip
        statistics = estimator.statistics
        assert statistics is not None
        newest = latest(estimator.model_dir)
        assert newest is not None
        return {
            "history": history,
            "checksums": checksums(estimator.model_dir),
            "rows": statistics.rows,
            "steps": statistics.steps,
            "restarts": statistics.restarts,
            "semi_sync": statistics.semi_sync.to_dict(),
            "saves": [save.kind for save in statistics.saves],
            "files": sorted(file.path for file in load(newest).files),
        }


def main() -> None:
    """Arguments: master, scene, folder."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s")
    logging.getLogger("deeprec_spark").setLevel(logging.INFO)
    master, scene, folder = sys.argv[1:]
    spark = init_session(
        {
            "spark.master": master, "spark.cores.max": "3", "spark.executor.cores": "1",
            "spark.executor.instances": "3", "spark.executor.memory": "512m", "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "3", "spark.ui.showConsoleProgress": "false",
        }
    )  # fmt: skip
    found = getattr(Scenes(spark, folder), scene)()
    print("FOUND " + json.dumps(found), flush=True)  # noqa: T201
    spark.stop()


if __name__ == "__main__":
    main()
