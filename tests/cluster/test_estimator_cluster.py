"""The Estimator on a real standalone cluster: one server and two workers on three executors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import RunPython

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# A session on another master needs a JVM of its own, so the driver is a child process.
DRIVER = """
import hashlib, json, sys
import keras, numpy as np
from pyspark.sql import functions as F
from deeprec_spark.checkpoint import SnapshotStore, latest
from deeprec_spark.embedding.optimizers import Adagrad
from deeprec_spark.embedding.options import CounterFilter, EmbeddingVariableOption
from deeprec_spark.estimator import Estimator
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.session import init_session

master, mode, folder = sys.argv[1:]
spark = init_session({
    "spark.master": master, "spark.cores.max": "3", "spark.executor.cores": "1", "spark.executor.instances": "3",
    "spark.executor.memory": "512m", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "3",
})

def creator(config):
    option = EmbeddingVariableOption(filter_option=CounterFilter(3))
    a = keras.Input((), dtype="int64", name="a")
    b = keras.Input((), dtype="int64", name="b")
    x = keras.layers.Concatenate()([
        SparseEmbedding(8, name="ta", ev_option=option)(a), SparseEmbedding(8, name="tb")(b),
    ])
    x = keras.layers.Dropout(0.1)(keras.layers.Dense(16, activation="relu")(x))
    x = keras.layers.BatchNormalization()(x)
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model

rows = spark.range(6000).select(
    (F.col("id") % 97).alias("a"),
    (F.col("id") % 13 - 6).alias("b"),
    F.when((F.col("id") % 97) % 3 == 0, 1).otherwise(0).alias("y"),
)
data = folder + "/data"
rows.coalesce(2).write.mode("ignore").parquet(data)

def checksums(model_dir):
    store = SnapshotStore(latest(model_dir))
    found = {"dense": store.dense, "state": store.state}
    for name, table in store.tables.items():
        found[name + " keys"], found[name + " values"] = table.rows.keys, table.rows.values
    return {name: hashlib.sha256(np.ascontiguousarray(array)).hexdigest() for name, array in found.items()}

results = []
for run in range(2 if mode == "sync" else 1):
    estimator = Estimator.from_keras(
        model_creator=creator, num_ps=1, num_workers=2, mode=mode, sparse_optimizer=Adagrad(0.05),
        model_dir=f"{folder}/model-{mode}-{run}", spark=spark, seed=5,
    )
    history = estimator.fit(
        data, epochs=2, batch_size=128, feature_cols=["a", "b"], label_cols=["y"], validation_data=data, verbose=0
    )
    results.append({
        "history": history,
        "checksums": checksums(estimator.model_dir),
        "rows": estimator.statistics.rows,
        "evaluated": estimator.evaluate(data, batch_size=512),
        "predicted": estimator.predict(spark.read.parquet(data)).count(),
    })
print("RESULTS " + json.dumps(results))
spark.stop()
"""


def run_driver(run_python: RunPython, master: str, mode: str, folder: Path) -> list[dict[str, Any]]:
    done = run_python(DRIVER, master, mode, str(folder), timeout=500)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    results: list[dict[str, Any]] = json.loads(line.removeprefix("RESULTS "))
    return results


def test_sync_repeats_bit_for_bit(run_python: RunPython, standalone_cluster: str, tmp_path: Path) -> None:
    first, second = run_driver(run_python, standalone_cluster, "sync", tmp_path)
    assert len(first["checksums"]) == 6
    assert first["checksums"] == second["checksums"]
    assert first["history"] == second["history"]
    assert first["rows"] == 2 * 6000
    assert first["history"]["val_auc"][-1] > 0.9
    assert first["evaluated"]["auc"] == pytest.approx(first["history"]["val_auc"][-1], abs=1e-6)


def test_async_trains_every_row_once(run_python: RunPython, standalone_cluster: str, tmp_path: Path) -> None:
    [result] = run_driver(run_python, standalone_cluster, "async", tmp_path)
    assert result["rows"] == 2 * 6000
    assert result["predicted"] == 6000
    assert result["history"]["val_auc"][-1] > 0.9
    assert result["evaluated"]["auc"] == pytest.approx(result["history"]["val_auc"][-1], abs=1e-6)
