"""The progress of a fit as log lines, which is what it is where stderr is no terminal."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import pytest

from deeprec_spark import checkpoint, progress
from deeprec_spark.estimator import Estimator, KerasEstimator
from deeprec_spark.fitting import FitLoop
from deeprec_spark.progress import ProgressDisplay
from deeprec_spark.saving import CheckpointOptions
from tests.test_estimator import FEATURES, creator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def shown(verbose: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.INFO, "deeprec_spark.progress"), ProgressDisplay(verbose, 1) as display:
        display.begin("epoch 1/1", 100)
        display.update(50, {"loss": 0.5}, "ms/step 20: pull 4 compute 12")
        display.end(100, {"loss": 0.25}, "ms/step 21: pull 5 compute 12")
    return [record.getMessage() for record in caplog.records]


def test_each_line_ends_with_the_split_of_the_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    during, end = shown(1, caplog)
    assert during.startswith("epoch 1/1: 50/100 samples, ")
    assert during.endswith("samples/s, loss 0.5000, ms/step 20: pull 4 compute 12")
    assert end.endswith("samples/s, loss 0.2500, ms/step 21: pull 5 compute 12")


def test_verbose_2_is_one_line_and_0_none(caplog: pytest.LogCaptureFixture) -> None:
    assert len(shown(2, caplog)) == 1
    caplog.clear()
    assert shown(0, caplog) == []


def test_what_was_trained_before_is_no_speed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "deeprec_spark.progress"), ProgressDisplay(1, 1) as display:
        display.begin("epoch 1/1", 100, done=50)
        display.update(50, {})
        display.end(50, {})
        display.validated("epoch 1/1", 2.5, {"val_loss": 0.5})
    during, end, validated = [record.getMessage() for record in caplog.records]
    assert during == "epoch 1/1: 50/100 samples, 0 samples/s"
    assert end.endswith(" s, 0 samples/s")
    assert validated == "epoch 1/1: validated in 2.5 s, val_loss 0.5000"


class _StopsOnceSaved(keras.callbacks.Callback):
    def __init__(self, model_dir: str) -> None:
        super().__init__()
        self.model_dir = model_dir

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if checkpoint.latest(self.model_dir) is not None:
            raise RuntimeError("stop here")


@pytest.mark.timeout(240)
def test_the_line_of_an_epoch_is_of_its_training_in_this_fit(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit that goes on in the middle of an epoch, and validates: neither what was before nor after counts."""
    rows, data, model_dir = 1500, str(tmp_path / "data"), str(tmp_path / "model")
    spark.range(rows).selectExpr(
        "id % 40 as user", "'x' as city", "double(1) as age", "int(id % 2) as click"
    ).coalesce(1).write.parquet(data)
    saves = CheckpointOptions(save_secs=None, incremental_steps=10)

    def fit(*callbacks: keras.callbacks.Callback) -> KerasEstimator:
        estimator = Estimator.from_keras(
            model_creator=creator, model_dir=model_dir, checkpoints=saves, spark=spark
        )
        estimator.fit(
            data,
            batch_size=1,
            feature_cols=FEATURES,
            label_cols=["click"],
            validation_data=data,
            validation_steps=10,
            callbacks=callbacks,
            verbose=2,
        )
        return estimator

    with pytest.raises(RuntimeError, match="stop here"):
        fit(_StopsOnceSaved(model_dir))
    position = checkpoint.load(model_dir).position
    assert position is not None
    before = position["within"]["samples"]
    assert 0 < before < rows
    caplog.clear()
    lines_at_validation: list[str] = []
    validate = FitLoop._validate

    def seen(self: FitLoop, *arguments: Any) -> Any:
        lines_at_validation.extend(record.getMessage() for record in caplog.records)
        return validate(self, *arguments)

    monkeypatch.setattr(FitLoop, "_validate", seen)
    with caplog.at_level(logging.INFO, "deeprec_spark.progress"):
        statistics = fit().statistics
    assert statistics is not None
    assert statistics.rows == rows
    [line] = [line for line in lines_at_validation if line.startswith("epoch 1/1: ")]
    found = re.match(r"epoch 1/1: ([\d.]+) s, ([\d,]+) samples/s, ", line)
    assert found is not None, line
    seconds, speed = float(found[1]), int(found[2].replace(",", ""))
    # As exact as the line's digits.
    assert (seconds - 0.06) * (speed - 1) <= rows - before <= (seconds + 0.06) * (speed + 1)
    [after] = [line for line in caplog.messages if "validated" in line]
    assert re.match(r"epoch 1/1: validated in [\d.]+ s, .*val_loss \d", after)
