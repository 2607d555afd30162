"""The benchmark's models in Keras 2 or 3 over TensorFlow, with any embedding layer.

dlrm      bottom MLP, dots of all pairs of vectors, top MLP
wdl       a weight for each id and number, and an MLP over the embeddings
deepfm    a weight for each id, a factorization machine, and an MLP over the embeddings
bags      an MLP over the embeddings, most of them means of bags
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.peers.protocol import BAGS, BOTTOM, DEEP, TOP, Data

Embedding = Callable[[str, int, "str | None"], Any]
"""`embedding(name, dim, combiner)` makes the layer of one id column."""


def build(keras: Any, data: Data, embedding: Embedding, dots: Any = None) -> Any:
    """The model of this data, not compiled; its inputs are those of `features`, its output is a logit.

    Args:
        keras: the module of the Keras that is meant.
        data: tells the model and the columns.
        embedding: makes the layers of the id columns.
        dots: the layer of DLRM's dots of pairs, where the framework at work brings one; else plain TensorFlow.
    """
    if data.model == "dlrm":
        return _dlrm(keras, data, embedding, dots)
    return {"wdl": _wdl, "deepfm": _deepfm, "bags": _bags}[data.model](keras, data, embedding)


def features(data: Data, batch: int) -> dict[str, np.ndarray[Any, Any]]:
    """The model's inputs for one batch, by name."""
    columns = {f"c{i}": np.ascontiguousarray(data.ids[batch, :, i]) for i in range(data.singles)}
    columns |= {f"b{i}": np.ascontiguousarray(data.bags[batch, :, i]) for i in range(data.num_bags)}
    return columns if data.model == "bags" else {"numbers": data.dense[batch], **columns}


def _inputs(keras: Any, data: Data) -> tuple[Any, list[Any], list[Any]]:
    numbers = keras.Input((13,), name="numbers")
    ids = [keras.Input((), dtype="int64", name=f"c{i}") for i in range(data.singles)]
    bags = [keras.Input((data.bags.shape[-1],), dtype="int64", name=f"b{i}") for i in range(data.num_bags)]
    return numbers, ids, bags


def _mlp(keras: Any, x: Any, widths: Sequence[int]) -> Any:
    for width in widths:
        x = keras.layers.Dense(width, activation="relu")(x)
    return x


def _embed(embedding: Embedding, ids: Sequence[Any], bags: Sequence[Any], dim: int, prefix: str) -> list[Any]:
    vectors = [embedding(f"{prefix}c{i}", dim, None)(column) for i, column in enumerate(ids)]
    return vectors + [embedding(f"{prefix}b{i}", dim, "mean")(column) for i, column in enumerate(bags)]


def _dlrm(keras: Any, data: Data, embedding: Embedding, dots: Any) -> Any:
    layers = keras.layers
    numbers, ids, _ = _inputs(keras, data)
    bottom = _mlp(keras, numbers, (*BOTTOM, data.dim))
    vectors = [bottom, *_embed(embedding, ids, (), data.dim, "")]
    stacked = layers.Reshape((len(vectors), data.dim))(layers.Concatenate()(vectors))
    dots = dots or layers.Lambda(_dots, output_shape=(len(vectors) * (len(vectors) - 1) // 2,))
    top = _mlp(keras, layers.Concatenate()([bottom, dots(stacked)]), TOP)
    return keras.Model([numbers, *ids], layers.Dense(1, name="label")(top))


def _wdl(keras: Any, data: Data, embedding: Embedding) -> Any:
    layers = keras.layers
    numbers, ids, _ = _inputs(keras, data)
    wide = layers.Add()([layers.Dense(1)(numbers), *_embed(embedding, ids, (), 1, "wide_")])
    deep = _mlp(keras, layers.Concatenate()([numbers, *_embed(embedding, ids, (), data.dim, "")]), DEEP)
    return keras.Model([numbers, *ids], layers.Add(name="label")([wide, layers.Dense(1)(deep)]))


def _deepfm(keras: Any, data: Data, embedding: Embedding) -> Any:
    layers = keras.layers
    numbers, ids, _ = _inputs(keras, data)
    linear = layers.Add()([layers.Dense(1)(numbers), *_embed(embedding, ids, (), 1, "linear_")])
    vectors = layers.Concatenate()(_embed(embedding, ids, (), data.dim, ""))
    stacked = layers.Reshape((len(ids), data.dim))(vectors)
    machine = layers.Lambda(_factorization_machine, output_shape=(1,))(stacked)
    deep = _mlp(keras, layers.Concatenate()([numbers, vectors]), DEEP)
    return keras.Model([numbers, *ids], layers.Add(name="label")([linear, machine, layers.Dense(1)(deep)]))


def _bags(keras: Any, data: Data, embedding: Embedding) -> Any:
    layers = keras.layers
    _, ids, bags = _inputs(keras, data)
    deep = _mlp(keras, layers.Concatenate()(_embed(embedding, ids, bags, data.dim, "")), BAGS)
    return keras.Model([*ids, *bags], layers.Dense(1, name="label")(deep))


def _dots(vectors: Any) -> Any:
    """Dot products of all pairs: [B, fields, dim] -> [B, fields * (fields - 1) / 2]."""
    fields = int(vectors.shape[1])
    rows, columns = np.tril_indices(fields, -1)
    products = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), [-1, fields * fields])
    return tf.gather(products, (rows * fields + columns).astype(np.int32), axis=1)


def _factorization_machine(vectors: Any) -> Any:
    """The sum of the dots of all pairs: [B, fields, dim] -> [B, 1]."""
    square_of_sum = tf.square(tf.reduce_sum(vectors, axis=1))
    sum_of_squares = tf.reduce_sum(tf.square(vectors), axis=1)
    return 0.5 * tf.reduce_sum(square_of_sum - sum_of_squares, axis=1, keepdims=True)
