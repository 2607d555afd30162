"""Interactions of feature vectors: factorization machine, pairwise dots, attention of a target over a history."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

Tensor = Any


@keras.saving.register_keras_serializable("deeprec_spark")
class FactorizationMachine(keras.layers.Layer):
    """The sum of the dots of all pairs: `[batch, fields, dim]` → `[batch, 1]`, in O(fields * dim)."""

    def call(self, inputs: Tensor) -> Tensor:
        """Half of (square of the sum - sum of the squares), summed over the dimensions."""
        square_of_sum = ops.square(ops.sum(inputs, axis=1))
        sum_of_squares = ops.sum(ops.square(inputs), axis=1)
        return 0.5 * ops.sum(square_of_sum - sum_of_squares, axis=-1, keepdims=True)


@keras.saving.register_keras_serializable("deeprec_spark")
class DotInteraction(keras.layers.Layer):
    """The dot of each pair: `[batch, fields, dim]` → `[batch, fields * (fields - 1) / 2]`, by rows."""

    def call(self, inputs: Tensor) -> Tensor:
        """All dots by one matrix product, then the ones below its diagonal."""
        return _dots(inputs)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """`[batch, pairs]`."""
        batch, fields, _ = input_shape
        if fields is None:
            raise ValueError(f"The number of fields must be known. Received: input_shape={input_shape}")
        return batch, fields * (fields - 1) // 2


@keras.saving.register_keras_serializable("deeprec_spark")
class TargetAttention(keras.layers.Layer):
    """DIN's local activation unit: how much each item of a history says about the target.

    Called with `[target [batch, dim], history [batch, length, dim], ids [batch, length]]`, returns `[batch, dim]`, the
    weighted sum of the history. Ids equal to `padding_value` weigh nothing, so an empty history gives zeros.

    Args:
        units: Widths of the hidden layers that score (target, item, difference, product).
        normalize: Softmax over the history; the paper's default is off, which keeps the strength of interest.
    """

    def __init__(
        self,
        units: tuple[int, ...] = (36,),
        *,
        padding_value: int = -1,
        normalize: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.units = tuple(units)
        self.padding_value = padding_value
        self.normalize = normalize
        self._hidden = [
            keras.layers.Dense(width, activation="sigmoid", name=f"hidden_{index}")
            for index, width in enumerate(self.units)
        ]
        self._score = keras.layers.Dense(1, name="score")
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        """Make the scoring layers for the history's width."""
        _, length, dim = input_shape[1]
        shape: tuple[int | None, ...] = (None, length, 4 * dim)
        for layer in (*self._hidden, self._score):
            layer.build(shape)
            shape = layer.compute_output_shape(shape)
        self.built = True

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """`[batch, dim]`, the target's shape."""
        return tuple(input_shape[0])

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> None:
        """No mask: the padding ends here."""

    def call(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Score each item against the target, drop the padding, sum."""
        target, history, ids = inputs
        target = ops.broadcast_to(ops.expand_dims(target, 1), ops.shape(history))
        x = ops.concatenate([target, history, target - history, target * history], axis=-1)
        for layer in self._hidden:
            x = layer(x)
        scores = ops.squeeze(self._score(x), -1)
        real = ops.not_equal(ids, self.padding_value)
        if self.normalize:
            scores = ops.softmax(ops.where(real, scores, -1e9), axis=-1)
        weights = ops.where(real, scores, ops.zeros_like(scores))
        return ops.sum(history * ops.expand_dims(weights, -1), axis=1)

    def get_config(self) -> dict[str, Any]:
        """The arguments, for saving."""
        return {
            **super().get_config(),
            "units": self.units,
            "padding_value": self.padding_value,
            "normalize": self.normalize,
        }


def _dots(vectors: Tensor) -> Tensor:
    """`DotInteraction`, with a gradient that picks as its forward pass does.

    TensorFlow's own gradient of picking columns is a scatter, twice as slow as the product itself. Columns are picked
    as rows of the transpose, which are contiguous.
    """
    fields = vectors.shape[1]
    rows, columns = np.tril_indices(fields, -1)
    pairs = len(rows)
    below = rows * fields + columns
    # Where each product of two fields is among the pairs; that of a field and itself is nowhere: the row of zeros.
    places = np.full((fields, fields), pairs)
    places[rows, columns] = places[columns, rows] = np.arange(pairs)

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def dots(vectors: Tensor) -> tuple[Tensor, Any]:
        products = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), [-1, fields * fields])

        def gradient(upstream: Tensor) -> Tensor:
            padded = tf.pad(tf.transpose(upstream), [[0, 1], [0, 0]])
            both = tf.transpose(tf.gather(padded, places.reshape(-1)))
            return tf.matmul(tf.reshape(both, [-1, fields, fields]), vectors)

        return tf.transpose(tf.gather(tf.transpose(products), below)), gradient

    return tf.ensure_shape(dots(vectors), [vectors.shape[0], pairs])
