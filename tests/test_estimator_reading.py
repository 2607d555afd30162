"""Fits that shuffle over row groups and read remote data through a cache: real nodes, data on a real S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from deeprec_spark.checkpoint import SnapshotStore, latest
from deeprec_spark.estimator import Estimator, KerasEstimator
from tests.servers.s3 import ACCESS, BUCKET, SECRET, S3Server
from tests.test_estimator_places import COLUMNS, ROWS, creator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(400)


def test_later_epochs_read_copies(spark: SparkSession, tmp_path: Path) -> None:
    rows = [(i % 40, i % 7, int(i % 40 % 2)) for i in range(ROWS)]
    frame = spark.createDataFrame(rows, "user long, city long, click int").repartition(3)
    with S3Server(tmp_path) as server:
        uri = (
            f"s3://{BUCKET}/model?endpoint_override=127.0.0.1:{server.port}&scheme=http&access_key={ACCESS}"
            f"&secret_key={SECRET}"
        )
        estimator = Estimator.from_keras(
            model_creator=creator,
            model_dir=uri,
            shuffle_rows=100,
            cache_dir=str(tmp_path / "cache"),
            cache_mb=10,
            spark=spark,
        )
        history = estimator.fit(frame, epochs=3, batch_size=50, **COLUMNS)
    assert len(history["loss"]) == 3
    report = estimator.report()
    assert report.workers[0].samples == 3 * ROWS
    assert report.cache["misses"] == 3  # files; they were read once
    assert report.cache["hits"] > report.cache["misses"]
    assert "cache of remote files: " in str(report)
    copies = [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    assert sum(path.stat().st_size for path in copies) == report.cache["fetched_bytes"]


def test_a_shuffled_synchronous_fit_repeats_bit_for_bit(spark: SparkSession, tmp_path: Path) -> None:
    rows = [(i % 40, i % 7, int(i % 40 % 2)) for i in range(ROWS)]
    data = str(tmp_path / "data")
    spark.createDataFrame(rows, "user long, city long, click int").coalesce(2).write.parquet(data)

    def fit(name: str, shuffle_rows: int) -> list[np.ndarray]:
        estimator: KerasEstimator = Estimator.from_keras(
            model_creator=creator,
            num_ps=1,
            num_workers=1,
            mode="sync",
            model_dir=str(tmp_path / name),
            shuffle_rows=shuffle_rows,
            spark=spark,
            seed=2,
        )
        estimator.fit(data, epochs=2, batch_size=50, **COLUMNS)
        store = SnapshotStore(latest(estimator.model_dir) or "")
        return [np.asarray(store.dense), *(table.rows.values for table in store.tables.values())]

    first, second, otherwise = fit("a", 200), fit("b", 200), fit("c", 0)
    for mine, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert any(not np.array_equal(mine, theirs) for mine, theirs in zip(first, otherwise, strict=True))
