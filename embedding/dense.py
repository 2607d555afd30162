"""Flat dense parameters and the optimizer that updates them, with the engine's kernels."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

import deeprec_spark.embedding._core as _core
from deeprec_spark.embedding._serial import require
from deeprec_spark.embedding.optimizers import Optimizer, step_rate

Float32Array = npt.NDArray[np.float32]


def dense_range(total: int, shard_index: int, num_shards: int) -> tuple[int, int]:
    """The part [start, stop) of a flat vector of `total` elements that one of `num_shards` servers holds."""
    return total * shard_index // num_shards, total * (shard_index + 1) // num_shards


def core_optimizer(optimizer: Optimizer) -> _core.Optimizer:
    """The engine's form of an optimizer; a ValueError names what is none."""
    require(
        isinstance(optimizer, Optimizer),
        "optimizer must be one of embedding.optimizers, such as Adagrad(0.05).",
        optimizer=optimizer,
    )
    return _core.Optimizer(type(optimizer).__name__, optimizer.hyperparameters())


class DenseVector:
    """One flat float32 vector with its optimizer state; safe to use from several threads.

    Args:
        values: float32 `[n]`; copied.
        optimizer: updates the vector; its step counter is the number of calls of `apply`.

    Example:
        >>> from deeprec_spark.embedding.optimizers import SGD
        >>> vector = DenseVector(np.ones(2, np.float32), SGD(learning_rate=0.5))
        >>> vector.apply(np.ones(2, np.float32))
        >>> vector.values.tolist()
        [0.5, 0.5]
    """

    def __init__(self, values: npt.ArrayLike, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._core = core_optimizer(optimizer)
        if not self._core.has_dense or optimizer.clipnorm or optimizer.clipvalue:
            raise ValueError(
                "A flat dense vector takes an optimizer without row-wise state, and no clipping: clip the whole "
                f"gradient before it is cut. Received: {optimizer}"
            )
        self._values = _flat(values, "values").copy()
        self._slots = {
            name: np.full(self._values.shape, start, np.float32) for name, start in self._core.slots.items()
        }
        self._updates = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> Float32Array:
        """A copy of the parameters: float32 `[n]`."""
        with self._lock:
            return self._values.copy()

    @property
    def updates(self) -> int:
        """How often `apply` ran."""
        return self._updates

    def apply(self, gradient: npt.ArrayLike, learning_rate: float | None = None) -> None:
        """Update the vector by one gradient, float32 `[n]`.

        Args:
            gradient: as long as the vector; a ValueError names both lengths otherwise.
            learning_rate: for this update; None takes the optimizer's.
        """
        array = _flat(gradient, "gradient")
        if len(array) != len(self._values):
            raise ValueError(
                "The gradient must be as long as the dense vector. "
                f"Received: gradient of {len(array)}, vector of {len(self._values)}"
            )
        rate = step_rate(learning_rate)
        with self._lock:
            step = self._updates + 1
            self._core.apply_dense(self._values, list(self._slots.values()), array, step, step, rate)
            self._updates = step

    def state(self) -> tuple[Float32Array, dict[str, Float32Array], int]:
        """A consistent copy of values, slots by name, and the number of updates."""
        with self._lock:
            return (
                self._values.copy(),
                {name: slot.copy() for name, slot in self._slots.items()},
                self._updates,
            )

    def restore(self, values: npt.ArrayLike, slots: Mapping[str, npt.ArrayLike], updates: int) -> None:
        """Take over what `state` gave; a ValueError names slots or lengths that do not fit."""
        if set(slots) != set(self._slots):
            raise ValueError(
                f"The dense optimizer {type(self.optimizer).__name__} has slots {sorted(self._slots)}. "
                f"Received: {sorted(slots)}"
            )
        fresh = {
            "values": _flat(values, "values"),
            **{name: _flat(slot, name) for name, slot in slots.items()},
        }
        for name, array in fresh.items():
            if len(array) != len(self._values):
                raise ValueError(
                    f"Dense {name} must be as long as the dense vector. "
                    f"Received: {len(array)} elements, vector of {len(self._values)}"
                )
        with self._lock:
            self._values[:] = fresh["values"]
            for name, slot in self._slots.items():
                slot[:] = fresh[name]
            self._updates = updates


def _flat(values: npt.ArrayLike, name: str) -> Float32Array:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis. Received: shape={array.shape}")
    return np.ascontiguousarray(array, dtype=np.float32)
