"""Score rows with the last checkpoint: `spark-submit predict.py --conf job.yaml`, or `deeprec-spark predict`."""

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


def predict(spark: SparkSession, config: JobConfig) -> common.Result:
    """Write `prediction.input` (default: the prepared test rows) with its prediction to `prediction.output`."""
    prepared = config.data.prepared
    prediction = config.prediction
    estimator = make_estimator(spark, config, load_spec(prepared))
    source = prediction.input or f"{prepared}/test"
    output = prediction.output or f"{prepared}/predictions"
    try:
        estimator.predict(source, batch_size=prediction.batch_size).write.mode("overwrite").parquet(output)
    finally:
        estimator.shutdown()
    rows = spark.read.parquet(output).count()
    logger.info("Wrote %d predictions to %s", rows, output)
    return {"job": "predict", "rows": rows, "output": output}


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point for spark-submit; returns the exit code."""
    return common.main(predict, "Predict", argv)


if __name__ == "__main__":
    sys.exit(main())
