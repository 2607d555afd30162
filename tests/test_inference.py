"""Predict and evaluate on Spark, against the model called by hand and the exported model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from deeprec_spark import checkpoint, inference
from deeprec_spark.data import Batch, ParquetDataset
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.inference import InferenceModel

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(240)

SPEC = FeatureSpec(
    features=(
        Feature(name="user", kind=FeatureKind.CATEGORICAL, raw_type="string", default="nobody"),
        Feature(name="item", kind=FeatureKind.CATEGORICAL, raw_type="int64", table="items"),
        Feature(name="history", kind=FeatureKind.SEQUENCE, raw_type="int64", max_length=3, table="items"),
        Feature(name="count", kind=FeatureKind.DENSE, raw_type="float32", transform="log1p", default=2.0),
    ),
    labels=(Label(name="click"), Label(name="buy")),
)


def make_model(config: dict[str, Any]) -> Any:
    """MMoE with two outputs, or DeepFM with one."""
    import keras

    from deeprec_spark import models

    keras.utils.set_random_seed(1)
    model = models.create(config["name"], SPEC, embedding_dim=4, **config.get("options", {}))
    labels = list(model.output) if isinstance(model.output, dict) else ["click"]
    metrics = {name: [keras.metrics.AUC(name="auc")] for name in labels}
    model.compile(
        "adam",
        loss=dict.fromkeys(labels, "binary_crossentropy") if len(labels) > 1 else "binary_crossentropy",
        metrics=metrics if len(labels) > 1 else metrics["click"],
    )
    return model


@dataclass
class Trained:
    """A trained model, its checkpoint and its Spark-side description."""

    model: Any
    path: str
    inference: InferenceModel


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Trains a model for a few steps on random rows with known ids."""

    def run(name: str, spec: FeatureSpec, **options: Any) -> Trained:
        from deeprec_spark.embedding.local_store import LocalStore
        from deeprec_spark.layers.tables import table_specs
        from deeprec_spark.training import optimizers
        from deeprec_spark.training.trainer import Trainer
        from deeprec_spark.udfs import functions

        config = {"name": name, "options": options}
        model = make_model(config)
        random = np.random.default_rng(0)
        users = functions.fingerprint64([f"u{index}" for index in range(5)]).to_numpy()
        n = 64
        batch = Batch(
            {
                "user": random.choice(users, n),
                "item": random.integers(-3, 4, n),
                "history": random.integers(-1, 4, (n, 3)),
                "count": random.random(n).astype(np.float32),
            },
            {label.name: random.integers(0, 2, n).astype(np.float32) for label in spec.labels},
        )
        trainer = Trainer(model, LocalStore())
        trainer.initialize(batch)
        trainer.set_learning_rate(0.05)
        for _ in range(5):
            trainer.train_step(batch)
        optimizer = optimizers.from_keras(model.optimizer)
        folder = tmp_path_factory.mktemp(name)
        path = checkpoint.save_checkpoint(
            trainer.store.save,
            str(folder),
            model=model,
            tables=table_specs(model, optimizer),
            step=trainer.step,
            optimizer=optimizer,
            feature_spec=spec,
        )
        trainer.refresh()
        described = InferenceModel(path, make_model, config, cache_dir=str(folder / "cache"))
        return Trained(model, path, described)

    return run


@pytest.fixture(scope="module")
def single(train: Callable[..., Trained]) -> Trained:
    """DeepFM: one output."""
    spec = FeatureSpec(features=SPEC.features, labels=SPEC.labels[:1])
    return train("deepfm", spec, label="click")


@pytest.fixture(scope="module")
def double(train: Callable[..., Trained]) -> Trained:
    """MMoE: two outputs."""
    return train("mmoe", SPEC)


@pytest.fixture(scope="module")
def raw(spark: SparkSession) -> DataFrame:
    """Raw rows with nulls, NaN, unknown ids and columns that no model takes; one of its partitions is empty."""
    rows = [
        ("u0", 1, [1, 2], 3.0, "a", [1.5]),
        (None, 2, [], None, "b", None),
        ("u1", None, None, math.nan, None, [2.5]),
        ("stranger", 99, [3, 2, 1, 0, 77], -4.0, "c", []),
    ] * 5
    schema = (
        "user string, item long, history array<long>, count double, `other.name` string, vector array<double>"
    )
    filled = spark.createDataFrame(rows, schema).coalesce(1)
    return filled.union(spark.createDataFrame([], schema)).selectExpr(
        "*",
        "cast(item as decimal(10, 2)) price",
        "timestamp'2026-01-02 03:04:05.678901' seen",
        "date'2026-01-02' day",
        "struct(user, item) pair",
        "map('a', item) by_name",
        "cast(user as binary) bytes",
    )


