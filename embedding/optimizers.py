"""Optimizers of the engine; the same code updates embedding rows and flat dense vectors.

Formulas are those of Keras 3 where Keras has the optimizer. Embedding rows are updated lazily: a step touches
only the rows of its batch, slots and weight decay included, and Adam's bias correction follows the store's step
(TensorFlow's LazyAdam), not the number of updates of the row. Example:

    >>> Optimizer.from_dict(Adagrad(learning_rate=0.05).to_dict())
    Adagrad(learning_rate=0.05, initial_accumulator_value=0.1, epsilon=1e-07)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from deeprec_spark.embedding._serial import Serializable, number


@dataclass(frozen=True)
class Optimizer(Serializable):
    """Base of all optimizers.

    Every parameter is a finite number (or a flag); `learning_rate` is the one in force where a step gives none.
    On embedding rows, `clipvalue` bounds each element of a row's (summed) gradient, and then `clipnorm` the row's norm;
    0 is no clipping. Flat dense vectors are clipped by whoever holds the whole gradient, not here.
    """

    learning_rate: float = 0.01
    clipvalue: float = field(default=0.0, kw_only=True)
    clipnorm: float = field(default=0.0, kw_only=True)

    _non_negative: ClassVar[tuple[str, ...]] = ("learning_rate",)
    _below_one: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for parameter in dataclasses.fields(self):
            name, value = parameter.name, getattr(self, parameter.name)
            if isinstance(value, bool):
                continue
            try:
                value = number(name, value)
            except ValueError as error:
                raise ValueError(f"{type(self).__name__}.{error}") from None
            object.__setattr__(self, name, value)
            if name in (*self._non_negative, "clipvalue", "clipnorm") and value < 0:
                raise ValueError(
                    f"{type(self).__name__}.{name} must be at least 0. Received: {name}={value!r}"
                )
            if name in self._below_one and not 0 <= value < 1:
                raise ValueError(
                    f"{type(self).__name__}.{name} must be within [0, 1). Received: {name}={value!r}"
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


def step_rate(learning_rate: float | None, name: str = "learning_rate") -> float:
    """One step's learning rate as the engine takes it: NaN, its word for the optimizer's own, for None.

    A ValueError names one that is not a finite number of at least 0.
    """
    if learning_rate is None:
        return float("nan")
    rate = number(name, learning_rate)
    if rate < 0:
        raise ValueError(f"{name} must be at least 0. Received: {name}={learning_rate!r}")
    return rate


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
class RowwiseAdagrad(Optimizer):
    """Adagrad with one accumulator for a row, of the mean of its squared gradient; rows only."""

    learning_rate: float = 0.001
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    _non_negative = ("learning_rate", "initial_accumulator_value", "epsilon")

    def slot_names(self) -> tuple[str, ...]:
        """`accumulator`, one element."""
        return ("accumulator",)


@dataclass(frozen=True)
class AdagradDecay(Optimizer):
    """DeepRec's AdagradDecay: every `accumulator_decay_step` steps accumulators shrink by `accumulator_decay_rate`.

    They never fall below `initial_accumulator_value`. A row that missed periods makes up for them at its next update.
    Slots `accumulator` and `decay_epoch`.
    """

    learning_rate: float = 0.001
    initial_accumulator_value: float = 0.1
    accumulator_decay_step: int = 100000
    accumulator_decay_rate: float = 0.9
    epsilon: float = 1e-7

    _non_negative = ("learning_rate", "initial_accumulator_value", "epsilon")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulator_decay_step < 1 or not 0 <= self.accumulator_decay_rate <= 1:
            raise ValueError(
                "AdagradDecay needs accumulator_decay_step >= 1 and accumulator_decay_rate within [0, 1]. "
                f"Received: accumulator_decay_step={self.accumulator_decay_step!r}, "
                f"accumulator_decay_rate={self.accumulator_decay_rate!r}"
            )

    def slot_names(self) -> tuple[str, ...]:
        """`accumulator` and `decay_epoch`."""
        return ("accumulator", "decay_epoch")


@dataclass(frozen=True)
class Momentum(Optimizer):
    """TensorFlow's MomentumOptimizer: `m = momentum m + g; w -= lr m`; slot `momentum`.

    It differs from `SGD(momentum=…)` where the learning rate changes.
    """

    learning_rate: float = 0.01
    momentum: float = 0.9
    use_nesterov: bool = False

    _below_one = ("momentum",)

    def slot_names(self) -> tuple[str, ...]:
        """`momentum`."""
        return ("momentum",)


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
