"""Metrics merge exactly, and an undefined one says so."""

from __future__ import annotations

import logging
import math

import keras
import numpy as np
import pytest

from deeprec_spark.training import metrics


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((1,)), keras.layers.Activation("linear", name="score")])
    made.compile(
        "sgd",
        "mse",
        metrics=[
            keras.metrics.AUC(name="auc"),
            keras.metrics.Recall(name="recall"),
            "mae",
            keras.metrics.R2Score(),
        ],
    )
    return made


def feed(to: keras.Model, scores: np.ndarray, labels: np.ndarray) -> None:
    to._loss_tracker.update_state(np.mean((scores - labels) ** 2), sample_weight=len(scores))
    to.compute_metrics(None, labels[:, None], scores[:, None])


def test_states_of_workers_merge_to_those_of_one() -> None:
    random = np.random.default_rng(1)
    scores, labels = random.random(300).astype(np.float32), (random.random(300) < 0.3).astype(np.float32)
    alone, parts = model(), []
    feed(alone, scores, labels)
    for piece in (slice(0, 170), slice(170, 180), slice(180, 300)):
        worker = model()
        feed(worker, scores[piece], labels[piece])
        parts.append(metrics.states(worker))
    merged = model()
    feed(merged, scores[:2], labels[:2])  # what it had does not matter
    metrics.load(merged, metrics.merge(parts))
    expected = metrics.results(alone)
    assert set(expected) == {"loss", "auc", "recall", "mae", "r2_score"}
    assert metrics.results(merged) == pytest.approx(expected, rel=1e-6)


def test_counts_beyond_what_float32_adds_up() -> None:
    big = [np.array(2.0**24, np.float32)]
    assert metrics.merge([big, [np.array(1.0, np.float32)], [np.array(1.0, np.float32)]])[0] == 2**24 + 2
    assert metrics.merge([[np.array([1, 2])], [np.array([3, 4])]])[0].tolist() == [4, 6]
    assert metrics.merge([]) == []


def test_workers_must_agree() -> None:
    with pytest.raises(ValueError, match="disagree on the metrics"):
        metrics.merge([[np.zeros(2)], [np.zeros(3)]])
    made = model()
    feed(made, np.zeros(2, np.float32), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"1 states, expected"):
        metrics.load(made, [np.zeros(1)])


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auc_of_one_class_is_nan_with_a_warning(label: float, caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    feed(made, np.array([0.2, 0.8], np.float32), np.full(2, label, np.float32))
    with caplog.at_level(logging.WARNING):
        found = metrics.results(made)
    assert math.isnan(found["auc"])
    assert "auc is undefined" in caplog.text
    assert found["mae"] == pytest.approx(0.5)
    feed(made, np.array([0.2, 0.9], np.float32), np.array([0, 1], np.float32))
    assert 0 <= metrics.results(made)["auc"] <= 1  # defined again with both classes
