"""The dense weights of a model as one flat float32 vector, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from deeprec_spark.training.buffers import aligned_empty

Float32Array = npt.NDArray[np.float32]


class FlatLayout:
    """Where each of some Keras variables lies in a flat vector: concatenated in order, row-major.

    Only float variables belong in one; counters and the states of seed generators stay where they are.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = list(variables)
        self.shapes = [tuple(int(side) for side in variable.shape) for variable in self.variables]
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes]
        self.size = sum(self.sizes)

    def pack(self) -> Float32Array:
        """The variables' values now: float32 `[size]`."""
        flat: Float32Array = aligned_empty((self.size,), np.float32)
        for target, variable in zip(self._parts(flat), self.variables, strict=True):
            target[...] = variable.numpy().reshape(-1)
        return flat

    def unpack(self, flat: Float32Array) -> None:
        """Set the variables from float32 `[size]`."""
        if flat.shape != (self.size,):
            raise ValueError(
                "The vector does not fit the model's weights; was it written for another model? "
                f"Received: shape {flat.shape}, expected ({self.size},)"
            )
        for part, shape, variable in zip(self._parts(flat), self.shapes, self.variables, strict=True):
            variable.assign(part.reshape(shape))

    def split(self, flat: Any) -> list[Any]:
        """Tensor `[size]` as one tensor for each variable, in its shape and dtype; differentiable."""
        if not self.variables:
            return []
        parts = tf.split(flat, self.sizes)
        return [
            tf.cast(tf.reshape(part, shape), variable.dtype)
            for part, shape, variable in zip(parts, self.shapes, self.variables, strict=True)
        ]

    def join(self, values: Sequence[Any]) -> Any:
        """The inverse of `split`: float32 `[size]`."""
        if not self.variables:
            return tf.zeros([0], tf.float32)
        return tf.concat([tf.reshape(tf.cast(value, tf.float32), [-1]) for value in values], 0)

    def _parts(self, flat: Float32Array) -> list[Float32Array]:
        return np.split(flat, np.cumsum(self.sizes)[:-1]) if self.sizes else []


def trainable_layout(model: Any) -> FlatLayout:
    """The trainable float weights: what the store's optimizer updates."""
    return FlatLayout([variable for variable in model.trainable_weights if _is_float(variable)])


def state_layout(model: Any) -> FlatLayout:
    """The non-trainable float weights, such as moving averages: updated by differences."""
    return FlatLayout([variable for variable in model.non_trainable_weights if _is_float(variable)])


def _is_float(variable: Any) -> bool:
    return bool(tf.as_dtype(variable.dtype).is_floating)
