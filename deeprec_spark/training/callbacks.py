"""Keras callbacks on the driver, around training that happens elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from deeprec_spark.training.callback_state import CallbackStates

logger = logging.getLogger(__name__)

_SAVING = ("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint", "SwapEMAWeights")


class CallbackHost:
    """Calls Keras callbacks at the places where `model.fit` would, with the driver's copy of the model.

    Batch hooks run at progress reports, not at every batch: `batch` is the number of the last step that was reported.
    Callbacks see the dense weights (`pull_weights` brings them before each `on_epoch_end`), may set
    `model.stop_training` and `model.optimizer.learning_rate`, and cannot change weights: those live in the store.

    `EarlyStopping(restore_best_weights=True)` rolls tables and dense weights back together: `save_best` is called after
    each epoch that is the best so far, `restore_best` at the end if a later epoch was trained. Without these two the
    last epoch's parameters stay, and the log says so.

    Args:
        model: the driver's copy of the model, compiled.
        callbacks: Keras callbacks.
        epochs, steps: of the fit; `steps` in each epoch, None if not known.
        pull_weights: brings the store's dense weights into `model`.
        save_best: keeps a copy of all parameters as they are after this epoch.
        restore_best: goes back to what `save_best` kept last.

    Example:
        >>> host = CallbackHost(model, [keras.callbacks.EarlyStopping("val_auc", mode="max")], epochs=9)
        >>> host.train_begin()
        >>> for epoch in range(9):
        ...     host.epoch_begin(epoch)
        ...     logs = train(epoch, on_progress=host.progress)
        ...     if host.epoch_end(epoch, logs):
        ...         break
        >>> host.train_end()
    """

    def __init__(
        self,
        model: Any,
        callbacks: Sequence[Any] = (),
        *,
        epochs: int = 1,
        steps: int | None = None,
        pull_weights: Callable[[], object] | None = None,
        save_best: Callable[[], object] | None = None,
        restore_best: Callable[[], object] | None = None,
    ) -> None:
        for callback in callbacks:
            _check_callback(callback)
        self._model = model
        self._callbacks = keras.callbacks.CallbackList(
            list(callbacks),
            add_history=True,
            add_progbar=False,
            model=model,
            epochs=epochs,
            steps=steps,
            verbose=0,
        )
        self._has_callbacks = bool(callbacks)
        self._states = CallbackStates(callbacks)
        self._stoppers = [
            callback
            for callback in callbacks
            if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights
        ]
        self._pull_weights = pull_weights
        self._save_best, self._restore_best = save_best, restore_best
        self._best_epoch: int | None = None
        self._last_epoch: int | None = None
        self._last_logs: dict[str, float] = {}
        self._steps_before = 0
        self._steps_of_epoch = 0
        self._initial_rate = self._current_rate()
        self._rate_was_set = False

    @property
    def history(self) -> dict[str, list[float]]:
        """One number for each finished epoch, by metric: Keras' `History.history`."""
        return dict(self._model.history.history)

    @property
    def stop_requested(self) -> bool:
        """Whether a callback has set `model.stop_training`."""
        return bool(self._model.stop_training)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate that a callback has set; None while none has set one, or a schedule decides."""
        rate = self._current_rate()
        # Workers keep what they were told last, so going back to the compiled rate must be told too.
        self._rate_was_set = self._rate_was_set or rate != self._initial_rate
        return rate if self._rate_was_set else None

    def train_begin(self) -> None:
        """Before the first epoch."""
        self._model.stop_training = False
        if self._stoppers and (self._save_best is None or self._restore_best is None):
            logger.warning(
                "EarlyStopping(restore_best_weights=True) stops training but cannot go back to the best epoch here: "
                "parameters stay those of the last epoch"
            )
        self._callbacks.on_train_begin()

    def go_on(
        self, history: Mapping[str, Sequence[float]], epochs: range, learning_rate: float | None
    ) -> None:
        """These epochs are behind, with this history; later ones are forgotten, for they are trained again.

        Callbacks get back what they had counted then, and the model the learning rate: None is the compiled one.
        """
        record = self._model.history
        record.epoch = list(epochs)
        record.history = {name: list(values) for name, values in history.items()}
        self._states.go_back(epochs.stop)
        self._states.remember(epochs.stop)
        self._model.stop_training = False
        rate = self._initial_rate if learning_rate is None else learning_rate
        if rate is not None and rate != self._current_rate():
            self._model.optimizer.learning_rate = rate

    def epoch_begin(self, epoch: int) -> None:
        """Before each epoch; callbacks may set the learning rate here."""
        self._steps_of_epoch = 0
        self._callbacks.on_epoch_begin(epoch)

    def progress(self, step: int, logs: Mapping[str, float]) -> bool:
        """At a progress report: `step` steps of this epoch are done. Returns whether to stop."""
        if step > self._steps_of_epoch:
            self._steps_of_epoch = step
            self._advance()
            self._callbacks.on_train_batch_begin(step - 1)
            self._callbacks.on_train_batch_end(step - 1, dict(logs))
        return self.stop_requested

    def epoch_end(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """After each epoch and its validation (`val_…` in `logs`). Returns whether to stop."""
        if self._has_callbacks and self._pull_weights is not None:
            self._pull_weights()
        self._steps_before += self._steps_of_epoch
        self._steps_of_epoch = 0
        self._last_epoch, self._last_logs = epoch, dict(logs)
        self._callbacks.on_epoch_end(epoch, self._last_logs)
        self._states.remember(epoch + 1)
        for stopper in self._stoppers:
            if (
                self._save_best is not None
                and stopper.best_weights is not None
                and stopper.best_epoch == epoch
            ):
                self._best_epoch = epoch
                self._save_best()
        return self.stop_requested

    def train_end(self) -> None:
        """After the last epoch; goes back to the best one where a callback asks for it."""
        self._callbacks.on_train_end(self._last_logs)
        if not self._stoppers:
            return
        if self._restore_best is not None and self._best_epoch not in (None, self._last_epoch):
            self._restore_best()
        if self._pull_weights is not None:
            # EarlyStopping has put its own copy of the dense weights into the model, which may not fit the tables.
            self._pull_weights()

    def _advance(self) -> None:
        optimizer = self._model.optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer.iterations.assign(self._steps_before + self._steps_of_epoch)

    def _current_rate(self) -> float | None:
        optimizer = self._model.optimizer
        schedule = getattr(optimizer, "_learning_rate", None)
        if optimizer is None or isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            return None
        return float(optimizer.learning_rate.numpy())


def _check_callback(callback: Any) -> None:
    if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError(f"callbacks must be keras.callbacks.Callback objects. Received: {callback!r}")
    if any(cls.__name__ in _SAVING and cls.__module__.startswith("keras.") for cls in type(callback).__mro__):
        raise ValueError(
            f"{type(callback).__name__} saves or swaps the Keras model, which does not hold the tables. Give the "
            "Estimator a model_dir: it writes whole checkpoints there. "
            f"Received: callbacks with {type(callback).__name__}"
        )
