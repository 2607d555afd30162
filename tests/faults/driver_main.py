"""The driver of the fault tests: a program that fits on request, and tells what happens, one JSON line each.

Started by `harness.Driver`. It is the program's main module, so that the model creator travels by value.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from pyspark.sql import SparkSession

from deeprec_spark import checkpoint
from deeprec_spark.embedding.optimizers import SGD, Adagrad
from deeprec_spark.embedding.options import (
    CBFFilter,
    Constant,
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    InitializerOption,
    StorageOption,
    StorageType,
)
from deeprec_spark.estimator import Estimator
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.runtime.options import DeadlineOptions

EPOCHS = 2
BATCH = 32
COUNTED = "rows"
"""The table whose rows count how often a row of the data was trained."""

_out = sys.stdout
_run = 0
_lock = threading.Lock()


def tell(event: str, **more: Any) -> None:
    """A line for the test."""
    with _lock:
        _out.write("@" + json.dumps({"event": event, "run": _run, **more}) + "\n")
        _out.flush()


class Slowly(keras.layers.Layer):
    """Takes its time for each batch, so that there is a middle of an epoch for something to go wrong in."""

    def __init__(self, seconds: float, **more: Any) -> None:
        super().__init__(**more)
        self.seconds = seconds

    def call(self, ids: Any) -> Any:
        def pause(values: Any) -> Any:
            time.sleep(self.seconds)
            return values

        passed = tf.numpy_function(pause, [ids], ids.dtype)
        passed.set_shape(ids.shape)
        return passed


class Counting(keras.layers.Layer):
    """Adds a loss whose gradient is -1 for the counted value of each sample; the prediction stays as it is.

    Times `workers`, where a step is that of so many workers and each one's gradient weighs by its share of the samples.
    """

    def __init__(self, workers: int, **more: Any) -> None:
        super().__init__(**more)
        self.workers = workers

    def call(self, predicted: Any, counted: Any) -> Any:
        self.add_loss(-self.workers * keras.ops.sum(counted))
        return predicted


def create_model(config: dict[str, Any]) -> keras.Model:
    """Two embeddings that learn, and one of the rows' numbers that counts: SGD with learning rate 1."""
    learn, other, fading = EmbeddingVariableOption(), EmbeddingVariableOption(), None
    if config.get("all_kinds_of_files"):
        learn = EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=100))
        other = EmbeddingVariableOption(filter_option=CBFFilter(filter_freq=2, max_element_size=1000))
        fading = EmbeddingVariableOption(evict_option=GlobalStepEvict(steps_to_live=30))
    if config.get("tier_path"):
        sizes = (config["tier_bytes"],)
        storage = StorageOption(
            StorageType.DRAM_SSDHASH, storage_path=config["tier_path"], storage_size=sizes
        )
        learn = EmbeddingVariableOption(storage_option=storage)
    zeros = EmbeddingVariableOption(init_option=InitializerOption(initializer=Constant(0.0)))
    row = keras.Input((), dtype="int64", name="row")
    a = keras.Input((), dtype="int64", name="a")
    b = keras.Input((), dtype="int64", name="b")
    slow = Slowly(config["seconds"], name="slowly")(a)
    parts = [
        SparseEmbedding(8, name="ta", ev_option=learn)(slow),
        SparseEmbedding(8, name="tb", ev_option=other)(b),
    ]
    if config.get("tier_path"):
        parts.append(SparseEmbedding(64, name="spilled", ev_option=learn)(row))
    if fading is not None:
        parts.append(SparseEmbedding(2, name="fading", ev_option=fading)(row))
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()(parts))
    predicted = keras.layers.Dense(1, activation="sigmoid")(hidden)
    counted = SparseEmbedding(1, name=COUNTED, ev_option=zeros, optimizer=SGD(1.0))(row)
    model = keras.Model(
        {"row": row, "a": a, "b": b},
        Counting(config["counting_workers"], name="counting")(predicted, counted),
    )
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


class Teller(keras.callbacks.Callback):
    """Tells of progress."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        tell("progress", epoch=self._epoch, steps=batch + 1)


def counts(model_dir: str, rows: int, epochs: int) -> dict[str, int]:
    """How many samples the newest whole checkpoint lacks, and how many it has too often."""
    # A damaged one stays where it is, and which is the newest then takes a fallback to say.
    store = checkpoint.SnapshotStore(checkpoint.chain(model_dir, fallback=True)[-1])
    table = store.tables[COUNTED].rows
    found = np.zeros(rows, np.int64)
    found[np.asarray(table.keys)] = np.rint(np.asarray(table.values)[:, 0]).astype(np.int64)
    store.close()
    return {
        "lost": int(np.maximum(epochs - found, 0).sum()),
        "repeated": int(np.maximum(found - epochs, 0).sum()),
    }


def fit(spark: SparkSession, wanted: dict[str, Any]) -> None:
    """One fit, as the test wants it; its outcome as an event."""
    global _run
    _run = wanted["run"]
    more: dict[str, Any] = dict(wanted.get("estimator", {}))
    if "checkpoints" in wanted or "restarts" in wanted:
        from deeprec_spark.recovery import RestartOptions
        from deeprec_spark.saving import CheckpointOptions

        more["checkpoints"] = CheckpointOptions(**wanted.get("checkpoints", {}))
        more["restarts"] = RestartOptions(**wanted.get("restarts", {}))
    started = time.monotonic()
    estimator = Estimator.from_keras(
        model_creator=create_model,
        config=wanted["config"],
        num_ps=wanted["num_ps"],
        num_workers=wanted["num_workers"],
        mode=wanted["mode"],
        sparse_optimizer=Adagrad(0.1),
        model_dir=wanted["model_dir"],
        spark=spark,
        seed=3,
        deadlines=DeadlineOptions(heartbeat_secs=8.0),
        **more,
    )
    try:
        history = estimator.fit(
            wanted["train"],
            epochs=wanted["epochs"],
            batch_size=BATCH * (wanted["num_workers"] if wanted["mode"] == "sync" else 1),
            feature_cols=["row", "a", "b"],
            label_cols=["y"],
            validation_data=wanted["test"],
            validation_freq=wanted["epochs"],
            callbacks=[Teller()],
            verbose=0,
        )
    except Exception as error:  # whatever it is, the test judges it
        tell("failed", type=type(error).__name__, text=str(error)[:6000], seconds=time.monotonic() - started)
        return
    assert estimator.statistics is not None
    tell(
        "done",
        auc=history["val_auc"][-1],
        rows=estimator.statistics.rows,
        restarts=getattr(estimator.statistics, "restarts", 0),
        seconds=time.monotonic() - started,
        **counts(wanted["model_dir"], wanted["rows"], wanted["epochs"]),
    )


def main() -> None:
    """Make a session, then do what the lines on standard input say, one after another."""
    settings = json.loads(sys.argv[1])
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("deeprec_spark").setLevel(logging.INFO)
    builder = SparkSession.builder.appName("faults")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    tell("ready", application=spark.sparkContext.applicationId)
    for line in sys.stdin:
        fit(spark, json.loads(line))
    spark.stop()


if __name__ == "__main__":
    assert Path(__file__).name == "driver_main.py"
    main()
