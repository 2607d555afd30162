"""A model, batches and a trainer for tests of StepPipeline."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np

from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.options import CounterFilter, EmbeddingVariableOption
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.training.trainer import Trainer, TrainerOptions

L = keras.layers
IDS, STEPS = 12, 7


def model(dropout: float = 0.3) -> keras.Model:
    """Two columns of ids, one of them computed with, moving averages, dropout, a filter."""
    user = keras.Input((), dtype="int64", name="user")
    item = keras.Input((2,), dtype="int64", name="item")
    price = keras.Input((1,), name="price")
    filtered = EmbeddingVariableOption(filter_option=CounterFilter(2))
    x = L.Concatenate()(
        [
            SparseEmbedding(4, table="user")(user),
            SparseEmbedding(4, "mean", table="item", ev_option=filtered)(item),
            SparseEmbedding(4, table="cross")(user * 3 + 1),
            price,
        ]
    )
    x = L.BatchNormalization()(L.Dense(8)(x))
    x = L.Dropout(dropout, seed=3)(x) if dropout else x
    made = keras.Model([user, item, price], L.Dense(1, activation="sigmoid", name="click")(x))
    made.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return made


def batches(count: int = STEPS, size: int = 16) -> list[Batch]:
    random = np.random.default_rng(5)
    return [
        Batch(
            {
                "user": random.integers(0, IDS, size),
                "item": random.integers(0, IDS, (size, 2)),
                "price": random.random((size, 1)).astype(np.float32),
            },
            {"click": (random.random(size) < 0.5).astype(np.float32)},
        )
        for _ in range(count)
    ]


def trainer(dropout: float = 0.3) -> Trainer:
    keras.utils.set_random_seed(11)
    made = Trainer(model(dropout), LocalStore(), TrainerOptions(seed=11))
    made.initialize(batches()[0])
    return made


def state(made: Trainer) -> list[np.ndarray]:
    """Everything that training changed."""
    store = made.store
    assert isinstance(store, LocalStore)
    rows = [store.table(name).lookup(np.arange(3 * IDS + 2)) for name in ("user", "item", "cross")]
    counts = [next(store.table(name).export(100)).frequency for name in ("user", "cross")]
    _, dense, moving = made.pull_dense()
    return [*rows, *counts, dense, moving, *made.metric_states(), np.array(made.step)]


def tagged(data: list[Batch]) -> Iterator[tuple[Batch, int]]:
    for number, batch in enumerate(data):
        yield batch, number
