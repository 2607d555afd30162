"""A dense stand-in for SparseEmbedding, to compare training with Keras' own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from deeprec_spark.embedding.store import EmbeddingStore, PullRequest, UniqueKeys


class DenseTable(keras.layers.Layer):
    """The reference: a Keras weight [ids, dim], looked up by a one-hot product. Shares no code with the product."""

    def __init__(self, ids: int, dim: int, combiner: str | None = None, table: Any = None) -> None:
        super().__init__()
        self.ids = ids
        self.combiner = combiner
        self.table = self.add_weight(shape=(ids, dim)) if table is None else table

    def call(self, ids: Any, weights: Any = None) -> Any:
        hot = tf.one_hot(ids, self.ids)  # padding, -1, is a row of zeros
        if weights is not None:
            hot *= weights[..., None]
        if self.combiner is None:
            return hot @ self.table.value
        total = tf.reduce_sum(hot, -2) @ self.table.value
        if self.combiner == "sum":
            return total
        mass = tf.reduce_sum(hot if self.combiner == "mean" else hot**2, [-1, -2])[:, None]
        return total / tf.where(mass == 0, 1.0, mass if self.combiner == "mean" else tf.sqrt(mass))


def table_rows(store: EmbeddingStore, table: str, ids: int) -> np.ndarray:
    """Rows float32 `[ids, dim]` of the ids 0, 1, …"""
    keys = np.arange(ids)
    request = PullRequest({table: UniqueKeys(keys, np.ones_like(keys))}, train=False, dense=False)
    return store.pull(request).rows[table]
