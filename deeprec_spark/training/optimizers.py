"""The optimizer and learning rate that `model.compile` names, for the store that applies them."""

from __future__ import annotations

import logging
from typing import Any

import keras

from deeprec_spark.embedding import optimizers as engine

logger = logging.getLogger(__name__)

_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")
SUPPORTED = ("SGD", "Adagrad", "Adam", "AdamW", "Ftrl", "RMSprop")


def from_keras(optimizer: Any) -> engine.Optimizer:
    """The engine optimizer with the formula and parameters of a Keras one; an engine optimizer passes as it is.

    Gradient clipping stays with the traced step (`Clipping`), schedules with `LearningRate`.

    Raises:
        ValueError: an optimizer, or an option of it, that the store cannot apply.

    Example:
        >>> from_keras(keras.optimizers.Adagrad(0.05))
        Adagrad(learning_rate=0.05, initial_accumulator_value=0.1, epsilon=1e-07)
    """
    if isinstance(optimizer, engine.Optimizer):
        return optimizer
    kind = type(optimizer)
    known = {cls.__name__: cls for cls in (getattr(keras.optimizers, name) for name in SUPPORTED)}
    if known.get(kind.__name__) is not kind:
        raise ValueError(
            "The embedding store updates parameters itself and knows these optimizers: keras.optimizers."
            f"{', '.join(SUPPORTED)}, and those of deeprec_spark.embedding.optimizers for tables (sparse_optimizer). "
            f"Received: optimizer={getattr(optimizer, 'name', optimizer)!r} of {kind.__name__}"
        )
    _refuse_options(optimizer)
    rate = _initial_rate(optimizer)
    if kind is keras.optimizers.SGD:
        return engine.SGD(rate, momentum=optimizer.momentum, nesterov=optimizer.nesterov)
    if kind is keras.optimizers.Adagrad:
        return engine.Adagrad(rate, optimizer.initial_accumulator_value, optimizer.epsilon)
    if kind is keras.optimizers.Adam:
        return engine.Adam(rate, optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
    if kind is keras.optimizers.AdamW:
        return engine.AdamW(
            rate, optimizer.weight_decay or 0.0, optimizer.beta_1, optimizer.beta_2, optimizer.epsilon
        )
    if kind is keras.optimizers.Ftrl:
        return engine.Ftrl(
            rate,
            learning_rate_power=optimizer.learning_rate_power,
            initial_accumulator_value=optimizer.initial_accumulator_value,
            l1_regularization_strength=optimizer.l1_regularization_strength,
            l2_regularization_strength=optimizer.l2_regularization_strength,
            l2_shrinkage_regularization_strength=optimizer.l2_shrinkage_regularization_strength,
            beta=optimizer.beta,
        )
    return engine.RMSprop(
        rate, optimizer.rho, optimizer.momentum or 0.0, optimizer.epsilon, optimizer.centered
    )


class Clipping:
    """The gradient clipping of a Keras optimizer, applied to whole gradients before they are pushed."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __bool__(self) -> bool:
        return any(getattr(self._optimizer, name, None) for name in _CLIPPING)

    def apply(self, gradients: list[Any]) -> list[Any]:
        """Clip one gradient for each variable, exactly as Keras does."""
        return list(self._optimizer._clip_gradients(gradients))


def warn_of_clipping(optimizer: Any, sync_workers: int) -> None:
    """Log a warning if a Keras optimizer clips, and each step is the mean of several workers' gradients.

    Each worker clips its own gradient, before the mean: this is not what one worker with the whole batch does.
    """
    found = {name: getattr(optimizer, name, None) for name in _CLIPPING}
    named = ", ".join(f"{name}={value}" for name, value in found.items() if value)
    if sync_workers > 1 and named:
        logger.warning(
            "The optimizer clips the gradient of each of %d synchronous workers, and a step is the mean of what is "
            "left: not the same as one worker that clips the gradient of the whole batch. Where that matters, train "
            "with num_workers=1, or clip what the workers have in sum: rows of tables by sparse_optimizer, with a "
            "clipnorm or clipvalue of its own. Received: %s",
            sync_workers,
            named,
        )


class LearningRate:
    """The learning rate of each step: a constant, a Keras schedule, or what a callback set last.

    `value(step)` is None while nothing departs from the optimizer's own rate, so that the store keeps using it.
    """

    def __init__(self, optimizer: Any) -> None:
        rate = getattr(optimizer, "_learning_rate", None)
        self._schedule = rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None
        self._override: float | None = None

    def set(self, value: float) -> None:
        """Use `value` from the next step on."""
        if self._schedule is not None:
            raise ValueError(
                "The optimizer follows a learning-rate schedule, which a callback cannot overrule; compile the model "
                f"with a number as learning_rate. Received: learning_rate={value!r}"
            )
        if not value >= 0:
            raise ValueError(f"The learning rate must be at least 0. Received: learning_rate={value!r}")
        self._override = float(value)

    def value(self, step: int) -> float | None:
        """The rate of the update after `step` updates."""
        if self._schedule is not None:
            return float(keras.ops.convert_to_numpy(self._schedule(step)))
        return self._override


def _initial_rate(optimizer: Any) -> float:
    schedule = getattr(optimizer, "_learning_rate", None)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return float(keras.ops.convert_to_numpy(schedule(0)))
    # The variable holds float32; 0.1 must not become 0.10000000149.
    return float(str(optimizer.learning_rate.numpy()))


def _refuse_options(optimizer: Any) -> None:
    decays = type(optimizer) is keras.optimizers.AdamW
    options = {
        "weight_decay": None if decays else optimizer.weight_decay,
        "use_ema": optimizer.use_ema,
        "gradient_accumulation_steps": optimizer.gradient_accumulation_steps,
        "loss_scale_factor": optimizer.loss_scale_factor,
        "amsgrad": getattr(optimizer, "amsgrad", False),
        "exclude_from_weight_decay": getattr(optimizer, "_exclude_from_weight_decay", None)
        or getattr(optimizer, "_exclude_from_weight_decay_pattern", None),
    }
    refused = {name: value for name, value in options.items() if value}
    if refused:
        raise ValueError(
            "The embedding store cannot apply these options of the optimizer; for weight decay use "
            f"keras.optimizers.AdamW. Received: {type(optimizer).__name__} with {refused}"
        )
