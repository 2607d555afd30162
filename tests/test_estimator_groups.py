"""An Estimator on grouped data: fit, evaluate, predict, export, as on the flat rows that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark import models
from deeprec_spark.estimator import Estimator, KerasEstimator
from deeprec_spark.features.infer import infer_spec
from deeprec_spark.features.prepare import prepare_dataframe
from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.training.options import DenseStepOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(300)

ROWS, USERS = 600, 30


def creator(config: dict[str, Any]) -> keras.Model:
    spec = FeatureSpec.model_validate_json(config["spec"])
    model = models.create("wdl", spec, embedding_dim=4, hidden_units=[8], seed=2)
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """Clicks that depend on user and item; 20 samples a user."""
    rows = [
        (i % USERS, f"item {(i * 7) % 11}", float(i % USERS) / USERS, int((i % USERS) % 2))
        for i in range(ROWS)
    ]
    return spark.createDataFrame(rows, "user long, item string, age double, click int").repartition(2)


@pytest.fixture(scope="module")
def spec(frame: DataFrame) -> FeatureSpec:
    return infer_spec(
        frame, ["user", "age", "item"], ["click"], group_by=["user"], group_features=["user", "age"]
    )


@pytest.fixture(scope="module")
def stored(frame: DataFrame, spec: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("prepared")
    prepare_dataframe(frame, spec).coalesce(1).write.parquet(str(folder / "train"))
    spec.save(folder / "feature_spec.json")
    return str(folder / "train")


@pytest.fixture(scope="module")
def trained(
    stored: str, spec: FeatureSpec, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> KerasEstimator:
    estimator = Estimator.from_keras(
        model_creator=creator,
        config={"spec": spec.model_dump_json()},
        model_dir=str(tmp_path_factory.mktemp("model")),
        spark=spark,
        seed=3,
    )
    estimator.history = estimator.fit(
        stored, epochs=4, batch_size=5, label_cols=["click"], validation_data=stored, verbose=0
    )
    return estimator


def test_rows_are_samples_and_batches_are_groups(trained: KerasEstimator) -> None:
    assert trained.statistics is not None
    assert trained.statistics.rows == 4 * ROWS
    assert trained.statistics.steps == 4 * USERS // 5
    assert trained.statistics.tables["user"]["rows"] == USERS
    assert trained.history["val_auc"][-1] > 0.9


def test_evaluate_and_predict_are_those_of_flat_rows(
    trained: KerasEstimator, stored: str, frame: DataFrame, spec: FeatureSpec
) -> None:
    grouped, flat = trained.evaluate(stored, batch_size=7), trained.evaluate(frame, batch_size=100)
    assert grouped["loss"] == pytest.approx(flat["loss"], abs=1e-5)
    assert grouped["auc"] == pytest.approx(flat["auc"], abs=1e-5)
    of_groups = trained.predict(stored).toPandas().groupby(["user", "item"])["prediction"].first()
    assert len(trained.predict(stored).toPandas()) == ROWS
    prepared = prepare_dataframe(frame, spec.model_copy(update={"grouping": None}))
    of_rows = trained.predict(prepared).toPandas().groupby(["user", "item"])["prediction"].first()
    np.testing.assert_allclose(of_groups, of_rows, rtol=1e-5)


def test_an_exported_model_takes_rows_and_groups(
    trained: KerasEstimator, frame: DataFrame, tmp_path: Path
) -> None:
    rows = trained.predict(frame).limit(12).toPandas()
    loaded = tf.saved_model.load(trained.export(str(tmp_path / "model")))
    columns = {
        "user": tf.constant(rows["user"], tf.int64),
        "age": tf.constant(rows["age"], tf.float32),
        "item": tf.constant(rows["item"].tolist()),
    }
    flat = loaded.signatures["serving_default"](**columns)["prediction"]
    np.testing.assert_allclose(flat, rows["prediction"], rtol=1e-5)
    # One user, scored with many items.
    mine = rows[rows["user"] == rows["user"][0]]
    found = loaded.signatures["grouped"](
        user=columns["user"][:1],
        age=columns["age"][:1],
        item=tf.constant(mine["item"].tolist()),
        group_index=tf.zeros(len(mine), tf.int32),
    )["prediction"]
    np.testing.assert_allclose(found, mine["prediction"], rtol=1e-5)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("async", {"num_ps": 1, "num_workers": 1, "executor_policy": "pinned"}),
        ("sync", {"num_workers": 2, "placement": "colocated", "executor_policy": "inline"}),
    ],
)
def test_servers_and_workers_train_on_groups(
    stored: str, spec: FeatureSpec, tmp_path: Path, spark: SparkSession, mode: Any, options: dict[str, Any]
) -> None:
    """Leases, shares of ranks and micro batches are of groups; rows and metrics of samples."""
    estimator = Estimator.from_keras(
        model_creator=creator,
        config={"spec": spec.model_dump_json()},
        model_dir=str(tmp_path / "model"),
        spark=spark,
        mode=mode,
        dense_step=DenseStepOptions(micro_batch=30),
        seed=3,
        **options,
    )
    history = estimator.fit(stored, epochs=6, batch_size=4, label_cols=["click"], verbose=0)
    assert estimator.statistics is not None
    assert estimator.statistics.rows == 6 * ROWS
    assert estimator.statistics.tables["user"]["rows"] == USERS
    assert history["loss"][-1] < history["loss"][0]
    assert estimator.evaluate(stored, verbose=0)["auc"] > 0.9
