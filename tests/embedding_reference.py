"""Independent references for the engine: optimizers in float64 numpy, the key mixer in Python integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from deeprec_spark.embedding.optimizers import (
    SGD,
    Adagrad,
    AdagradDecay,
    Adam,
    AdamAsync,
    AdamW,
    Ftrl,
    Momentum,
    Optimizer,
    RMSprop,
    RowwiseAdagrad,
)

Array = npt.NDArray[np.float64]
MASK = 2**64 - 1


def mix64(key: int) -> int:
    """SplitMix64's finalizer, in Python integers."""
    x = key & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class ReferenceOptimizer:
    """One variable (a row or a vector) in float64; `update` takes the step's number from 1."""

    def __init__(self, optimizer: Optimizer, start: npt.ArrayLike) -> None:
        self.optimizer = optimizer
        self.value: Array = np.asarray(start, np.float64).copy()
        first = getattr(optimizer, "initial_accumulator_value", 0.0)
        self.slots: dict[str, Array] = {
            name: np.full_like(self.value, first if name == "accumulator" else 0.0)
            for name in optimizer.slot_names()
        }
        for name in self.slots:
            if isinstance(optimizer, RowwiseAdagrad) or name == "decay_epoch":
                self.slots[name] = self.slots[name][:1]

    def update(
        self, gradient: npt.ArrayLike, step: int, *, sparse: bool = True, lr: float | None = None
    ) -> None:
        rate = self.optimizer.learning_rate if lr is None else lr
        rule = _RULES[type(self.optimizer)]
        array = np.asarray(gradient, np.float64)
        if self.optimizer.clipvalue:
            array = np.clip(array, -self.optimizer.clipvalue, self.optimizer.clipvalue)
        if self.optimizer.clipnorm:
            array = array * min(1.0, self.optimizer.clipnorm / np.linalg.norm(array))
        rule(self.optimizer, self, array, step, rate, sparse)


def _sgd(o: Any, s: ReferenceOptimizer, g: Array, step: int, lr: float, sparse: bool) -> None:
    if not o.momentum:
        s.value -= lr * g
        return
    m = s.slots["momentum"]
    m[:] = o.momentum * m - lr * g
    s.value += o.momentum * m - lr * g if o.nesterov else m


def _adagrad(o: Any, s: ReferenceOptimizer, g: Array, step: int, lr: float, sparse: bool) -> None:
    s.slots["accumulator"] += g * g
    s.value -= lr * g / np.sqrt(s.slots["accumulator"] + o.epsilon)


def _rowwise_adagrad(o: Any, s: ReferenceOptimizer, g: Array, step: int, lr: float, sparse: bool) -> None:
    s.slots["accumulator"] += (g * g).mean()
    s.value -= lr * g / np.sqrt(s.slots["accumulator"] + o.epsilon)


def _adagrad_decay(o: Any, s: ReferenceOptimizer, g: Array, step: int, lr: float, sparse: bool) -> None:
    acc, epoch = s.slots["accumulator"], s.slots["decay_epoch"]
    while epoch[0] < step // o.accumulator_decay_step:
        acc[:] = np.maximum(acc * o.accumulator_decay_rate, o.initial_accumulator_value)
        epoch += 1
    _adagrad(o, s, g, step, lr, sparse)


def _momentum(o: Any, s: ReferenceOptimizer, g: Array, step: int, lr: float, sparse: bool) -> None:
    m = s.slots["momentum"]
    m[:] = o.momentum * m + g
    s.value -= lr * (g + o.momentum * m if o.use_nesterov else m)


def _adam_with(b1: float, b2: float, eps: float, s: ReferenceOptimizer, g: Array, t: int, lr: float) -> None:
    m, v = s.slots["m"], s.slots["v"]
    m[:] = b1 * m + (1 - b1) * g
    v[:] = b2 * v + (1 - b2) * g * g
    s.value -= lr * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + eps)


def _adam(o: Any, s: ReferenceOptimizer, g: Array, step: int, lr: float, sparse: bool) -> None:
    _adam_with(o.beta_1, o.beta_2, o.epsilon, s, g, step, lr)


def _adamw(o: Any, s: ReferenceOptimizer, g: Array, step: int, lr: float, sparse: bool) -> None:
    s.value *= 1 - lr * o.weight_decay
    _adam(o, s, g, step, lr, sparse)


def _adam_async(o: Any, s: ReferenceOptimizer, g: Array, step: int, lr: float, sparse: bool) -> None:
    if not (o.apply_sparse_rmsprop and sparse):
        _adam_with(o.beta1, o.beta2, o.epsilon, s, g, step, lr)
        return
    m, v = s.slots["m"], s.slots["v"]
    v[:] = o.beta2 * v + (1 - o.beta2) * g * g
    m[:] = o.beta1 * m + lr * g / np.sqrt(v + o.epsilon)
    s.value -= m


def _ftrl(o: Any, s: ReferenceOptimizer, g: Array, step: int, lr: float, sparse: bool) -> None:
    acc, linear = s.slots["accumulator"], s.slots["linear"]
    power = -o.learning_rate_power
    shrunk = g + 2 * o.l2_shrinkage_regularization_strength * s.value
    grown = acc + g * g
    linear += shrunk - (grown**power - acc**power) / lr * s.value
    l2 = o.l2_regularization_strength + o.beta / (2 * lr)
    l1 = o.l1_regularization_strength
    s.value[:] = (np.clip(linear, -l1, l1) - linear) / (grown**power / lr + 2 * l2)
    acc[:] = grown


def _rmsprop(o: Any, s: ReferenceOptimizer, g: Array, step: int, lr: float, sparse: bool) -> None:
    v = s.slots["velocity"]
    v[:] = o.rho * v + (1 - o.rho) * g * g
    spread = v
    if o.centered:
        mean = s.slots["average_gradient"]
        mean[:] = o.rho * mean + (1 - o.rho) * g
        spread = v - mean * mean
    change = lr * g / np.sqrt(spread + o.epsilon)
    if o.momentum:
        s.slots["momentum"][:] = o.momentum * s.slots["momentum"] + change
        change = s.slots["momentum"]
    s.value -= change


_RULES: dict[type[Optimizer], Callable[..., None]] = {
    SGD: _sgd,
    Adagrad: _adagrad,
    RowwiseAdagrad: _rowwise_adagrad,
    AdagradDecay: _adagrad_decay,
    Momentum: _momentum,
    Adam: _adam,
    AdamW: _adamw,
    AdamAsync: _adam_async,
    Ftrl: _ftrl,
    RMSprop: _rmsprop,
}
