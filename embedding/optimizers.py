"""Optimizers of the engine; the same code updates embedding rows and flat dense vectors.

Formulas are those of Keras 3 where Keras has the optimizer. Embedding rows are updated lazily: a step touches
only the rows of its batch, slots and weight decay included, and Adam's bias correction follows the store's step
(TensorFlow's LazyAdam), not the number of updates of the row. Example:

    >>> Optimizer.from_dict(Adagrad(learning_rate=0.05).to_dict())
    Adagrad(learning_rate=0.05, initial_accumulator_value=0.1, epsilon=1e-07)
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from deeprec_spark.embedding._serial import Serializable


@dataclass(frozen=True)
class Optimizer(Serializable):
    """Base of all optimizers.

    Every parameter is a finite number (or a flag); `learning_rate` is the one in force where a step gives none.
    """

    learning_rate: float = 0.01

    _non_negative: ClassVar[tuple[str, ...]] = ("learning_rate",)
    _below_one: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool):
                continue
            if isinstance(value, (int, float)) and math.isfinite(value):
                object.__setattr__(self, field.name, float(value))
            else:
                raise ValueError(
                    f"{type(self).__name__}.{field.name} must be a finite number. Received: {field.name}={value!r}"
                )
            if field.name in self._non_negative and value < 0:
                raise ValueError(
                    f"{type(self).__name__}.{field.name} must be at least 0. Received: {field.name}={value!r}"
                )
            if field.name in self._below_one and not 0 <= value < 1:
                raise ValueError(
                    f"{type(self).__name__}.{field.name} must be within [0, 1). Received: {field.name}={value!r}"
                )

    def hyperparameters(self) -> dict[str, float]:
        """The parameters as numbers by name, flags as 0 or 1: what the engine's kernels read."""
        return {field.name: float(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def slot_names(self) -> tuple[str, ...]:
        """Names of the state vectors that every row carries, in storage order."""
        return ()

    def compatible_with(self, other: Optimizer) -> bool:
        """Whether state that `other` wrote goes on under this optimizer: all but the learning rate is equal."""
        return _without_rate(self) == _without_rate(other)


def _without_rate(optimizer: Optimizer) -> dict[str, Any]:
    data = optimizer.to_dict()
    del data["learning_rate"]
    return data


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent, with momentum and Nesterov's form on request; slot `momentum` if momentum > 0."""

    learning_rate: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    _below_one = ("momentum",)

    def slot_names(self) -> tuple[str, ...]:
        """`momentum` where there is any."""
        return ("momentum",) if self.momentum else ()


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad; slot `accumulator`."""

    learning_rate: float = 0.001
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    _non_negative = ("learning_rate", "initial_accumulator_value", "epsilon")

    def slot_names(self) -> tuple[str, ...]:
        """`accumulator`."""
        return ("accumulator",)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, bias correction by the step; slots `m` and `v`."""

    learning_rate: float = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    _non_negative = ("learning_rate", "epsilon")
    _below_one = ("beta_1", "beta_2")

    def slot_names(self) -> tuple[str, ...]:
        """`m` and `v`."""
        return ("m", "v")


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, on the rows of the step only; slots `m` and `v`."""

    learning_rate: float = 0.001
    weight_decay: float = 0.004
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    _non_negative = ("learning_rate", "weight_decay", "epsilon")
    _below_one = ("beta_1", "beta_2")

    def slot_names(self) -> tuple[str, ...]:
        """`m` and `v`."""
        return ("m", "v")


@dataclass(frozen=True)
class AdamAsync(Optimizer):
    """DeepRec's AdamAsync: the beta powers advance with the updates of this table; slots `m` and `v`.

    With `apply_sparse_rmsprop` rows take `v = beta2 v + (1 - beta2) g^2; m = beta1 m + lr g / sqrt(v + epsilon);
    w -= m`, without bias correction; dense vectors keep the Adam form, as in DeepRec.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    apply_sparse_rmsprop: bool = False

    _non_negative = ("learning_rate", "epsilon")
    _below_one = ("beta1", "beta2")

    def slot_names(self) -> tuple[str, ...]:
        """`m` and `v`."""
        return ("m", "v")


@dataclass(frozen=True)
class Ftrl(Optimizer):
    """Follow the regularized leader; slots `accumulator` and `linear`."""

    learning_rate: float = 0.001
    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0

    _non_negative = (
        "learning_rate",
        "initial_accumulator_value",
        "l1_regularization_strength",
        "l2_regularization_strength",
        "l2_shrinkage_regularization_strength",
        "beta",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate_power > 0:
            raise ValueError(
                "Ftrl.learning_rate_power must be at most 0. "
                f"Received: learning_rate_power={self.learning_rate_power!r}"
            )

    def slot_names(self) -> tuple[str, ...]:
        """`accumulator` and `linear`."""
        return ("accumulator", "linear")


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop; slot `velocity`, and `momentum` and `average_gradient` where asked for."""

    learning_rate: float = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    _non_negative = ("learning_rate", "epsilon")
    _below_one = ("rho", "momentum")

    def slot_names(self) -> tuple[str, ...]:
        """`velocity`, then `momentum` if momentum > 0, then `average_gradient` if centered."""
        names = ["velocity"]
        if self.momentum:
            names.append("momentum")
        if self.centered:
            names.append("average_gradient")
        return tuple(names)
