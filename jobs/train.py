"""Train on prepared data: `spark-submit train.py --conf job.yaml`, or `deeprec-spark train`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deeprec_spark.config import JobConfig
from deeprec_spark.jobs import common
from deeprec_spark.jobs.model import load_spec, make_estimator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from deeprec_spark.fitting import FitStatistics

logger = logging.getLogger(__name__)


def train(spark: SparkSession, config: JobConfig) -> common.Result:
    """Fit the model on `<data.prepared>/train`; it goes on from the last checkpoint in `training.model_dir`."""
    training = config.training
    prepared = config.data.prepared
    estimator = make_estimator(spark, config, load_spec(prepared))
    try:
        history = estimator.fit(
            f"{prepared}/train",
            epochs=training.epochs,
            batch_size=training.batch_size,
            validation_data=f"{prepared}/test" if training.validate_each_epoch else None,
            callbacks=_callbacks(config),
            class_weight=training.class_weight,
        )
        statistics = estimator.statistics
        assert statistics is not None  # fit sets it
    finally:
        estimator.shutdown()
    return summarize(config, statistics, history)


def summarize(
    config: JobConfig, statistics: FitStatistics, history: Mapping[str, Sequence[float]]
) -> common.Result:
    """What the job reports of a fit."""
    return {
        "job": "train",
        "rows": statistics.rows,
        "steps": statistics.steps,  # updates of the model, in sync mode too
        "samples_per_s": round(statistics.samples_per_second),
        "max_staleness": statistics.max_staleness,
        "stale_pulls": statistics.stale_pulls,
        "staleness": {"mean": round(statistics.staleness.mean, 3), "most": statistics.staleness.most},
        "mode": config.cluster.mode,
        "placement": config.cluster.placement,
        "num_ps": config.cluster.num_ps,
        "workers": config.cluster.workers,
        "model_dir": config.training.model_dir,
        "metrics": {name: values[-1] for name, values in history.items() if values},
    }


def _callbacks(config: JobConfig) -> list[Any]:
    import keras

    callbacks: list[Any] = []
    if stopping := config.training.early_stopping:
        callbacks.append(
            keras.callbacks.EarlyStopping(
                monitor=stopping.monitor,
                mode=stopping.mode,
                patience=stopping.patience,
                restore_best_weights=True,
            )
        )
    if config.training.tensorboard:
        callbacks.append(keras.callbacks.TensorBoard(config.training.tensorboard))
    return callbacks


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point for spark-submit; returns the exit code."""
    return common.main(train, "Train", argv)


if __name__ == "__main__":
    sys.exit(main())
