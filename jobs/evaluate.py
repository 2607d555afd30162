"""Judge the last checkpoint on held-out rows: `spark-submit evaluate.py --conf …`, or `deeprec-spark evaluate`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq

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
        result["best_auc"] = round(planted_auc(f"{prepared}/test"), 6)
    wanted = config.evaluation.min_auc
    if wanted is not None and not result.get("auc", 0.0) >= wanted:
        raise QualityError(
            f"The model is not good enough: evaluation.min_auc asks for {wanted}. Received: {result['metrics']}"
        )
    return result


def planted_auc(path: str) -> float:
    """The AUC of the probabilities that generated the labels: no model can expect a better one."""
    table = pq.read_table(path, columns=["label", "probability"])
    return rank_auc(table["label"].to_numpy(), table["probability"].to_numpy())


def rank_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Exact area under the ROC curve by ranks, ties counted half; NaN if only one class is there.

    Example:
        >>> rank_auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8]))
        0.75
    """
    positive = labels > 0.5
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
    return float((ranks[positive].sum() - positives * (positives + 1) / 2.0) / (positives * negatives))


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point for spark-submit; returns the exit code."""
    return common.main(evaluate, "Evaluate", argv)


if __name__ == "__main__":
    sys.exit(main())
