"""Keras optimizers become the engine's, or say why not."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from deeprec_spark.embedding import optimizers as engine
from deeprec_spark.training.optimizers import Clipping, LearningRate, from_keras, warn_of_clipping


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (keras.optimizers.SGD(0.3, momentum=0.9, nesterov=True), engine.SGD(0.3, 0.9, True)),
        (keras.optimizers.Adagrad(0.1, 0.2, 1e-5), engine.Adagrad(0.1, 0.2, 1e-5)),
        (keras.optimizers.Adam(0.01, 0.8, 0.99, 1e-6), engine.Adam(0.01, 0.8, 0.99, 1e-6)),
        (keras.optimizers.AdamW(0.01, 0.2, 0.8, 0.99, 1e-6), engine.AdamW(0.01, 0.2, 0.8, 0.99, 1e-6)),
        (
            keras.optimizers.Ftrl(0.1, -0.4, 0.2, 0.01, 0.02, 0.03, beta=0.5),
            engine.Ftrl(0.1, -0.4, 0.2, 0.01, 0.02, 0.03, 0.5),
        ),
        (keras.optimizers.RMSprop(0.1, 0.8, 0.7, 1e-6, True), engine.RMSprop(0.1, 0.8, 0.7, 1e-6, True)),
        (engine.AdamAsync(0.1), engine.AdamAsync(0.1)),
    ],
)
def test_parameters_are_carried_over(optimizer: Any, expected: engine.Optimizer) -> None:
    assert from_keras(optimizer) == expected


def test_a_schedule_starts_at_its_first_rate() -> None:
    schedule = keras.optimizers.schedules.PolynomialDecay(0.5, 10, 0.1)
    assert from_keras(keras.optimizers.SGD(schedule)).learning_rate == pytest.approx(0.5)
    rate = LearningRate(keras.optimizers.SGD(schedule))
    assert [rate.value(step) for step in (0, 5, 10)] == pytest.approx([0.5, 0.3, 0.1])
    with pytest.raises(ValueError, match="follows a learning-rate schedule"):
        rate.set(0.1)


def test_a_rate_departs_only_when_set() -> None:
    rate = LearningRate(keras.optimizers.SGD(0.5))
    assert rate.value(3) is None
    rate.set(0.25)
    assert rate.value(4) == 0.25
    with pytest.raises(ValueError, match="at least 0"):
        rate.set(float("nan"))


class Own(keras.optimizers.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "error"),
    [
        (keras.optimizers.Lion(), "SGD, Adagrad, Adam, AdamW, Ftrl, RMSprop.*Lion"),
        (Own(), "Own"),
        (keras.optimizers.Adam(amsgrad=True), "amsgrad"),
        (keras.optimizers.SGD(weight_decay=0.1), "weight_decay"),
        (keras.optimizers.Adam(use_ema=True), "use_ema"),
        (keras.optimizers.Adam(gradient_accumulation_steps=4), "gradient_accumulation_steps"),
        (keras.optimizers.Adam(loss_scale_factor=8.0), "loss_scale_factor"),
    ],
)
def test_what_the_store_cannot_apply(optimizer: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        from_keras(optimizer)


def test_weight_decay_for_some_variables_only() -> None:
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    with pytest.raises(ValueError, match="exclude_from_weight_decay"):
        from_keras(optimizer)


@pytest.mark.parametrize("setting", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_by_several_synchronous_workers_is_warned_of(
    setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_clipping(keras.optimizers.SGD(**{setting: 0.5}), 1)
    warn_of_clipping(keras.optimizers.SGD(), 3)
    assert not caplog.records
    warn_of_clipping(keras.optimizers.SGD(**{setting: 0.5}), 3)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "of 3 synchronous workers" in record.getMessage()
    assert record.getMessage().endswith(f"Received: {setting}=0.5")


def test_clipping_is_on_only_where_asked_for() -> None:
    assert not Clipping(keras.optimizers.SGD())
    assert Clipping(keras.optimizers.SGD(global_clipnorm=1.0))
    clipped = Clipping(keras.optimizers.SGD(clipvalue=1.0)).apply([keras.ops.convert_to_tensor([3.0, -0.5])])
    assert clipped[0].numpy().tolist() == [1.0, -0.5]
