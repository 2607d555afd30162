"""The Estimator on a local Spark: real nodes, the embedded store and one parameter server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest

from deeprec_spark import checkpoint
from deeprec_spark.embedding.optimizers import SGD, Adagrad
from deeprec_spark.estimator import Estimator, KerasEstimator
from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.runtime.errors import NodeError, SlotsError
from deeprec_spark.tracing import STAGES
from deeprec_spark.tracing.staleness import Staleness
from deeprec_spark.training.pipeline import PipelineOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(240)

ROWS = 600


def creator(config: dict[str, Any]) -> keras.Model:
    user = keras.Input((), dtype="int64", name="user")
    city = keras.Input((), dtype="int64", name="city")
    age = keras.Input((), dtype="float32", name="age")
    embedded = [SparseEmbedding(4, name="user_table")(user), SparseEmbedding(4, name="city_table")(city)]
    joined = keras.layers.Concatenate()([*embedded, keras.layers.Reshape((1,))(age)])
    output = keras.layers.Dense(1, activation="sigmoid", name="click")(joined)
    model = keras.Model({"user": user, "city": city, "age": age}, output)
    model.compile(
        optimizer=keras.optimizers.Adam(config.get("learning_rate", 0.02), clipnorm=config.get("clipnorm")),
        loss="binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc")],
    )
    return model


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """Clicks that depend on the user alone; strings, an absent age and repeated users among them."""
    rows = [
        (i, i % 40, f"city {i % 7}", None if i % 50 == 0 else float(i % 5), int((i % 40) % 2 == 0))
        for i in range(ROWS)
    ]
    return spark.createDataFrame(rows, "row int, user long, city string, age double, click int").repartition(
        3
    )


FEATURES = ["user", "city", "age"]


@pytest.fixture(scope="module")
def trained(
    frame: DataFrame, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> KerasEstimator:
    """An estimator after three epochs with validation."""
    estimator = Estimator.from_keras(
        model_creator=creator, model_dir=str(tmp_path_factory.mktemp("model")), spark=spark, seed=3
    )
    estimator.history = estimator.fit(
        frame,
        epochs=3,
        batch_size=50,
        feature_cols=FEATURES,
        label_cols=["click"],
        validation_data=frame,
        verbose=0,
    )
    return estimator


def test_fit_learns_and_reports(trained: KerasEstimator) -> None:
    history = trained.history
    assert set(history) == {"loss", "auc", "val_loss", "val_auc"}
    assert all(len(values) == 3 for values in history.values())
    assert history["val_auc"][-1] > 0.95
    assert trained.statistics is not None
    assert trained.statistics.rows == 3 * ROWS
    assert trained.statistics.steps == 3 * ROWS // 50
    assert (trained.statistics.stale_pulls, trained.statistics.max_staleness) == (0, 0)
    assert trained.statistics.staleness == Staleness(steps=3 * ROWS // 50)
    assert trained.statistics.tables["user_table"]["rows"] == 40
    assert trained.statistics.tables["city_table"]["rows"] == 7


def test_the_report_says_where_the_time_went(trained: KerasEstimator) -> None:
    report = trained.report()
    [worker] = report.workers
    assert (worker.samples, worker.steps, worker.slowdown) == (3 * ROWS, 3 * ROWS // 50, 1.0)
    assert all(worker.stages[stage] > 0 for stage in STAGES)
    # What the training thread does itself fits into its time.
    assert sum(worker.stages[stage] for stage in ("pull", "compute", "push", "wait")) <= worker.seconds
    shards = {shard.table: shard for shard in report.shards}
    assert {name: shard.rows for name, shard in shards.items()} == {"user_table": 40, "city_table": 7}
    # At least one key in each step, and a row's worth of bytes there and back for each.
    assert shards["city_table"].keys >= worker.steps
    assert shards["city_table"].moved_bytes == shards["city_table"].keys * 4 * 4 * 2
    assert "user_table" in str(report)


def test_there_is_no_report_before_a_fit(spark: SparkSession, tmp_path: Path) -> None:
    estimator = Estimator.from_keras(model_creator=creator, model_dir=str(tmp_path), spark=spark)
    with pytest.raises(ValueError, match="call fit first"):
        estimator.report()


def test_fit_leaves_one_checkpoint_and_no_staged_data(trained: KerasEstimator) -> None:
    manifest = checkpoint.load(trained.model_dir)
    assert manifest.step == 3 * ROWS // 50
    assert manifest.epoch == 3
    assert manifest.feature_spec is not None
    assert manifest.feature_spec.feature_names == FEATURES
    assert [path.name for path in Path(trained.model_dir).iterdir()] == ["checkpoints"]


def test_evaluate_equals_the_last_validation(trained: KerasEstimator, frame: DataFrame) -> None:
    found = trained.evaluate(frame, batch_size=100)
    assert found["auc"] == pytest.approx(trained.history["val_auc"][-1], abs=1e-6)
    assert found["loss"] == pytest.approx(trained.history["val_loss"][-1], abs=1e-5)


def test_evaluate_takes_the_label_that_is_named(trained: KerasEstimator, frame: DataFrame) -> None:
    opposite = frame.selectExpr("*", "1 - click as other")
    found = trained.evaluate(opposite, label_cols=["other"])
    assert found["auc"] == pytest.approx(1 - trained.history["val_auc"][-1], abs=1e-6)
    with pytest.raises(ValueError, match=r"no column \['nope'\]"):
        trained.evaluate(frame, label_cols=["nope"])
    with pytest.raises(ValueError, match=r"those of the training.*unknown \['nope'\]"):
        trained.predict(frame, feature_cols=["nope"])


def test_predict_is_lazy_and_keeps_all_columns(trained: KerasEstimator, frame: DataFrame) -> None:
    predicted = trained.predict(frame)
    assert predicted.columns == [*frame.columns, "prediction"]
    rows = predicted.collect()
    assert len(rows) == ROWS
    assert {row["city"] for row in rows} == {f"city {i}" for i in range(7)}
    auc = keras.metrics.AUC()
    auc.update_state([row["click"] for row in rows], [row["prediction"] for row in rows])
    assert float(auc.result()) == pytest.approx(trained.history["val_auc"][-1], abs=1e-6)


def test_get_model_and_export_agree_with_predict(
    trained: KerasEstimator, frame: DataFrame, tmp_path: Path
) -> None:
    import tensorflow as tf

    rows = trained.predict(frame).filter("age is not null").orderBy("row").limit(20).collect()
    expected = np.array([row["prediction"] for row in rows])
    path = trained.export(str(tmp_path / "saved"))
    serve = tf.saved_model.load(path).signatures["serving_default"]
    found = serve(
        user=tf.constant([row["user"] for row in rows], tf.int64),
        city=tf.constant([row["city"] for row in rows]),
        age=tf.constant([row["age"] for row in rows], tf.float32),
    )["prediction"]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    model = trained.get_model()
    cities = tf.bitcast(tf.fingerprint([row["city"] for row in rows]), tf.int64)
    inputs = {
        "user": np.array([row["user"] for row in rows]),
        "city": cities.numpy(),
        "age": np.array([row["age"] for row in rows], np.float32),
    }
    np.testing.assert_allclose(model.predict(inputs, verbose=0)[:, 0], expected, atol=1e-6)


def test_saved_state_goes_on_elsewhere(
    trained: KerasEstimator, frame: DataFrame, spark: SparkSession, tmp_path: Path
) -> None:
    saved = trained.save(str(tmp_path / "copy"))
    other = Estimator.from_keras(model_creator=creator, model_dir=str(tmp_path / "model"), spark=spark)
    with pytest.raises(checkpoint.CheckpointNotFoundError, match="no trained model yet"):
        other.evaluate(frame)
    other.load(saved)
    assert other.evaluate(frame)["auc"] == pytest.approx(trained.evaluate(frame)["auc"], abs=1e-9)
    # Going on: the first epoch starts where the other has ended, far below the loss of a new model.
    history = other.fit(
        frame, epochs=1, batch_size=50, feature_cols=FEATURES, label_cols=["click"], verbose=0
    )
    assert history["loss"][0] < trained.history["loss"][-1]
    manifest = checkpoint.load(other.model_dir)
    assert (manifest.step, manifest.epoch) == (4 * ROWS // 50, 4)


def test_checkpoint_of_another_model_is_refused(
    trained: KerasEstimator, frame: DataFrame, spark: SparkSession, tmp_path: Path
) -> None:
    def wider(config: dict[str, Any]) -> keras.Model:
        user = keras.Input((), dtype="int64", name="user")
        output = keras.layers.Dense(1)(SparseEmbedding(8, name="user_table")(user))
        model = keras.Model({"user": user}, output)
        model.compile("sgd", "mse")
        return model

    other = Estimator.from_keras(model_creator=wider, model_dir=trained.model_dir, spark=spark)
    with pytest.raises(checkpoint.CheckpointMismatchError, match=r"embedding_dim 8 in the model and 4"):
        other.fit(frame, feature_cols=["user"], label_cols=["click"], verbose=0)


def test_parameter_server_equals_embedded(
    trained: KerasEstimator, frame: DataFrame, spark: SparkSession, tmp_path: Path
) -> None:
    """One server and one worker, in sync mode, over the same rows: the same steps, so the same model."""
    data = str(tmp_path / "data")
    frame.coalesce(1).write.parquet(data)

    def fit(num_ps: int) -> dict[str, list[float]]:
        estimator = Estimator.from_keras(
            model_creator=creator,
            num_ps=num_ps,
            num_workers=1,
            mode="sync",
            model_dir=str(tmp_path / f"model-{num_ps}"),
            spark=spark,
        )
        return estimator.fit(
            data, epochs=2, batch_size=64, feature_cols=FEATURES, label_cols=["click"], verbose=0
        )

    assert fit(1) == fit(0)


def test_a_server_that_is_pulled_from_ahead_in_bfloat16_learns_as_well(
    trained: KerasEstimator, frame: DataFrame, spark: SparkSession, tmp_path: Path
) -> None:
    estimator = Estimator.from_keras(
        model_creator=creator,
        num_ps=1,
        num_workers=1,
        wire_dtype="bfloat16",
        pipeline=PipelineOptions(warmup_updates=0),
        model_dir=str(tmp_path),
        spark=spark,
        seed=3,
    )
    history = estimator.fit(
        frame,
        epochs=3,
        batch_size=50,
        feature_cols=FEATURES,
        label_cols=["click"],
        validation_data=frame,
        verbose=0,
    )
    assert history["val_auc"][-1] == pytest.approx(trained.history["val_auc"][-1], abs=0.003)
    statistics = estimator.statistics
    assert statistics is not None
    assert statistics.rows == 3 * ROWS
    assert statistics.max_staleness == 1
    # Of each epoch, all steps but the first can be.
    assert 0 < statistics.stale_pulls <= 3 * (ROWS // 50 - 1)
    # Of a lone worker the only update between a pull that ran ahead and its push is the push that it ran ahead of.
    assert statistics.staleness == Staleness(3 * ROWS // 50, statistics.stale_pulls, 1)
    [worker] = estimator.report().workers
    assert (worker.stale_pulls, worker.staleness) == (statistics.stale_pulls, statistics.staleness)


def test_callbacks_run_on_the_driver(frame: DataFrame, spark: SparkSession, tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    estimator = Estimator.from_keras(
        model_creator=creator, sparse_optimizer=Adagrad(0.1), model_dir=str(tmp_path / "model"), spark=spark
    )
    history = estimator.fit(
        frame,
        epochs=6,
        batch_size=60,
        feature_cols=FEATURES,
        label_cols=["click"],
        validation_data=frame,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append((epoch, logs["val_loss"]))
            ),
            # From the third epoch on nothing is learned, so that the best epoch is known and training stops.
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch < 2 else 0.0),
            keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1, restore_best_weights=True),
            keras.callbacks.TensorBoard(str(tmp_path / "logs")),
        ],
    )
    # min_delta makes the first epoch the best one; patience 1 stops after the second.
    assert [epoch for epoch, _ in seen] == [0, 1]
    assert seen[1][1] == history["val_loss"][1]
    assert list((tmp_path / "logs").rglob("events.out.tfevents*"))
    manifest = checkpoint.load(estimator.model_dir)
    assert manifest.step == ROWS // 60
    assert estimator.evaluate(frame)["loss"] == pytest.approx(history["val_loss"][0], abs=1e-5)
    assert not (tmp_path / "model" / "best").exists()


def test_data_creator_weights_and_subclassed_model(spark: SparkSession, tmp_path: Path) -> None:
    class Regression(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = SparseEmbedding(1, name="weights", optimizer=SGD(0.5))
            self.bias = keras.layers.Dense(1, kernel_initializer="zeros", trainable=False)

        def call(self, inputs: Any) -> Any:
            rows = self.table(inputs)
            return rows + 0.0 * self.bias(rows)

    def model(config: dict[str, Any]) -> keras.Model:
        made = Regression()
        made.compile("sgd", "mse")
        return made

    def batches(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
        for _ in range(40):
            ids = np.array([5, -5] * (batch_size // 2))
            # What is wrong weighs nothing.
            target = np.where(ids > 0, 2.0, 99.0)
            yield ids, target, (ids > 0).astype(np.float32)

    estimator = Estimator.from_keras(model_creator=model, model_dir=str(tmp_path), spark=spark)
    estimator.fit(batches, epochs=2, batch_size=8, verbose=0)
    trained_model = estimator.get_model()
    found = trained_model.predict(np.array([5, -5]), verbose=0).reshape(-1)
    assert found[0] == pytest.approx(2.0, abs=1e-2)
    assert abs(found[1]) < 0.06


def test_one_class_evaluation_is_not_a_number(
    trained: KerasEstimator, frame: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = trained.evaluate(frame.filter("click = 1"))
    assert np.isnan(found["auc"])
    assert np.isfinite(found["loss"])
    assert "undefined" in caplog.text


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"label_cols": ["clicks"]}, ValueError, r"no column \['clicks'\].*Received: columns"),
        ({"feature_cols": ["user", "nowhere"]}, ValueError, r"no column \['nowhere'\]"),
        ({"label_cols": ["row"]}, ValueError, r"'row'.*\[0, 1\]"),
        ({"label_cols": None}, ValueError, "nothing to learn: name the labels by label_cols"),
        ({"data": "empty"}, ValueError, "(?i)no rows"),
        ({"data": 7}, TypeError, "Received: int"),
        ({"data": "/no/such/place"}, FileNotFoundError, "/no/such/place"),
        ({"batch_size": 0}, ValueError, "Received: batch_size=0"),
        ({"epochs": 0}, ValueError, "Received: epochs=0"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    frame: DataFrame,
    spark: SparkSession,
    tmp_path: Path,
    change: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    estimator = Estimator.from_keras(model_creator=creator, model_dir=str(tmp_path), spark=spark)
    arguments: dict[str, Any] = {"data": frame, "feature_cols": FEATURES, "label_cols": ["click"], **change}
    if arguments["data"] == "empty":
        arguments["data"] = frame.filter("user < 0")
    with pytest.raises(error, match=message):
        estimator.fit(**arguments)


def test_model_without_a_table_is_refused(frame: DataFrame, spark: SparkSession, tmp_path: Path) -> None:
    def dense_only(config: dict[str, Any]) -> keras.Model:
        model = keras.Sequential(
            [keras.Input((), name="age"), keras.layers.Reshape((1,)), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    estimator = Estimator.from_keras(model_creator=dense_only, model_dir=str(tmp_path), spark=spark)
    with pytest.raises(ValueError, match="no SparseEmbedding"):
        estimator.fit(frame, feature_cols=["age"], label_cols=["click"])


@pytest.mark.parametrize(("mode", "warned"), [("async", False), ("sync", True)])
def test_fewer_slots_than_nodes_is_an_error_at_once(
    frame: DataFrame,
    spark: SparkSession,
    tmp_path: Path,
    mode: Any,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And what the job would do otherwise than one worker, clip, has been said before."""
    estimator = Estimator.from_keras(
        model_creator=creator,
        config={"clipnorm": 1.0},
        num_ps=2,
        num_workers=3,
        mode=mode,
        model_dir=str(tmp_path),
        spark=spark,
    )
    with pytest.raises(SlotsError, match=r"5.*2"):
        estimator.fit(frame, feature_cols=FEATURES, label_cols=["click"])
    assert ("each of 3 synchronous workers" in caplog.text) == warned


