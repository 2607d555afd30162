"""Estimators over damaged checkpoints: an error that names the file, or with fallback the last whole state."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deeprec_spark import checkpoint
from deeprec_spark.checkpoint.errors import CheckpointCorruptError
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.estimator import Estimator, KerasEstimator
from deeprec_spark.saving import CheckpointOptions
from tests.test_estimator_places import COLUMNS, creator, frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["frame"]

pytestmark = pytest.mark.timeout(400)


def estimator(spark: SparkSession, model_dir: str, *, fallback: bool = False) -> KerasEstimator:
    """An estimator whose worker holds the tables."""
    return Estimator.from_keras(
        model_creator=creator,
        sparse_optimizer=SGD(0.1),
        num_ps=0,
        model_dir=model_dir,
        spark=spark,
        checkpoints=CheckpointOptions(fallback=fallback),
    )


def flip(path: Path, at: int) -> None:
    """Change one byte, so that a year 2… becomes 1…"""
    content = bytearray(path.read_bytes())
    content[at] ^= 3
    path.write_bytes(content)


@pytest.fixture(scope="module")
def trained(spark: SparkSession, frame: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model directory after two fits of an epoch."""
    model_dir = str(tmp_path_factory.mktemp("trained"))
    for _ in range(2):
        estimator(spark, model_dir).fit(frame, epochs=1, batch_size=50, **COLUMNS)
    return model_dir


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "manifest", "created"])
def test_fallback_helps_whatever_is_damaged(
    spark: SparkSession,
    frame: DataFrame,
    trained: str,
    damage: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model_dir = str(tmp_path / "model")
    shutil.copytree(trained, model_dir)
    first, newest = (entry.directory for entry in checkpoint.entries(model_dir))
    part = next(Path(newest, "tables").rglob("part-*"))
    manifest = Path(newest, "manifest.json")
    victim = manifest if damage in ("manifest", "created") else part
    if damage == "flip":
        flip(part, part.stat().st_size // 2)
    elif damage == "truncate":
        part.write_bytes(part.read_bytes()[:-10])
    elif damage == "missing":
        part.unlink()
    elif damage == "manifest":
        flip(manifest, manifest.stat().st_size // 2)
    else:
        flip(manifest, manifest.read_bytes().index(b'"created": "') + 12)
    with pytest.raises(CheckpointCorruptError, match=str(victim)):
        estimator(spark, model_dir).fit(frame, epochs=1, batch_size=50, **COLUMNS)
    steps = checkpoint.load(first).step
    again = estimator(spark, model_dir, fallback=True)
    with caplog.at_level(logging.WARNING):
        again.fit(frame, epochs=1, batch_size=50, **COLUMNS)
    assert f"going back to {first}" in caplog.text
    assert str(victim) in caplog.text
    assert checkpoint.load(again._trained()).step == 2 * steps > 0
    assert Path(newest).exists()
    assert again.evaluate(frame, batch_size=50, **COLUMNS)


def test_a_model_is_not_lost_when_it_is_saved_where_it_was_loaded(
    spark: SparkSession, trained: str, tmp_path: Path
) -> None:
    saved = estimator(spark, trained).save(str(tmp_path / "saved"))
    before = checkpoint.load(saved)
    again = estimator(spark, str(tmp_path / "model"))
    again.load(saved)
    again.save(saved)
    assert checkpoint.load(saved) == before
