"""Training on the engine equals Keras' own training of a dense table, for every combiner and optimizer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.training.trainer import Trainer
from tests.training_reference import DenseTable, table_rows

L = keras.layers
IDS, DIM, LENGTH, PADDING = 6, 3, 5, -1


def data(seed: int, size: int = 24) -> Batch:
    """Every id occurs, with repeats, in every column, so that lazy and dense updates agree; some bags are empty."""
    random = np.random.default_rng(seed)
    single = random.permutation(np.arange(size) % IDS)
    lists = random.permutation(np.arange(size * LENGTH) % IDS).reshape(size, LENGTH)
    padded = np.where(random.random((size, LENGTH)) < 0.4, PADDING, lists)
    padded[:, 0] = single[::-1]
    padded[3] = padded[-1] = PADDING
    return Batch(
        {
            "single": single,
            "lists": lists,
            "padded": padded,
            "weights": random.uniform(0.2, 2.0, (size, LENGTH)).astype(np.float32),
        },
        {"label": (random.random(size) < 0.5).astype(np.float32)},
    )


COLUMNS: tuple[tuple[str, str | None, str, bool], ...] = (
    # table, combiner, column, weighted
    ("a", None, "single", False),
    ("b", "sum", "padded", False),
    ("c", "mean", "padded", True),
    ("d", "sqrtn", "padded", True),
    ("e", "mean", "lists", False),
    ("a", "sum", "padded", True),  # shares the first table
)


def model_with(make: Any) -> keras.Model:
    inputs = {
        "single": keras.Input((), dtype="int64", name="single"),
        "lists": keras.Input((LENGTH,), dtype="int64", name="lists"),
        "padded": keras.Input((LENGTH,), dtype="int64", name="padded"),
        "weights": keras.Input((LENGTH,), name="weights"),
    }
    vectors = []
    for table, combiner, column, weighted in COLUMNS:
        layer = make(table, combiner)
        extra = {"weights": inputs["weights"]} if weighted else {}
        vectors.append(layer(inputs[column], **extra))
    hidden = L.Dense(4, activation="tanh", name="hidden")(L.Concatenate()(vectors))
    return keras.Model(inputs, L.Dense(1, activation="sigmoid", name="out")(hidden))


def pair(optimizer: Any) -> tuple[Trainer, keras.Model, dict[str, Any]]:
    """A trainer and the Keras reference, with the same start."""
    keras.utils.set_random_seed(3)
    model = model_with(
        lambda table, combiner: SparseEmbedding(DIM, combiner, table=table, padding_value=PADDING)
    )
    model.compile(optimizer(), "binary_crossentropy")
    trainer = Trainer(model, LocalStore())
    trainer.initialize(data(0))
    tables: dict[str, Any] = {}

    def reference(table: str, combiner: str | None) -> DenseTable:
        layer = DenseTable(IDS, DIM, combiner, tables.get(table))
        tables[table] = layer.table
        return layer

    dense = model_with(reference)
    dense.compile(optimizer(), "binary_crossentropy")
    for table, variable in tables.items():
        variable.assign(table_rows(trainer.store, table, IDS))
    for name in ("hidden", "out"):
        dense.get_layer(name).set_weights(model.get_layer(name).get_weights())
    return trainer, dense, tables


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.3, momentum=0.9, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.2),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(
        0.2, l1_regularization_strength=0.001, l2_regularization_strength=0.01
    ),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.02, momentum=0.5, centered=True),
    "clipnorm": lambda: keras.optimizers.SGD(1.0, clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.SGD(1.0, clipvalue=0.002),
    "global_clipnorm": lambda: keras.optimizers.SGD(1.0, global_clipnorm=0.01),
    "schedule": lambda: keras.optimizers.Adagrad(keras.optimizers.schedules.ExponentialDecay(0.3, 1, 0.5)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_the_dense_reference(name: str) -> None:
    trainer, dense, tables = pair(OPTIMIZERS[name])
    for step in range(3):
        batch = data(step + 1)
        trainer.train_step(batch)
        dense.train_on_batch(dict(batch.features), batch.labels["label"])
        for table, variable in tables.items():
            np.testing.assert_allclose(
                table_rows(trainer.store, table, IDS),
                variable.numpy(),
                rtol=1e-6,
                atol=1e-6,
                err_msg=f"{table} {step}",
            )
    trainer.refresh()
    for layer in ("hidden", "out"):
        ours, theirs = trainer.model.get_layer(layer).get_weights(), dense.get_layer(layer).get_weights()
        for our, their in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(our, their, rtol=1e-6, atol=1e-6)
    assert trainer.step == 3


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("padding", [None, 1])
def test_bags_that_the_engine_sums_are_those_that_tensorflow_sums(combiner: str, padding: int | None) -> None:
    """Weights of one make TensorFlow combine: of ids with three axes, with one, and of ids that the model computes."""
    random = np.random.default_rng(5)
    batch = Batch(
        {"ids": random.integers(0, 9, (16, 6)), "one": random.integers(0, 9, 16)},
        {"label": random.normal(size=16).astype(np.float32)},
    )

    def trained(*, weighted: bool) -> list[np.ndarray[Any, Any]]:
        keras.utils.set_random_seed(3)
        ids, one = keras.Input((6,), dtype="int64", name="ids"), keras.Input((), dtype="int64", name="one")
        vectors = []
        for name, given in (
            ("shaped", L.Reshape((2, 3))(ids)),
            ("computed", keras.ops.mod(ids + 3, 9)),
            ("one", one),
        ):
            layer = SparseEmbedding(DIM, combiner, table=name, padding_value=padding)
            ones = {"weights": keras.ops.ones_like(given, dtype="float32")} if weighted else {}
            vectors.append(L.Flatten()(layer(given, **ones)))
        model = keras.Model([ids, one], L.Dense(1)(L.Concatenate()(vectors)))
        model.compile(keras.optimizers.Adagrad(0.3), "mse")
        store = LocalStore()
        trainer = Trainer(model, store)
        trainer.initialize(batch)
        for _ in range(3):
            trainer.train_step(batch)
        rows = [store.table(name).lookup(np.arange(9)) for name in ("shaped", "computed", "one")]
        return [*rows, trainer.predict_step(batch)[trainer.output_names[0]]]

    for found, expected in zip(trained(weighted=False), trained(weighted=True), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
