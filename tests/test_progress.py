"""The progress of a fit as log lines, which is what it is where stderr is no terminal."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import pytest

from deeprec_spark import checkpoint, progress
from deeprec_spark.epochs import summarize
from deeprec_spark.estimator import Estimator, KerasEstimator
from deeprec_spark.fitting import FitLoop
from deeprec_spark.progress import ProgressDisplay
from deeprec_spark.runtime.phases import Progress
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


def test_the_line_shows_the_first_numbers_of_a_vector(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deeprec_spark.progress"), ProgressDisplay(2, 1) as display:
        display.begin("epoch 1/1", 100)
        display.end(100, {"loss": 0.25, "precision": [0.5, float("nan")], "recall": [0.125] * 200})
    assert caplog.messages[0].endswith(
        ", loss 0.2500, precision [0.5000 nan], recall [0.1250 0.1250 0.1250 0.1250 …]"
    )


def told(rank: int, samples: int, **logs: Any) -> Progress:
    return Progress(rank, {"samples": samples, "steps": 1, "logs": logs})


def test_metrics_of_workers_are_weighted_by_their_samples() -> None:
    reports = [
        told(1, 30, loss=0.5, precision=[0.5, 1.0]),
        told(2, 10, loss=0.1, precision=[0.1, 0.0]),
        told(3, 0, loss=9.0, precision=[9.0, math.inf]),
        told(4, 0),  # has not taken a step
    ]
    samples, steps, logs = summarize(reports)
    assert (samples, steps) == (40, 4)
    assert logs["loss"] == pytest.approx(0.4)
    assert logs["precision"] == pytest.approx([0.4, 0.75])
    assert summarize([told(1, 0, loss=0.5), told(2, 0, loss=0.7)])[2] == pytest.approx({"loss": 0.6})
    assert summarize([]) == (0, 0, {})


def test_what_one_worker_does_not_know_yet_is_known_from_the_others_but_a_loss_that_is_nan_is_seen() -> None:
    nan = math.nan
    logs = summarize(
        [
            told(1, 30, loss=nan, click_loss=nan, auc=nan, recall=[nan, nan]),
            told(2, 10, loss=0.5, click_loss=0.5, auc=0.75, recall=[0.5, nan]),
        ]
    )[2]
    assert math.isnan(logs["loss"])
    assert math.isnan(logs["click_loss"])
    assert logs["auc"] == 0.75
    assert logs["recall"] == pytest.approx([0.5, nan], nan_ok=True)
    assert math.isnan(summarize([told(1, 30, auc=nan)])[2]["auc"])


def creator_with_vector(config: dict[str, Any]) -> keras.Model:
    model = creator(config)
    model.compile(
        "adam",
        "binary_crossentropy",
        metrics=[keras.metrics.Precision(thresholds=[0.0, 1.0], name="precision")],
    )
    return model


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
    """A fit that goes on in the middle of an epoch, and validates: neither what was before nor after counts.

    One of its metrics is a vector.
    """
    rows, data, model_dir = 1500, str(tmp_path / "data"), str(tmp_path / "model")
    spark.range(rows).selectExpr(
        "id % 40 as user", "'x' as city", "double(1) as age", "int(id % 2) as click"
    ).coalesce(1).write.parquet(data)
    saves = CheckpointOptions(save_secs=None, incremental_steps=10)

    histories = []

    def fit(*callbacks: keras.callbacks.Callback) -> KerasEstimator:
        estimator = Estimator.from_keras(
            model_creator=creator_with_vector, model_dir=model_dir, checkpoints=saves, spark=spark
        )
        history = estimator.fit(
            data,
            batch_size=1,
            feature_cols=FEATURES,
            label_cols=["click"],
            validation_data=data,
            validation_steps=10,
            callbacks=callbacks,
            verbose=2,
        )
        histories.append(history)
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
    # Half of the rows are clicks, and nothing is predicted above 1.
    assert histories[0]["precision"] == [[0.5, 0.0]]
    [line] = [line for line in lines_at_validation if line.startswith("epoch 1/1: ")]
    found = re.match(r"epoch 1/1: ([\d.]+) s, ([\d,]+) samples/s, ", line)
    assert found is not None, line
    seconds, speed = float(found[1]), int(found[2].replace(",", ""))
    # As exact as the line's digits.
    assert (seconds - 0.06) * (speed - 1) <= rows - before <= (seconds + 0.06) * (speed + 1)
    [after] = [line for line in caplog.messages if "validated" in line]
    assert re.match(
        r"epoch 1/1: validated in [\d.]+ s, .*val_loss \d.*, val_precision \[0\.5000 0\.0000\]", after
    )
