"""The Trainer refuses what it cannot train, and says what is wrong; nothing is applied then."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.training.checks import NonFiniteError
from deeprec_spark.training.trainer import Trainer
from tests.trainers import DIM, IDS, L, batch, compiled, started, two_tasks, users
from tests.training_reference import table_rows


def test_a_nan_column_is_named_and_nothing_is_applied() -> None:
    model = compiled(two_tasks(SparseEmbedding(DIM, table="user")))
    trainer = started(model, batch(0))
    trainer.train_step(batch(0))
    before = table_rows(trainer.store, "user", IDS)
    bad = batch(1)
    bad.features["price"][3] = np.nan
    with pytest.raises(NonFiniteError, match=r"training at step 1: columns .*\['price'\].*loss=nan"):
        trainer.train_step(bad)
    with pytest.raises(NonFiniteError, match=r"evaluation at step 1"):
        trainer.evaluate_step(bad)
    np.testing.assert_array_equal(table_rows(trainer.store, "user", IDS), before)


def test_an_output_that_overflows_is_named() -> None:
    user = keras.Input((), dtype="int64", name="user")
    vector = SparseEmbedding(DIM, table="user")(user)
    click = L.Dense(1, name="click")(vector)
    spend = L.Lambda(lambda x: keras.ops.exp(1000.0 + x), name="spend")(click)
    model = keras.Model(user, [click, spend])
    model.compile("sgd", "mse")
    labels = {"click": np.ones(2, np.float32), "spend": np.ones(2, np.float32)}
    trainer = started(model, Batch({"user": np.array([1, 2])}, labels))
    with pytest.raises(NonFiniteError, match=r"outputs that are not finite: \['spend'\]"):
        trainer.train_step(Batch({"user": np.array([1, 2])}, labels))


@pytest.mark.parametrize("step", ["train_step", "evaluate_step"])
def test_labels_and_weights_of_another_shape_are_named(step: str) -> None:
    """A loss would broadcast them: `[3, 1]` against two outputs is a number, and not the one that was meant."""
    user = keras.Input((), dtype="int64", name="user")
    model = keras.Model(user, L.Dense(2, name="out")(SparseEmbedding(DIM, table="user")(user)))
    model.compile("sgd", "mse")
    ids = {"user": np.array([1, 2, 3])}
    trainer = started(model, Batch(ids, {"label": np.ones((3, 2), np.float32)}))
    take = getattr(trainer, step)
    for shape in ((3, 1), (3,), (3, 2, 1)):
        with pytest.raises(
            ValueError, match=rf"Label 'label' .*\['samples', 2\].*shape {re.escape(str(list(shape)))}"
        ):
            take(Batch(ids, {"label": np.ones(shape, np.float32)}))
    with pytest.raises(ValueError, match=r"one for each sample\. Received: shape \[3, 1\]"):
        take(Batch(ids, {"label": np.ones((3, 2), np.float32)}, np.ones((3, 1), np.float32)))
    assert trainer.step == 0


def test_lookups_inside_of_control_flow_are_refused() -> None:
    class Branching(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = SparseEmbedding(DIM, name="user")
            self.out = L.Dense(1)

        def call(self, ids: Any) -> Any:
            return self.out(
                tf.cond(tf.reduce_sum(ids) > 0, lambda: self.embed(ids), lambda: self.embed(ids + 1))
            )

    model = Branching()
    model.compile("sgd", "mse")
    trainer = started(model, users([1]))
    with pytest.raises(ValueError, match=r"'user' is called inside of tf.cond"):
        trainer.train_step(users([1]))


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return {}


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (lambda: keras.Sequential([L.Dense(1)]), "must be compiled"),
        (OwnStep, "train_step of the model's own"),
        (lambda: "model", "must be a keras.Model"),
    ],
)
def test_models_that_cannot_be_trained(model: Any, error: str) -> None:
    made = model()
    if isinstance(made, OwnStep):
        made.compile("sgd", "mse")
    with pytest.raises((TypeError, ValueError), match=error):
        Trainer(made, LocalStore())


def test_a_model_without_a_table() -> None:
    model = keras.Sequential([keras.Input((1,), name="price"), L.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="no SparseEmbedding"):
        started(model, Batch({"price": np.ones(2, np.float32)}, {"label": np.ones(2, np.float32)}))
