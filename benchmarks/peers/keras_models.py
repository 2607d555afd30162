"""DLRM in Keras, with either embedding layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from benchmarks.peers.protocol import BOTTOM, TOP

L = keras.layers


@keras.saving.register_keras_serializable(package="benchmarks")
class Interaction(L.Layer):
    """Dot products of all pairs of vectors: [B, fields, dim] -> [B, fields * (fields - 1) / 2]."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        fields = int(shape[1] or 0)
        rows, columns = np.tril_indices(fields, -1)
        self._pairs = (rows * fields + columns).astype(np.int32)
        self._fields = fields

    def call(self, vectors: Any) -> Any:
        products = keras.ops.matmul(vectors, keras.ops.transpose(vectors, (0, 2, 1)))
        flat = keras.ops.reshape(products, (-1, self._fields * self._fields))
        return keras.ops.take(flat, self._pairs, axis=1)

    def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        fields = int(shape[1] or 0)
        return shape[0], fields * (fields - 1) // 2


def dlrm(fields: int, dim: int, embedding: Callable[[int], Any]) -> keras.Model:
    """The model; `embedding(i)` makes the layer of the i-th id column."""
    dense = keras.Input((13,), name="numbers")
    ids = [keras.Input((), dtype="int64", name=f"c{i}") for i in range(fields)]
    bottom = dense
    for width in (*BOTTOM, dim):
        bottom = L.Dense(width, activation="relu")(bottom)
    vectors = [embedding(i)(column) for i, column in enumerate(ids)]
    stacked = L.Concatenate(axis=1)([L.Reshape((1, dim))(vector) for vector in (bottom, *vectors)])
    top = L.Concatenate()([bottom, Interaction()(stacked)])
    for width in TOP:
        top = L.Dense(width, activation="relu")(top)
    return keras.Model([dense, *ids], L.Dense(1, name="label")(top))
