"""SavedModels predict what the trainer predicts, in a process that has only TensorFlow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark import checkpoint
from deeprec_spark.data import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.options import (
    Constant,
    CounterFilter,
    EmbeddingVariableOption,
    InitializerOption,
)
from deeprec_spark.export.names import METADATA
from deeprec_spark.export.saved_model import export_saved_model
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.layers import MultiHashEmbedding, SparseEmbedding
from deeprec_spark.layers.tables import table_specs
from deeprec_spark.query import query
from deeprec_spark.training.trainer import Trainer
from tests.checkpoints import LIMITS
from tests.conftest import RunPython

SPEC = FeatureSpec(
    features=(
        Feature(name="user", kind=FeatureKind.CATEGORICAL, raw_type="int64"),
        Feature(name="tags", kind=FeatureKind.SEQUENCE, raw_type="int64", max_length=3),
        Feature(name="unused", kind=FeatureKind.DENSE, raw_type="float32"),
        Feature(name="price", kind=FeatureKind.DENSE, raw_type="float32", transform="log1p"),
    ),
    labels=(Label(name="click"),),
)


def rows(n: int = 64, *, seed: int = 0) -> Batch:
    """Rows with the extreme ids among them."""
    random = np.random.default_rng(seed)
    ids = np.array([LIMITS.min, LIMITS.max, -1, 0, 1, 2], np.int64)
    return Batch(
        {
            "user": random.choice(ids, n),
            "tags": np.where(random.random((n, 3)) < 0.4, -1, random.integers(0, 5, (n, 3))),
            "unused": np.zeros(n, np.float32),
            "price": random.random(n).astype(np.float32),
        },
        {"click": random.integers(0, 2, n).astype(np.float32)},
    )


@keras.saving.register_keras_serializable("tests")
class Shift(keras.layers.Layer):
    """A custom layer with a weight and a random part in training."""

    def build(self, input_shape: Any) -> None:
        self.amount = self.add_weight(shape=(input_shape[-1],), name="amount")

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.amount + (keras.random.normal(keras.ops.shape(x)) if training else 0.0)


def every_kind_of_layer() -> keras.Model:
    """Computed ids, one table twice, a filtered table, composed rows, lookups, averages, a custom layer."""
    option = EmbeddingVariableOption(
        filter_option=CounterFilter(filter_freq=50),
        init_option=InitializerOption(Constant(3.0), default_value_no_permission=0.125),
    )
    user = keras.Input((), dtype="int64", name="user")
    tags = keras.Input((3,), dtype="int64", name="tags")
    price = keras.Input((), name="price")
    embed = SparseEmbedding(4, table="shared", name="ids")
    bag = SparseEmbedding(4, "mean", table="shared", padding_value=-1, name="bag")
    rare = SparseEmbedding(2, table="rare", ev_option=option, name="rare")
    composed = MultiHashEmbedding([(3, 2), (5, 2)], operation="mult", name="composed")
    known = keras.layers.IntegerLookup(vocabulary=[-1, 1], output_mode="one_hot", name="known")(user)
    x = keras.layers.Concatenate()(
        [
            known,
            embed(user),
            embed(user * 3 + 1),
            bag(tags),
            rare(user),
            composed(user),
            keras.layers.Reshape((1,))(price),
        ]
    )
    x = Shift(name="shift")(keras.layers.BatchNormalization()(x))
    x = keras.layers.Dense(1, activation="sigmoid", name="click")(keras.layers.Dropout(0.5)(x))
    return keras.Model({"user": user, "tags": tags, "price": price}, x, name="every")


class Subclassed(keras.Model):
    """A model without symbolic inputs and with two outputs."""

    def __init__(self) -> None:
        super().__init__(name="subclassed")
        self.embed = SparseEmbedding(4, table="users")
        self.head = keras.layers.Dense(2, name="head")
        self.score = keras.layers.Dense(1, name="score")

    def call(self, inputs: dict[str, Any]) -> dict[str, Any]:
        x = self.embed(inputs["user"])
        return {"wide": self.head(x), "one": self.score(x)}


def trained(model: keras.Model, folder: Path, *, loss: Any, spec: FeatureSpec | None, batch: Batch) -> Any:
    """Train a few steps; returns a trainer on the snapshot of the checkpoint."""
    model.compile(keras.optimizers.Adam(0.05), loss=loss)
    trainer = Trainer(model, LocalStore())
    trainer.initialize(batch)
    for _ in range(5):
        trainer.train_step(batch)
    path = checkpoint.save_checkpoint(
        trainer.store.save, str(folder), model=model, tables=table_specs(model), step=5, feature_spec=spec
    )
    reader = Trainer(model, checkpoint.SnapshotStore(path, str(folder / "cache")))
    reader.initialize(batch)
    return reader


# Nothing of this project, of Spark or of BigDL can be imported, and Keras is not.
ALONE = """
import importlib.abc, json, sys
import numpy as np

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("deeprec_spark", "pyspark", "bigdl", "tests"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import tensorflow as tf
loaded = tf.saved_model.load(sys.argv[1])
with np.load("columns.npz") as columns:
    for signature in ("serving_default", "prepared"):
        outputs = loaded.signatures[signature](
            **{name: tf.constant(columns[f"{signature}/{name}"]) for name in json.loads(sys.argv[2])}
        )
        np.savez(f"{signature}.npz", **{name: value.numpy() for name, value in outputs.items()})
"""


def test_only_tensorflow_is_needed_and_nothing_differs(tmp_path: Path, run_python: RunPython) -> None:
    keras.utils.set_random_seed(0)
    batch = rows()
    reader = trained(
        every_kind_of_layer(), tmp_path / "model", loss="binary_crossentropy", spec=SPEC, batch=batch
    )
    test = rows(200, seed=1)
    test.features["user"][:40] = 12345  # has no row
    expected = reader.predict_step(test)["click"][:, 0]
    export_saved_model(reader.model, reader.store, str(tmp_path / "export"))
    names = ["user", "tags", "price"]  # a column that the model does not read need not be sent
    prepared = {f"prepared/{name}": test.features[name] for name in names}
    raw = {f"serving_default/{name}": test.features[name] for name in names}
    raw["serving_default/price"] = np.expm1(test.features["price"].astype(np.float64)).astype(np.float32)
    np.savez(tmp_path / "columns.npz", **prepared, **raw)
    run_python(ALONE, str(tmp_path / "export"), json.dumps(names))
    for signature in ("prepared", "serving_default"):
        with np.load(tmp_path / f"{signature}.npz") as outputs:
            assert list(outputs) == ["prediction"]
            np.testing.assert_allclose(outputs["prediction"], expected, atol=1e-6)
    metadata = json.loads((tmp_path / "export" / METADATA).read_text())
    assert metadata["step"] == 5
    spec = FeatureSpec.model_validate(metadata["feature_spec"])
    assert [spec.feature_names, spec.labels] == [names, SPEC.labels]
    asked = [{name: _raw(raw[f"serving_default/{name}"][row]) for name in names} for row in range(5)]
    answers = query(str(tmp_path / "export"), asked)
    np.testing.assert_allclose([answer["prediction"] for answer in answers], expected[:5], atol=1e-6)
    absent = {"user": -1, "tags": [], "price": 0.0}  # what null stands for
    [first, second] = query(str(tmp_path / "export"), [dict.fromkeys(names), absent])
    assert first == second
    rare = reader.store.tables["rare"]
    assert 0 < len(rare.rows.keys) < 6  # some ids are admitted, others read the filter's default


def _raw(value: Any) -> Any:
    """A value as JSON has it; sequences without their padding, so of different lengths."""
    return [int(item) for item in value if item != -1] if np.ndim(value) else value.item()


def test_a_subclassed_model_without_a_spec(tmp_path: Path) -> None:
    full = rows()
    batch = Batch(
        {"user": full.features["user"], "price": full.features["price"]},
        {"one": full.labels["click"], "wide": full.features["tags"][:, :2].astype(np.float32)},
    )
    reader = trained(
        Subclassed(), tmp_path / "model", loss={"wide": "mse", "one": "mse"}, spec=None, batch=batch
    )
    with pytest.raises(ValueError, match="give the FeatureSpec, or a sample batch"):
        export_saved_model(reader.model, reader.store, str(tmp_path / "export"))
    export_saved_model(reader.model, reader.store, str(tmp_path / "export"), sample=batch)
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    for name in ("prepared", "serving_default"):
        outputs = loaded.signatures[name](**{n: tf.constant(array) for n, array in batch.features.items()})
        expected = reader.predict_step(batch)
        np.testing.assert_allclose(outputs["prediction_wide"], expected["wide"], atol=1e-6)
        np.testing.assert_allclose(outputs["prediction_one"], expected["one"][:, 0], atol=1e-6)


def test_a_functional_model_needs_no_spec(tmp_path: Path) -> None:
    user = keras.Input((), dtype="int64", name="user")
    output = keras.layers.Dense(1, name="y")(SparseEmbedding(2, table="users")(user))
    batch = Batch({"user": rows().features["user"]}, {"y": rows().labels["click"]})
    reader = trained(keras.Model(user, output), tmp_path / "model", loss="mse", spec=None, batch=batch)
    export_saved_model(reader.model, reader.store, str(tmp_path / "export"))
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    served = loaded.signatures["serving_default"](user=tf.constant(batch.features["user"]))
    np.testing.assert_allclose(served["prediction"], reader.predict_step(batch)["y"][:, 0], atol=1e-6)


def test_another_models_checkpoint_is_not_exported(tmp_path: Path) -> None:
    batch = rows()
    reader = trained(
        every_kind_of_layer(), tmp_path / "model", loss="binary_crossentropy", spec=SPEC, batch=batch
    )
    user = keras.Input((), dtype="int64", name="user")
    other = keras.Model(user, SparseEmbedding(4, table="shared")(user))
    with pytest.raises(checkpoint.CheckpointMismatchError, match="'rare' is in the checkpoint only"):
        export_saved_model(other, reader.store, str(tmp_path / "export"))
    assert not (tmp_path / "export").exists()


def test_columns_may_have_any_name(tmp_path: Path) -> None:
    from deeprec_spark import models

    names = ["zip code", "zip_code", "1st", "self", "a:b", "ünï.x"]
    features = tuple(Feature(name=n, kind=FeatureKind.CATEGORICAL, raw_type="int64") for n in names)
    spec = FeatureSpec(features=features, labels=(Label(name="bought it"), Label(name="click")))
    ids = {name: np.arange(index, index + 6) for index, name in enumerate(names)}
    labels = {label.name: np.array([0, 1, 0, 1, 1, 0], np.float32) for label in spec.labels}
    model = models.create("mmoe", spec, num_experts=2, expert_units=[2], tower_units=[])
    reader = trained(
        model,
        tmp_path / "model",
        loss=dict.fromkeys(labels, "binary_crossentropy"),
        spec=spec,
        batch=Batch(ids, labels),
    )
    export_saved_model(model, reader.store, str(tmp_path / "export"))
    answers = query(
        str(tmp_path / "export"), [{name: int(ids[name][row]) for name in names} for row in range(6)]
    )
    for name, expected in reader.predict_step(Batch(ids)).items():
        found = [answer[f"prediction_{name}"] for answer in answers]
        np.testing.assert_allclose(found, expected[:, 0], atol=1e-6)
