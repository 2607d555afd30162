"""The model creator of the jobs: from the configuration to a compiled Keras model, on the driver and on workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deeprec_spark.config import JobConfig
from deeprec_spark.config_optimizers import make_keras_optimizer
from deeprec_spark.features.spec import FeatureSpec

if TYPE_CHECKING:
    import keras
    from pyspark.sql import SparkSession

    from deeprec_spark.estimator import KerasEstimator


def create_model(config: dict[str, Any]) -> keras.Model:
    """The compiled model of `model_config`'s values; runs wherever a worker is."""
    import keras

    from deeprec_spark.models import registry

    spec = FeatureSpec.model_validate(config["spec"])
    model = registry.create(config["name"], spec, **config["options"])
    binary = all(label.kind == "binary" for label in spec.labels)
    model.compile(
        optimizer=make_keras_optimizer(config["optimizer"], config["optimizer_arguments"]),
        loss="binary_crossentropy" if binary else "mean_squared_error",
        metrics=[keras.metrics.AUC(name="auc")]
        if binary
        else [keras.metrics.RootMeanSquaredError(name="rmse")],
    )
    return model


def model_config(config: JobConfig, spec: FeatureSpec) -> dict[str, Any]:
    """Plain values that `create_model` needs."""
    return {
        "spec": spec.model_dump(mode="json"),
        "name": config.model.name,
        "options": config.model.options,
        "optimizer": config.training.optimizer.name,
        "optimizer_arguments": config.training.optimizer.arguments,
    }


def load_spec(prepared: str) -> FeatureSpec:
    """The spec of a prepared folder; a FileNotFoundError says to run `prepare` first."""
    from deeprec_spark.staging import find_spec

    spec = find_spec(prepared)
    if spec is None:
        raise FileNotFoundError(
            f"No prepared data: run the prepare job with this configuration first. Received: data.prepared={prepared!r}"
        )
    return spec


def make_estimator(spark: SparkSession, config: JobConfig, spec: FeatureSpec) -> KerasEstimator:
    """The Estimator of this job."""
    from deeprec_spark.estimator import Estimator

    return Estimator.from_keras(
        model_creator=create_model,
        config=model_config(config, spec),
        num_ps=config.cluster.num_ps,
        num_workers=config.cluster.workers,
        mode=config.cluster.mode,
        placement=config.cluster.placement,
        semi_sync=None if config.cluster.semi_sync is None else config.cluster.semi_sync.make_options(),
        sparse_optimizer=config.training.make_sparse_optimizer(),
        model_dir=config.training.model_dir,
        feature_spec=spec,
        seed=config.training.seed,
        warm_start=None if config.training.warm_start is None else config.training.warm_start.make_options(),
        checkpoints=config.training.checkpoints.make_options(),
        restarts=config.training.restarts.make_options(),
        cache_dir=config.training.cache_dir,
        cache_mb=config.training.cache_mb,
        shuffle_rows=config.training.shuffle_rows,
        tracing=None if config.training.tracing is None else config.training.tracing.make_options(),
        tls=None if config.cluster.tls is None else config.cluster.tls.make_options(),
        max_message_mb=config.cluster.max_message_mb,
        pipeline=None if config.training.pipeline is None else config.training.pipeline.make_options(),
        wire_dtype=config.cluster.wire_dtype,
        deadlines=config.cluster.deadlines.make_options(),
        dense_step=config.training.dense_step.make_options(),
        executor_policy=config.cluster.executor_policy,
        spark=spark,
    )
