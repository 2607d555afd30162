"""Judge the last checkpoint on held-out rows: `spark-submit evaluate.py --conf …`, or `deeprec-spark evaluate`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deeprec_spark.config import JobConfig
from deeprec_spark.jobs import common
from deeprec_spark.jobs.model import load_spec, make_estimator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)


class QualityError(RuntimeError):
    """The model is worse than `evaluation.min_auc`: the job fails, so that nothing after it deploys the model."""


def evaluate(spark: SparkSession, config: JobConfig) -> common.Result:
    """The model's metrics on `<data.prepared>/test`; raises QualityError below `evaluation.min_auc`."""
    prepared = config.data.prepared
    estimator = make_estimator(spark, config, load_spec(prepared))
    try:
        metrics = estimator.evaluate(f"{prepared}/test", batch_size=config.evaluation.batch_size)
    finally:
        estimator.shutdown()
    result: common.Result = {
        "job": "evaluate",
        "metrics": {name: round(float(value), 6) for name, value in metrics.items()},
    }
    if "auc" in metrics:
        result["auc"] = round(float(metrics["auc"]), 6)
    if config.data.kind == "synthetic":
        from deeprec_spark.features.synthetic import planted_auc

        result["best_auc"] = round(planted_auc(spark, f"{prepared}/test"), 6)
    wanted = config.evaluation.min_auc
    # An AUC that is undefined (held-out rows of one class) is NaN, and no NaN is good enough.
    if wanted is not None and not result.get("auc", 0.0) >= wanted:
        raise QualityError(
            f"The model is not good enough: evaluation.min_auc asks for {wanted}. Received: {result['metrics']}"
        )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point for spark-submit; returns the exit code."""
    return common.main(evaluate, "Evaluate", argv)


if __name__ == "__main__":
    sys.exit(main())
