"""Models, batches and trainers for tests of the Trainer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.training.trainer import Trainer, TrainerOptions

L = keras.layers
IDS, DIM = 8, 4


def two_tasks(embedding: Any) -> keras.Model:
    """Two outputs, a regulariser, moving averages."""
    user = keras.Input((), dtype="int64", name="user")
    price = keras.Input((1,), name="price")
    hidden = L.Concatenate()([embedding(user), price])
    hidden = L.BatchNormalization(name="norm")(L.Dense(4, kernel_regularizer="l2", name="hidden")(hidden))
    click = L.Dense(1, activation="sigmoid", name="click")(hidden)
    spend = L.Dense(1, name="spend")(hidden)
    return keras.Model([user, price], [click, spend])


def compiled(model: keras.Model) -> keras.Model:
    model.compile(
        keras.optimizers.SGD(0.1),
        loss={"click": "binary_crossentropy", "spend": keras.losses.Huber()},
        loss_weights={"click": 1.0, "spend": 0.3},
        metrics={"click": [keras.metrics.AUC(name="auc")], "spend": ["mae"]},
        weighted_metrics={"click": ["accuracy"]},
    )
    return model


def batch(seed: int, size: int = 32, weighted: bool = False) -> Batch:
    random = np.random.default_rng(seed)
    return Batch(
        {"user": random.permutation(np.arange(size) % IDS), "price": random.random(size).astype(np.float32)},
        {
            "click": (random.random(size) < 0.4).astype(np.float32),
            "spend": random.normal(0, 2, size).astype(np.float32),
        },
        random.uniform(0.1, 3, size).astype(np.float32) if weighted else None,
    )


def single(optimizer: Any = "sgd", loss: str = "mse", **compile_arguments: Any) -> keras.Model:
    """One table, one output `out`."""
    model = keras.Sequential(
        [
            keras.Input((), dtype="int64", name="user"),
            SparseEmbedding(DIM, table="user"),
            L.Dense(1, name="out"),
        ]
    )
    model.compile(optimizer, loss, **compile_arguments)
    return model


def users(ids: list[int], labels: list[float] | None = None) -> Batch:
    return Batch(
        {"user": np.array(ids, np.int64)},
        {"label": np.array([1.0] * len(ids) if labels is None else labels, np.float32)},
    )


def started(model: keras.Model, sample: Batch, **options: Any) -> Trainer:
    trainer = Trainer(model, LocalStore(), TrainerOptions(**options))
    trainer.initialize(sample)
    return trainer