def test_a_failing_worker_shows_its_traceback(frame: DataFrame, spark: SparkSession, tmp_path: Path) -> None:
    def fails_on_workers(config: dict[str, Any]) -> keras.Model:
        import sys

        if sys.argv and sys.argv[0].endswith("node.py"):
            raise RuntimeError("the model's file is missing here")
        return creator(config)

    estimator = Estimator.from_keras(model_creator=fails_on_workers, model_dir=str(tmp_path), spark=spark)
    with pytest.raises(NodeError, match="the model's file is missing here"):
        estimator.fit(frame, feature_cols=FEATURES, label_cols=["click"], verbose=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "ray"}, "Received: backend='ray'"),
        ({"mode": "semi"}, "Received: mode='semi'"),
        ({"num_workers": 2}, "num_ps"),
        ({"wire_dtype": "float16"}, "Received: wire_dtype='float16'"),
        ({"mode": "sync", "pipeline": PipelineOptions(max_staleness=1)}, "set max_staleness=0"),
        ({"model_dir": "nowhere://bucket/model"}, "Received: 'nowhere://bucket/model'"),
    ],
)
def test_wrong_options_are_named(spark: SparkSession, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Estimator.from_keras(model_creator=creator, spark=spark, **options)


def test_spec_of_the_estimator_is_used(frame: DataFrame, trained: KerasEstimator) -> None:
    manifest = checkpoint.load(trained.model_dir)
    spec = manifest.feature_spec
    assert isinstance(spec, FeatureSpec)
    assert [label.kind for label in spec.labels] == ["binary"]
