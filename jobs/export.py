"""Write the deployable model: `spark-submit export.py --conf job.yaml`, or `deeprec-spark export`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deeprec_spark.config import JobConfig
from deeprec_spark.jobs import common
from deeprec_spark.jobs.model import load_spec, make_estimator
from deeprec_spark.redaction import redact

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)


def export(spark: SparkSession, config: JobConfig) -> common.Result:
    """Write the last checkpoint as a SavedModel of stock TensorFlow operations at `export.path`."""
    estimator = make_estimator(spark, config, load_spec(config.data.prepared))
    try:
        estimator.export(config.export.path)
    finally:
        estimator.shutdown()
    logger.info("The model is in %s", redact(config.export.path))
    return {"job": "export", "model": config.export.path}


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point for spark-submit; returns the exit code."""
    return common.main(export, "Export", argv)


if __name__ == "__main__":
    sys.exit(main())
