"""Raw data to prepared Parquet: `spark-submit prepare_features.py --conf job.yaml`, or `deeprec-spark prepare`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deeprec_spark.config import JobConfig
from deeprec_spark.jobs import common
from deeprec_spark.jobs.model import load_spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)


def prepare(spark: SparkSession, config: JobConfig) -> common.Result:
    """Write `train/`, `test/` and `feature_spec.json` below `data.prepared`; returns the rows of both."""
    from deeprec_spark.data import ParquetDataset

    data = config.data
    if data.kind == "movielens":
        from deeprec_spark.features.movielens import prepare_movielens

        prepare_movielens(
            spark,
            str(data.path),
            data.prepared,
            split=data.split,
            test_fraction=data.test_fraction,
            max_malformed=data.max_malformed,
            history_length=config.features.history_length,
            group_by=config.features.group_by,
            group_features=config.features.group_features,
        )
    else:
        from deeprec_spark.features.criteo import prepare_criteo
        from deeprec_spark.features.synthetic import generate_criteo

        synthetic = data.kind == "synthetic"
        prepare_criteo(
            spark,
            generate_criteo(spark, data.rows, seed=data.seed) if synthetic else str(data.path),
            data.prepared,
            test_fraction=data.test_fraction,
            max_malformed=data.max_malformed,
            keep=["probability"] if synthetic else [],
            group_by=config.features.group_by,
            group_features=config.features.group_features,
        )
    column = load_spec(data.prepared).sample_column
    rows = {
        part: ParquetDataset.scan(f"{data.prepared}/{part}", column).num_samples for part in ("train", "test")
    }
    logger.info("Prepared %d training and %d test rows in %s", rows["train"], rows["test"], data.prepared)
    return {
        "job": "prepare",
        "rows": sum(rows.values()),
        "train_rows": rows["train"],
        "test_rows": rows["test"],
        "prepared": data.prepared,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point for spark-submit; returns the exit code."""
    return common.main(prepare, "Prepare features", argv)


if __name__ == "__main__":
    sys.exit(main())
