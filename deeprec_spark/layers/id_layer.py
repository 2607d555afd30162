"""What layers that look ids up have in common: the shapes they give, the masks, and what they refuse."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from deeprec_spark.layers.bags import COMBINERS

Tensor = Any


class IdLayer(keras.layers.Layer):
    """A layer from integer ids `[B]`, `[B, …, L]` or ragged `[B, (L)]` to vectors.

    Args:
        embedding_dim: width of a vector.
        combiner: None, or one of COMBINERS over the last axis of the ids.
        padding_value: ids equal to it contribute nothing; without a combiner they are masked. None: every id counts.

    Raises:
        ValueError: there is no such combiner.
    """

    def __init__(
        self, embedding_dim: int, combiner: str | None, padding_value: int | None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if combiner is not None and combiner not in COMBINERS:
            raise ValueError(f"combiner must be None or one of {COMBINERS}. Received: combiner={combiner!r}")
        self.embedding_dim = embedding_dim
        self.combiner = combiner
        self.padding_value = padding_value
        self.supports_masking = True
        self.supports_jit = False

    def compute_mask(self, ids: Tensor, previous_mask: Tensor | None = None) -> Tensor | None:
        """Which places hold an id: bool like the ids, for padded ids without a combiner; otherwise None."""
        if self.combiner is not None or self.padding_value is None or isinstance(ids, tf.RaggedTensor):
            return None
        if len(ids.shape) < 2:
            return None
        return keras.ops.not_equal(ids, self.padding_value)

    def compute_output_shape(
        self, ids_shape: tuple[int | None, ...], weights_shape: tuple[int | None, ...] | None = None
    ) -> tuple[int | None, ...]:
        """`[B, …, dim]`, without the last axis of the ids where there is a combiner."""
        outer = tuple(ids_shape)
        if self.combiner is not None and len(outer) > 1:
            outer = outer[:-1]
        return (*outer, self.embedding_dim)

    def compute_output_spec(self, ids: Any, weights: Any = None) -> keras.KerasTensor:
        """The symbolic output; ragged where the ids are ragged and not combined."""
        ragged = bool(getattr(ids, "ragged", False)) and self.combiner is None
        return keras.KerasTensor(
            self.compute_output_shape(ids.shape), dtype=self.compute_dtype, ragged=ragged
        )


def check_ids(ids: Tensor, weights: Tensor | None, *, where: str) -> None:
    """A TypeError or ValueError that names the layer unless these can be looked up."""
    if ids.dtype == tf.string:
        raise TypeError(
            f"{where} takes integer ids: hash strings first (FeatureSpec raw_type='string', or "
            "tf.bitcast(tf.fingerprint(x), tf.int64)). Received: ids of dtype string"
        )
    if not ids.dtype.is_integer:
        raise TypeError(
            f"{where} takes integer ids: a float cannot hold every int64. Declare the input as keras.Input(shape, "
            "dtype='int64'), in a Sequential model as its first element. "
            f"Received: ids of dtype {ids.dtype.name}"
        )
    if isinstance(ids, tf.RaggedTensor) and (ids.ragged_rank != 1 or ids.flat_values.shape.rank != 1):
        raise ValueError(f"{where} takes ragged ids [B, (L)]. Received: ragged ids of shape {ids.shape}")
    if not isinstance(ids, tf.RaggedTensor) and ids.shape.rank in (None, 0):
        raise ValueError(f"{where} takes ids [B] or [B, …, L]. Received: ids of shape {ids.shape}")
    if weights is None:
        return
    if isinstance(weights, tf.RaggedTensor) != isinstance(ids, tf.RaggedTensor):
        raise ValueError(
            f"{where}: ids and weights must both be ragged or both be dense. "
            f"Received: ids {type(ids).__name__}, weights {type(weights).__name__}"
        )
    if not ids.shape.is_compatible_with(weights.shape):
        raise ValueError(
            f"{where}: weights must have the shape of ids. Received: ids {ids.shape}, weights {weights.shape}"
        )