def signature(trained: Trained, folder: Path) -> Any:
    """The exported model's serving signature."""
    import tensorflow as tf

    from deeprec_spark.export.saved_model import export_saved_model

    store = checkpoint.SnapshotStore(trained.path, cache_dir=str(folder / "cache"))
    export_saved_model(trained.model, store, str(folder / "model"))
    loaded = tf.saved_model.load(str(folder / "model"))
    return loaded, loaded.signatures["serving_default"]


def test_predictions_are_those_of_the_exported_model(single: Trained, raw: DataFrame, tmp_path: Path) -> None:
    import tensorflow as tf

    scored = inference.predict(raw, single.inference, batch_size=3)
    assert scored.columns == [*raw.columns, "prediction"]
    assert scored.schema.fields[:-1] == raw.schema.fields
    assert scored.schema["prediction"].dataType.simpleString() == "float"
    before, after = raw.collect(), scored.collect()
    assert [str(row[:-1]) for row in after] == [str(tuple(row)) for row in before]
    _loaded, serve = signature(single, tmp_path)
    served = serve(
        user=tf.constant([row["user"] or "nobody" for row in before]),
        item=tf.constant([-1 if row["item"] is None else row["item"] for row in before], tf.int64),
        history=tf.constant(
            [[-1] * (5 - len(row["history"] or [])) + (row["history"] or []) for row in before], tf.int64
        ),
        count=tf.constant([math.nan if row["count"] is None else row["count"] for row in before], tf.float32),
    )
    predictions = np.array([row["prediction"] for row in after], np.float32)
    np.testing.assert_allclose(predictions, served["prediction"].numpy(), atol=1e-6)
    assert len(np.unique(predictions)) == 4


def test_several_outputs_give_a_column_each(double: Trained, raw: DataFrame) -> None:
    scored = inference.predict(raw, double.inference)
    assert scored.columns[-2:] == ["prediction_buy", "prediction_click"]
    assert all(0 < row["prediction_buy"] < 1 for row in scored.collect())


def test_a_checkpoint_says_how_its_model_is_made(single: Trained, raw: DataFrame) -> None:
    by_creator = inference.predict(raw, single.inference).collect()
    by_config = inference.predict(
        raw, InferenceModel(single.path, cache_dir=single.inference.cache_dir)
    ).collect()
    assert [row["prediction"] for row in by_config] == [row["prediction"] for row in by_creator]


def test_prepared_columns_and_evaluation(
    single: Trained, spark: SparkSession, raw: DataFrame, tmp_path: Path
) -> None:
    import keras
    from pyspark.sql import functions as F  # noqa: N812

    from deeprec_spark.features.prepare import prepare_dataframe

    spec = FeatureSpec(features=SPEC.features, labels=SPEC.labels[:1])
    labelled = raw.withColumn("click", (F.coalesce("item", F.lit(0)) % 2).cast("float")).repartition(3)
    prepared = prepare_dataframe(labelled, spec)
    prepared.write.parquet(str(tmp_path / "rows"))
    rows = spark.read.parquet(str(tmp_path / "rows"))
    scored = inference.predict(rows, single.inference, prepared=True).collect()

    @dataclass
    class Staged:
        dataset: ParquetDataset
        spec: FeatureSpec
        sample_weight: str | None = None

    staged = Staged(ParquetDataset.scan(str(tmp_path / "rows")), spec)
    results = inference.evaluate(spark, single.inference, staged, batch_size=3)
    labels = np.array([row["click"] for row in scored])
    predictions = np.array([row["prediction"] for row in scored])
    auc = keras.metrics.AUC()
    auc.update_state(labels, predictions)
    assert results["auc"] == pytest.approx(float(auc.result()), abs=1e-6)
    loss = -np.mean(np.log(np.where(labels == 1, predictions, 1 - predictions)))
    assert results["loss"] == pytest.approx(loss, abs=1e-5)


def test_wrong_calls_say_what_is_wrong(single: Trained, raw: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no column \['user'\]"):
        inference.predict(raw.drop("user"), single.inference)
    with pytest.raises(ValueError, match=r"rename them. Received: \['prediction'\]"):
        inference.predict(raw.withColumnRenamed("vector", "prediction"), single.inference)
    with pytest.raises(checkpoint.CheckpointNotFoundError, match="No checkpoint here"):
        inference.predict(raw, InferenceModel(str(tmp_path), make_model, single.inference.config))
    other = {"name": "deepfm", "options": {"label": "click", "hidden_units": [3]}}
    with pytest.raises(checkpoint.CheckpointMismatchError, match=r"another model.*dense weight"):
        inference.predict(raw, InferenceModel(single.path, make_model, other))
