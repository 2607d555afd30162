"""A driver that trains a counting model, for the tests of recovery: run as a process of its own.

Each row's id is a key of a table that adds 1 for each sample (SGD with rate 1, a gradient of -1), so that what a
checkpoint says was trained can be compared with the rows of the data, one by one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import threading
from typing import Any

import keras
import numpy as np
import psutil
from pyspark.sql import functions as F  # noqa: N812  # Spark's name

from deeprec_spark import checkpoint
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.options import Constant, EmbeddingVariableOption, InitializerOption
from deeprec_spark.estimator import Estimator
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.recovery import RestartOptions
from deeprec_spark.runtime.errors import TerminatedError
from deeprec_spark.saving import CheckpointOptions
from deeprec_spark.session import init_session
from deeprec_spark.tracing import TracingOptions

ROWS, BATCH, EPOCHS = 20_000, 20, 2


@keras.saving.register_keras_serializable("recovery")
class Negative(keras.losses.Loss):
    """The sum of the predictions, negated: each sample's gradient is -1."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return -keras.ops.sum(y_pred, axis=-1)


def counting(config: dict[str, Any]) -> keras.Model:
    """Output: the row of the id, and something small that draws at random and has weights."""
    option = EmbeddingVariableOption(init_option=InitializerOption(Constant(0.0)))
    row = keras.Input((), dtype="int64", name="row")
    noise = keras.Input((), dtype="float32", name="noise")
    counted = SparseEmbedding(1, name="rows", ev_option=option)(row)
    drawn = keras.layers.Dropout(0.5)(keras.layers.Reshape((1,))(noise))
    drawn = keras.layers.Dense(1, use_bias=False)(drawn)
    model = keras.Model({"row": row, "noise": noise}, keras.layers.Add()([counted, drawn]))
    model.compile(keras.optimizers.SGD(1e-3), Negative(reduction="sum"), metrics=["mae"])
    return model


def node(name: str) -> psutil.Process | None:
    """The process of a node of this process's job, e.g. `server 0`."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        named = "deeprec_spark.runtime.node" in line and any(part.startswith(name + " ") for part in line)
        # Not one of another job on this machine.
        if named and any(parent.pid == os.getpid() for parent in process.parents()):
            return process
    return None


class Killer(keras.callbacks.Callback):
    """Kills once, in the middle of an epoch."""

    def __init__(self, victim: str, epoch: int) -> None:
        super().__init__()
        self.victim, self.epoch_to_kill = victim, epoch
        self.now = -1
        self.begun: list[int] = []
        # Not a plain value: a job that starts again takes back what callbacks have counted, but this stays done.
        self.done = threading.Event()
        if victim == "nobody":
            self.done.set()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch
        self.begun.append(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.done.is_set() or self.now != self.epoch_to_kill or batch < 60:
            return
        self.done.set()
        if self.victim == "driver":
            print("KILL ME", flush=True)  # noqa: T201
            signal.pause()
        elif self.victim == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.victim == "stop":
            self.model.stop_training = True
        else:
            found = node(self.victim)
            assert found is not None, self.victim
            found.kill()


def report(**found: Any) -> None:
    """What the test reads."""
    print("FOUND " + json.dumps(found), flush=True)  # noqa: T201


def state(model_dir: str) -> dict[str, Any]:
    """What the newest checkpoint holds."""
    directory = checkpoint.latest(model_dir)
    assert directory is not None
    store = checkpoint.SnapshotStore(directory)
    table = store.tables["rows"]
    counts = np.zeros(ROWS)
    counts[table.rows.keys] = table.rows.values[:, 0]
    values, often = np.unique(np.round(counts, 4), return_counts=True)
    arrays = {"dense": store.dense, "keys": table.rows.keys, "values": table.rows.values}
    return {
        "counts": dict(zip(map(str, values.tolist()), often.tolist(), strict=True)),
        "step": checkpoint.load(directory).step,
        "sums": {name: hashlib.sha256(np.ascontiguousarray(a)).hexdigest() for name, a in arrays.items()},
    }


def main() -> None:
    """Arguments: master, mode, number of servers, number of workers, whom to kill, in which epoch, folder."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s")
    logging.getLogger("deeprec_spark").setLevel(logging.INFO)
    master, mode, servers, workers, victim, epoch, folder = sys.argv[1:]
    slots = str(int(servers) + int(workers))
    spark = init_session(
        {
            "spark.master": master, "spark.cores.max": slots, "spark.executor.cores": "1",
            "spark.executor.instances": slots, "spark.executor.memory": "512m", "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "3", "spark.ui.showConsoleProgress": "false",
        }
    )  # fmt: skip
    data = folder + "/data"
    if not os.path.exists(data + "/_SUCCESS"):
        rows = spark.range(ROWS).select(
            F.col("id").alias("row"), (F.col("id") % 7).cast("float").alias("noise"), F.lit(1.0).alias("y")
        )
        rows.repartitionByRange(3, "row").write.mode("overwrite").parquet(data)
    estimator = Estimator.from_keras(
        model_creator=counting, num_ps=int(servers), num_workers=int(workers), mode=mode,
        placement="separate" if int(servers) else "colocated",
        sparse_optimizer=SGD(1.0), model_dir=f"{folder}/model-{mode}", spark=spark, seed=5,
        checkpoints=CheckpointOptions(save_secs=None, incremental_steps=100),
        restarts=RestartOptions(backoff_secs=0.2), shuffle_rows=1500, tracing=TracingOptions(interval_secs=0.5),
    )  # fmt: skip
    killer = Killer(victim, int(epoch))
    error = ""
    history: dict[str, Any] = {}
    try:
        history = estimator.fit(
            spark.read.parquet(data), epochs=EPOCHS, batch_size=BATCH, feature_cols=["row", "noise"],
            label_cols=["y"], validation_data=spark.read.parquet(data), callbacks=[killer], verbose=0,
        )  # fmt: skip
    except TerminatedError as terminated:
        error = str(terminated)
    statistics = estimator.statistics
    assert statistics is not None
    report(
        **state(estimator.model_dir),
        history=history,
        begun=killer.begun,
        killed=killer.done.is_set(),
        error=error,
        restarts=statistics.restarts,
        rows=statistics.rows,
        steps=statistics.steps,
        told=estimator.report().to_dict(),
        saves=[[save.kind, save.step, save.pause, save.write] for save in statistics.saves],
    )
    spark.stop()


if __name__ == "__main__":
    main()
