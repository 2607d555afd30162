"""Models on grouped data: the same losses, updates and predictions as on flat data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark import models
from deeprec_spark.data import Batch, Groups
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.layers import ExpandGroups, SparseEmbedding
from deeprec_spark.training.trainer import Trainer, TrainerOptions

CATEGORICAL, SEQUENCE, DENSE = FeatureKind.CATEGORICAL, FeatureKind.SEQUENCE, FeatureKind.DENSE
FLAT = FeatureSpec(
    features=(
        Feature(name="age", kind=DENSE, raw_type="float32", group="user"),
        Feature(name="user", kind=CATEGORICAL, raw_type="int64", group="user"),
        Feature(name="seen", kind=SEQUENCE, raw_type="int64", max_length=3, table="items", group="user"),
        Feature(name="item", kind=CATEGORICAL, raw_type="int64", table="items", group="item"),
        Feature(name="city", kind=CATEGORICAL, raw_type="int64", group="user", embedding_dim=2),
        Feature(name="tags", kind=SEQUENCE, raw_type="int64", max_length=2, group="item"),
        Feature(name="price", kind=DENSE, raw_type="float32", group="item"),
    ),
    labels=(Label(name="click"),),
)
GROUPED = FLAT.grouped(["user"])
OPTIONS: dict[str, dict[str, Any]] = {
    "wdl": {"hidden_units": [8]},
    "deepfm": {"hidden_units": [8]},
    "dlrm": {"bottom_units": [8], "top_units": [8]},
    "dssm": {"user_units": [8, 4], "item_units": [4]},
    "din": {"hidden_units": [8], "attention_units": [4]},
    "mmoe": {"num_experts": 2, "expert_units": [8], "tower_units": [4]},
}


def grouped(seed: int, groups: int = 6) -> Batch:
    """Groups of 0 to 5 samples."""
    random = np.random.default_rng(seed)
    sizes = random.permutation(np.arange(groups) % 6).astype(np.int64)
    items = int(sizes.sum())

    def padded(rows: int, length: int) -> Any:
        return np.where(random.random((rows, length)) < 0.3, -1, random.integers(0, 9, (rows, length)))

    return Batch(
        {
            "age": random.random(groups).astype(np.float32),
            "user": random.integers(-4, 4, groups),
            "seen": padded(groups, 3),
            "item": random.integers(0, 9, items),
            "city": random.integers(0, 3, groups),
            "tags": padded(items, 2),
            "price": random.random(items).astype(np.float32),
        },
        {"click": (random.random(items) < 0.4).astype(np.float32)},
        random.uniform(0.5, 2.0, items).astype(np.float32),
        Groups(frozenset(feature.name for feature in GROUPED.group_features), sizes),
        "group_index",
    )


def trainer_of(model: keras.Model, sample: Batch) -> Trainer:
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=["AUC"])
    trainer = Trainer(model, LocalStore(), TrainerOptions(sparse_optimizer=SGD(0.5)))
    trainer.initialize(sample)
    return trainer


def weights(trainer: Trainer) -> dict[str, Any]:
    trainer.refresh()
    return {variable.path: variable.numpy() for variable in trainer.model.trainable_variables}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_grouped_training_is_flat_training(name: str) -> None:
    """The model of the grouped spec on groups, the same on flat rows, and the model of the flat spec."""
    batches = [grouped(seed) for seed in range(4)]
    flat = [batch.flat() for batch in batches]
    runs = {}
    keras.utils.set_random_seed(3)
    first = models.create(name, GROUPED, embedding_dim=4, seed=1, **OPTIONS[name])
    for kind, spec, data in (
        ("groups", GROUPED, batches),
        ("flat rows", GROUPED, flat),
        ("flat model", FLAT, [replace(batch, group_index=None) for batch in flat]),
        ("flat model on groups", FLAT, batches),
    ):
        model = models.create(name, spec, embedding_dim=4, seed=1, **OPTIONS[name])
        for layer in model.layers:
            if layer.weights:
                layer.set_weights(first.get_layer(layer.name).get_weights())
        runs[kind] = (trainer_of(model, data[0]), data)
    expected = None
    for kind, (trainer, data) in runs.items():
        losses = []
        for batch in data:
            trainer.reset_metrics()
            trainer.train_step(batch)
            losses.append(trainer.metric_results()["loss"])
        found = (losses, weights(trainer), trainer.predict_step(data[0]))
        if expected is None:
            expected = found
            continue
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, err_msg=kind)
        assert found[1].keys() == expected[1].keys()
        for path, value in found[1].items():
            np.testing.assert_allclose(
                value, expected[1][path], rtol=1e-5, atol=1e-6, err_msg=f"{kind} {path}"
            )
        for output, value in found[2].items():
            assert len(value) == data[0].size
            np.testing.assert_allclose(value, expected[2][output], rtol=1e-5, atol=1e-6, err_msg=kind)


def test_a_model_of_plain_keras_layers() -> None:
    """`keras.ops.take` and an input of the index's name are enough."""
    inputs = {
        "user": keras.Input((), dtype="int64", name="user"),
        "item": keras.Input((), dtype="int64", name="item"),
        "group_index": keras.Input((), dtype="int64", name="group_index"),
    }
    seen: list[Any] = []

    class Watch(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            tf.py_function(lambda rows: seen.append(int(rows)), [tf.shape(x)[0]], [])
            return x

    user = Watch()(SparseEmbedding(4, table="user")(inputs["user"]))
    user = keras.ops.take(user, inputs["group_index"], axis=0)
    item = SparseEmbedding(4, table="item")(inputs["item"])
    out = keras.layers.Dense(1, activation="sigmoid")(keras.ops.concatenate([user, item], axis=-1))
    batch = grouped(1)
    trainer = trainer_of(keras.Model(inputs, out), batch)
    seen.clear()
    trainer.train_step(batch)
    assert seen == [batch.rows]
    assert batch.rows < batch.size


def test_a_subclassed_model_gets_the_index_as_a_column() -> None:
    class TwoSides(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.user = SparseEmbedding(4, table="user")
            self.item = SparseEmbedding(4, table="item")
            self.expand = ExpandGroups()
            self.score = keras.layers.Dense(1, activation="sigmoid")

        def call(self, columns: Any) -> Any:
            user = self.expand([self.user(columns["user"]), columns["group_index"]])
            return self.score(user * self.item(columns["item"]))

    batch = grouped(1)
    trainer = trainer_of(TwoSides(), batch)
    trainer.train_step(batch)
    assert len(trainer.predict_step(batch)["output"]) == batch.size
    with pytest.raises(ValueError, match="no grouping"):
        trainer_of(TwoSides(), replace(batch.flat(), group_index=None))


def test_the_layer_sums_gradients_of_a_group_and_expands_masks() -> None:
    values, index = tf.constant([[1.0], [2.0], [4.0]]), tf.constant([0, 0, 2])
    layer = ExpandGroups()
    with tf.GradientTape() as tape:
        tape.watch(values)
        out = layer([values, index])
    assert out.numpy().tolist() == [[1.0], [1.0], [4.0]]
    gradient = tape.gradient(out, values, output_gradients=tf.constant([[1.0], [3.0], [5.0]]))
    assert gradient.numpy().tolist() == [[4.0], [0.0], [5.0]]
    ids = keras.Input((2,), dtype="int64")
    groups = keras.Input((), dtype="int32")
    expanded = layer([SparseEmbedding(1, padding_value=-1)(ids), groups])
    pooled = keras.layers.GlobalAveragePooling1D()(expanded)
    assert keras.Model([ids, groups], pooled)([np.array([[3, -1]]), np.array([0, 0])]).shape == (2, 1)
    assert ExpandGroups.from_config(layer.get_config()).name == layer.name
