"""Flatten the ids of a layer call to one list, and bring the rows back into shape.

ids [B]                    -> n = B               rows [B, dim]
ids [B, L]                 -> n = B * L           rows [B, L, dim], or [B, dim] combined
ids [B, L], padding_value  -> n = valid ids only  the same shapes; padded places are zeros
ids ragged [B, (L)]        -> n = all values      ragged [B, (L), dim], or [B, dim] combined
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

Tensor = Any
COMBINERS = ("sum", "mean", "sqrtn")


class Bags:
    """The ids of one call as a flat int64 `values` `[n]`, with what is needed to undo it.

    Args:
        ids: integer tensor `[B]` or `[B, ..., L]`, or a RaggedTensor `[B, (L)]`.
        weights: None, or float of the same shape as `ids`.
        padding_value: ids equal to it contribute nothing; None means that every id counts.
    """

    def __init__(self, ids: Tensor, weights: Tensor | None, padding_value: int | None) -> None:
        self.ragged = isinstance(ids, tf.RaggedTensor)
        if self.ragged and padding_value is not None:
            keep = tf.not_equal(ids, tf.constant(padding_value, ids.dtype))
            weights = None if weights is None else tf.ragged.boolean_mask(weights, keep)
            ids = tf.ragged.boolean_mask(ids, keep)
        self.ids = ids
        self.positions: Tensor | None = None
        if self.ragged:
            values = ids.flat_values
            weights = None if weights is None else weights.flat_values
        else:
            values = tf.reshape(ids, [-1])
            weights = None if weights is None else tf.reshape(weights, [-1])
            if padding_value is not None:
                valid = tf.not_equal(values, tf.constant(padding_value, values.dtype))
                self.positions = tf.where(valid)[:, 0]
                values = tf.gather(values, self.positions)
                weights = None if weights is None else tf.gather(weights, self.positions)
        self.values = tf.cast(values, tf.int64)
        self.weights = weights

    def restore(self, rows: Tensor) -> Tensor:
        """Rows `[n, dim]` in the shape of the ids, weighted; padded places hold zeros."""
        if self.weights is not None:
            rows = rows * self.weights[:, tf.newaxis]
        if self.ragged:
            return self.ids.with_flat_values(rows)
        width = rows.shape[-1]  # scatter_nd with a computed shape forgets it
        if self.positions is not None:
            total = tf.size(self.ids, tf.int64)
            shape = tf.stack([total, tf.constant(width, tf.int64)])
            rows = tf.scatter_nd(self.positions[:, tf.newaxis], rows, shape)
        inner = list(self.ids.shape[1:])
        if None not in inner and 0 not in inner:
            # The rows tell how many ids there are, so that the ids themselves need not reach the step.
            return rows if not inner else tf.reshape(rows, [-1, *inner, width])
        result = tf.reshape(rows, tf.concat([tf.shape(self.ids), [width]], 0))
        result.set_shape([*self.ids.shape, width])
        return result

    def combine(self, rows: Tensor, combiner: str) -> Tensor:
        """Rows `[n, dim]` summed over the last axis of the ids; a bag without ids is zeros, never NaN."""
        weighted = rows if self.weights is None else rows * self.weights[:, tf.newaxis]
        total = self._sum(weighted)
        if combiner == "sum":
            return total
        weights = tf.ones(tf.shape(rows)[:1], rows.dtype) if self.weights is None else self.weights
        if combiner == "mean":
            return tf.math.divide_no_nan(total, self._sum(weights[:, tf.newaxis]))
        return tf.math.divide_no_nan(total, tf.sqrt(self._sum(tf.square(weights)[:, tf.newaxis])))

    def _sum(self, values: Tensor) -> Tensor:
        """Sum `[n, k]` over each bag: `[B, ..., k]`."""
        width = values.shape[-1]
        if self.ragged:
            return tf.math.unsorted_segment_sum(values, self.ids.value_rowids(), self.ids.nrows())
        shape = tf.shape(self.ids)
        single = self.ids.shape.rank == 1
        outer = shape if single else shape[:-1]
        static_outer = list(self.ids.shape) if single else list(self.ids.shape[:-1])
        if self.positions is None and None not in self.ids.shape[1:] and 0 not in self.ids.shape[1:]:
            if single:
                return values
            return tf.reduce_sum(tf.reshape(values, [-1, *self.ids.shape[1:], width]), axis=-2)
        if self.positions is None:
            # Each bag has as many ids as the last axis is long, so the sum needs no segment numbers.
            length = tf.constant([1], tf.int32) if single else shape[-1:]
            result = tf.reduce_sum(tf.reshape(values, tf.concat([outer, length, [width]], 0)), axis=-2)
        else:
            length = tf.constant(1, tf.int64) if single else tf.cast(shape[-1], tf.int64)
            bags = tf.reduce_prod(outer)
            result = tf.math.unsorted_segment_sum(values, self.positions // tf.maximum(length, 1), bags)
            result = tf.reshape(result, tf.concat([outer, [width]], 0))
        result.set_shape([*static_outer, width])
        return result
