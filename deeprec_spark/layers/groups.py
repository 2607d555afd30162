"""ExpandGroups: from one value for each group to one for each of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

Tensor = Any


@keras.saving.register_keras_serializable(package="deeprec_spark")
class ExpandGroups(keras.layers.Layer):
    """Repeats what was computed once for each group, for each sample of the group.

    A model with this layer is trained on grouped data as they are: its group-level inputs are `[groups, …]`, the others
    `[samples, …]`. Any other model gets them flat. On flat data each sample is a group of its own, and the layer
    changes nothing. `keras.ops.take(values, index, axis=0)` does the same; the gradient of this layer is faster.

    Call arguments:
        inputs: `[values, index]`: `[groups, …]`, and integers `[samples]`, the group of each sample: the input of the
            name `FeatureSpec.grouping.index`.

    Returns:
        `[samples, …]`.

    Example:
        >>> index = keras.Input((), dtype="int32", name=spec.grouping.index)
        >>> user = ExpandGroups()([user_tower(user_inputs), index])
        >>> ExpandGroups()([np.array([[1.0], [2.0]]), np.array([0, 0, 1])]).numpy().tolist()
        [[1.0], [1.0], [2.0]]
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Gather; the gradient is the sum over each group."""
        values, index = map(tf.convert_to_tensor, inputs)
        return _gather_rows(values, index) if values.dtype.is_floating else tf.gather(values, index)

    def compute_mask(self, inputs: Sequence[Tensor], previous_mask: Any = None) -> Tensor | None:
        """The mask of the values, for each sample."""
        mask = None if previous_mask is None else previous_mask[0]
        return None if mask is None else keras.ops.take(mask, inputs[1], axis=0)

    def compute_output_shape(self, input_shape: Sequence[tuple[int | None, ...]]) -> tuple[int | None, ...]:
        """`[samples, …]`."""
        values, index = input_shape
        return (index[0], *values[1:])

    def compute_output_spec(self, inputs: Sequence[Any]) -> keras.KerasTensor:
        """The symbolic output, of the type of the values."""
        shape = self.compute_output_shape([tensor.shape for tensor in inputs])
        return keras.KerasTensor(shape, dtype=inputs[0].dtype)


@tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow ships no types
def _gather_rows(values: Tensor, index: Tensor) -> tuple[Tensor, Any]:
    def gradient(upstream: Tensor) -> tuple[Tensor, None]:
        rows = tf.shape(values)[0]
        width = values.shape[1:].num_elements()
        flat = tf.reshape(upstream, [tf.size(index), -1 if width is None else width])
        summed = tf.math.unsorted_segment_sum(flat, index, rows)
        return tf.reshape(summed, tf.shape(values)), None

    return tf.gather(values, index), gradient
