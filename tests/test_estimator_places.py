"""Estimators whose model_dir is on S3 or HDFS, and ones that begin with weights of another checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest
from pyarrow import fs

from deeprec_spark import checkpoint
from deeprec_spark.embedding.filesystem import resolve
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.estimator import Estimator, KerasEstimator
from deeprec_spark.layers import SparseEmbedding
from tests.servers.hdfs import HdfsServer
from tests.servers.s3 import ACCESS, BUCKET, SECRET, S3Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(400)

ROWS = 400
COLUMNS: dict[str, Any] = {"feature_cols": ["user", "city"], "label_cols": ["click"], "verbose": 0}


def creator(config: dict[str, Any]) -> keras.Model:
    """Tables `users` and whatever the configuration calls the other."""
    user = keras.Input((), dtype="int64", name="user")
    city = keras.Input((), dtype="int64", name="city")
    embedded = [
        SparseEmbedding(4, name="users")(user),
        SparseEmbedding(4, name=config.get("city_table", "cities"))(city),
    ]
    output = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(embedded))
    model = keras.Model({"user": user, "city": city}, output)
    model.compile(keras.optimizers.Adam(config.get("learning_rate", 0.02)), "binary_crossentropy")
    return model


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """Clicks of 40 users in 7 cities."""
    rows = [(i % 40, i % 7, int(i % 40 % 2)) for i in range(ROWS)]
    return spark.createDataFrame(rows, "user long, city long, click int").repartition(2)


@pytest.fixture(scope="module")
def s3_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket; endpoint and credentials in the query, which Spark's Python workers get too."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield (
            f"s3://{BUCKET}/models?endpoint_override=127.0.0.1:{server.port}&scheme=http&access_key={ACCESS}"
            f"&secret_key={SECRET}"
        )


@pytest.fixture(scope="module")
def hdfs_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A folder of a real HDFS."""
    with HdfsServer(tmp_path_factory.mktemp("hdfs")) as server:
        yield f"{server.uri}/models"


@pytest.mark.parametrize("place", ["s3_uri", "hdfs_uri"])
def test_a_model_dir_may_be_any_uri(
    spark: SparkSession,
    frame: DataFrame,
    place: str,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Staging, training on a server and a worker, going on, and prediction; nothing of the secrets is shown."""
    uri: str = request.getfixturevalue(place)

    def estimator() -> KerasEstimator:
        return Estimator.from_keras(
            model_creator=creator, num_ps=1, num_workers=1, model_dir=uri, spark=spark, seed=1
        )

    with caplog.at_level(logging.INFO):
        estimator().fit(frame, epochs=1, batch_size=50, **COLUMNS)
        first = checkpoint.load(uri)
        assert first.step == ROWS // 50
        again = estimator()
        again.fit(frame, epochs=1, batch_size=50, **COLUMNS)
        assert checkpoint.load(uri).step == 2 * first.step
        predictions = again.predict(frame).collect()
    assert len(predictions) == ROWS
    filesystem, path = resolve(uri)
    left = {entry.base_name for entry in filesystem.get_file_info(fs.FileSelector(path))}
    assert left == {"checkpoints"}  # what was staged is gone
    shown = capfd.readouterr()
    for text in (caplog.text, shown.out, shown.err, str(first.to_json())):
        assert SECRET not in text


@pytest.mark.parametrize("num_ps", [0, 1])
def test_a_model_begins_with_weights_of_another(
    spark: SparkSession, frame: DataFrame, tmp_path: Path, num_ps: int
) -> None:
    old = Estimator.from_keras(model_creator=creator, model_dir=str(tmp_path / "old"), spark=spark, seed=1)
    old.fit(frame, epochs=1, batch_size=50, **COLUMNS)

    def start(**options: Any) -> KerasEstimator:
        warm = WarmStart(str(tmp_path / "old"), **options)
        return Estimator.from_keras(
            model_creator=creator,
            config={"city_table": "towns", "learning_rate": 0.0},
            model_dir=str(tmp_path / "new"),
            num_ps=num_ps,
            num_workers=1,
            sparse_optimizer=SGD(0.0),  # the rows stay what they were
            spark=spark,
            seed=2,
            warm_start=warm,
        )

    with pytest.raises(
        checkpoint.CheckpointMismatchError, match=r"\['cities', 'users'\].*\['towns', 'users'\]"
    ):
        start(values_only=True).fit(frame, epochs=1, batch_size=50, **COLUMNS)
    with pytest.raises(checkpoint.CheckpointMismatchError, match=r"'towns'.*optimizer.*Adam.*SGD"):
        start(rename={"cities": "towns"}).fit(frame, epochs=1, batch_size=50, **COLUMNS)
    start(values_only=True, rename={"cities": "towns"}).fit(frame, epochs=1, batch_size=50, **COLUMNS)
    before, after = (
        checkpoint.SnapshotStore(str(tmp_path / name), str(tmp_path / "cache")) for name in ("old", "new")
    )
    users, towns = np.arange(40), np.arange(7)
    np.testing.assert_array_equal(after.lookup("users", users), before.lookup("users", users))
    np.testing.assert_array_equal(after.lookup("towns", towns), before.lookup("cities", towns))
    np.testing.assert_array_equal(after.dense, before.dense)
    assert after.manifest.step == ROWS // 50
