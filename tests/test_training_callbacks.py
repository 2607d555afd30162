"""Keras callbacks on the driver."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from deeprec_spark.training.callbacks import CallbackHost

# Keras' own callbacks read its variables in a way that numpy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def model(rate: Any = 0.1) -> keras.Model:
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    made.compile(keras.optimizers.SGD(rate), "mse")
    return made


def drive(host: CallbackHost, losses: list[float], steps: int = 4) -> int:
    """Epochs with these validation losses; returns how many ran."""
    host.train_begin()
    ran = 0
    for epoch, loss in enumerate(losses):
        host.epoch_begin(epoch)
        host.progress(steps // 2, {"loss": loss})
        host.progress(steps, {"loss": loss})
        ran += 1
        if host.epoch_end(epoch, {"loss": loss, "val_loss": loss}):
            break
    host.train_end()
    return ran


def test_hooks_come_in_the_order_of_fit() -> None:
    seen: list[tuple[Any, ...]] = []

    class Spy(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            seen.append(("begin", self.params["epochs"], self.params["steps"], self.model.name))

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(("epoch", epoch))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(("batch", batch, logs["loss"]))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(("end", epoch, logs))

        def on_train_end(self, logs: Any = None) -> None:
            seen.append(("done", logs["val_loss"]))

    made = model()
    host = CallbackHost(made, [Spy()], epochs=1, steps=4)
    drive(host, [0.5])
    assert seen == [
        ("begin", 1, 4, made.name),
        ("epoch", 0),
        ("batch", 1, 0.5),
        ("batch", 3, 0.5),
        ("end", 0, {"loss": 0.5, "val_loss": 0.5}),
        ("done", 0.5),
    ]
    assert host.history == {"loss": [0.5], "val_loss": [0.5]}
    assert int(made.optimizer.iterations) == 4


def test_early_stopping_goes_back_to_the_best_epoch_with_its_tables() -> None:
    kept: list[str] = []
    stopper = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    host = CallbackHost(
        model(),
        [stopper],
        epochs=9,
        save_best=lambda: kept.append("save"),
        restore_best=lambda: kept.append("restore"),
        pull_weights=lambda: kept.append("pull"),
    )
    assert drive(host, [0.5, 0.3, 0.4, 0.6, 0.1]) == 4
    assert kept == ["pull", "save", "pull", "save", "pull", "pull", "restore", "pull"]


def test_nothing_is_restored_when_the_last_epoch_is_the_best() -> None:
    kept: list[str] = []
    stopper = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    host = CallbackHost(
        model(),
        [stopper],
        epochs=2,
        save_best=lambda: kept.append("s"),
        restore_best=lambda: kept.append("r"),
    )
    assert drive(host, [0.5, 0.3]) == 2
    assert kept == ["s", "s"]


def test_early_stopping_that_cannot_go_back_says_so(caplog: pytest.LogCaptureFixture) -> None:
    stopper = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    made = model()

    def pull() -> None:
        made.set_weights([np.ones((1, 1)), np.ones(1)])

    host = CallbackHost(made, [stopper], epochs=9, pull_weights=pull)
    with caplog.at_level(logging.WARNING):
        drive(host, [0.3, 0.4, 0.5])
    assert "cannot go back" in caplog.text
    assert made.get_weights()[0] == 1  # the store's weights, not a mixture of epochs


def test_learning_rates_are_read_back() -> None:
    host = CallbackHost(
        model(0.1), [keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))], epochs=3
    )
    rates = []
    host.train_begin()
    for epoch in range(3):
        host.epoch_begin(epoch)
        rates.append(host.learning_rate)
        host.epoch_end(epoch, {"loss": 1.0})
    assert rates[0] is None  # as compiled
    assert rates[1:] == pytest.approx([0.05, 0.1 / 3])

    # Workers keep what they were told last: going back to the compiled rate must be told.
    back = CallbackHost(
        model(0.5),
        [keras.callbacks.LearningRateScheduler(lambda epoch: 1.0 if epoch == 0 else 0.5)],
        epochs=2,
    )
    back.train_begin()
    back.epoch_begin(0)
    assert back.learning_rate == pytest.approx(1.0)
    back.epoch_end(0, {"loss": 1.0})
    back.epoch_begin(1)
    assert back.learning_rate == pytest.approx(0.5)

    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0)
    lowered = CallbackHost(model(0.1), [plateau], epochs=4)
    drive(lowered, [1.0, 1.0, 1.0, 1.0])
    assert lowered.learning_rate is not None
    assert lowered.learning_rate < 0.1

    scheduled = CallbackHost(model(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)), [], epochs=1)
    drive(scheduled, [1.0])
    assert scheduled.learning_rate is None


def test_a_batch_hook_can_stop() -> None:
    host = CallbackHost(model(), [keras.callbacks.TerminateOnNaN()], epochs=2)
    host.train_begin()
    host.epoch_begin(0)
    assert not host.progress(1, {"loss": 0.1})
    assert host.progress(2, {"loss": float("nan")})


def test_files_of_csv_logger_and_tensorboard(tmp_path: Path) -> None:
    board = keras.callbacks.TensorBoard(str(tmp_path / "board"), update_freq=1)
    host = CallbackHost(model(), [keras.callbacks.CSVLogger(str(tmp_path / "log.csv")), board], epochs=2)
    drive(host, [0.5, 0.25])
    with (tmp_path / "log.csv").open() as file:
        assert [row["val_loss"] for row in csv.DictReader(file)] == ["0.5", "0.25"]
    assert list((tmp_path / "board" / "train").glob("events*"))
    assert list((tmp_path / "board" / "validation").glob("events*"))


def test_lambda_callbacks() -> None:
    epochs: list[int] = []
    host = CallbackHost(
        model(),
        [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))],
        epochs=2,
    )
    drive(host, [1.0, 1.0])
    assert epochs == [0, 1]


@pytest.mark.parametrize(
    ("callback", "error"),
    [
        (lambda: keras.callbacks.ModelCheckpoint("x.keras"), "ModelCheckpoint saves or swaps"),
        (lambda: keras.callbacks.BackupAndRestore("x"), "BackupAndRestore saves or swaps"),
        (lambda: print, r"must be keras.callbacks.Callback objects"),
    ],
)
def test_callbacks_that_cannot_work(callback: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        CallbackHost(model(), [callback()])


def test_going_back_takes_back_what_callbacks_counted_and_the_rate() -> None:
    """Epochs 2 and 3 are trained again after a failure: patience and the rate are those of the end of epoch 1."""
    stopper = keras.callbacks.EarlyStopping("val_loss", patience=3)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0)
    made = model(0.1)
    host = CallbackHost(made, [stopper, plateau], epochs=9)
    host.train_begin()
    host.go_on({}, range(0), None)
    losses = [1.0, 0.5, 0.6, 0.7]

    def run(epochs: range) -> list[bool]:
        stops = []
        for epoch in epochs:
            host.epoch_begin(epoch)
            stops.append(host.epoch_end(epoch, {"val_loss": losses[epoch]}))
        return stops

    assert run(range(4)) == [False] * 4
    history = {"val_loss": losses[:2]}
    assert (stopper.wait, stopper.best, host.learning_rate) == (2, 0.5, pytest.approx(0.025))
    host.go_on(history, range(2), None)
    assert (stopper.wait, stopper.best, host.learning_rate) == (0, 0.5, pytest.approx(0.1))
    assert host.history == history
    assert run(range(2, 4)) == [False, False]
    assert (stopper.wait, host.learning_rate) == (2, pytest.approx(0.025))
    host.go_on(history, range(2), 0.01)
    assert host.learning_rate == pytest.approx(0.01)
