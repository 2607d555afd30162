"""The model on the driver."""

from typing import Any

import keras
import pytest

from deeprec_spark.features.spec import Feature, FeatureSpec, Label
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.training.driver_model import DriverModel, label_kinds
from deeprec_spark.training.options import TrainerOptions


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ("bce", "binary"),
        ("BCE", "binary"),
        ("binary_crossentropy", "binary"),
        ("BinaryCrossentropy", "binary"),
        ("BinaryFocalCrossentropy", "binary"),
        (keras.losses.BinaryCrossentropy(name="x", from_logits=True), "binary"),
        (keras.losses.binary_crossentropy, "binary"),
        ("SparseCategoricalCrossentropy", "multiclass"),
        ("sparse_categorical_crossentropy", "multiclass"),
        ("mse", "regression"),
        (lambda y_true, y_pred: y_pred, "regression"),
    ],
)
def test_losses_say_what_labels_are(loss: Any, kind: str) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    assert label_kinds(model).of(["y"]) == [kind]


def test_each_output_has_its_own() -> None:
    x = keras.Input((1,))
    outputs = {name: keras.layers.Dense(1, name=name)(x) for name in ("click", "watch")}
    model = keras.Model(x, outputs)
    model.compile("sgd", {"click": "bce", "watch": "mse"})
    assert label_kinds(model).of(["watch", "click"]) == ["regression", "binary"]
    model = keras.Model(x, list(outputs.values()))
    model.compile("sgd", ["bce", "mse"])
    assert label_kinds(model).of(["a", "b"]) == ["binary", "regression"]


def described(loss: Any, class_weight: dict[int, float] | None = None, **compiled: Any) -> tuple[str, str]:
    user = keras.Input((), dtype="int64", name="user")
    model = keras.Model(
        user, keras.layers.Dense(1, activation="sigmoid")(SparseEmbedding(2, table="user")(user))
    )
    model.compile("sgd", loss, **compiled)
    spec = FeatureSpec(
        features=[Feature(name="user", kind="categorical", raw_type="int64")],
        labels=[Label(name="y", kind="binary")],
    )
    driver = DriverModel(model, spec, TrainerOptions(class_weight=class_weight))
    return driver.class_weight, driver.objective


def test_what_is_minimized_and_measured_is_told_apart() -> None:
    """And a model that is made again is the same, though Keras counts up the names of its parts."""
    smooth = keras.losses.BinaryCrossentropy(label_smoothing=0.1)
    models: list[dict[str, Any]] = [
        {"loss": "bce"},
        {"loss": "mse"},
        {"loss": smooth},
        {"loss": keras.losses.BinaryCrossentropy()},
        {"loss": "bce", "loss_weights": [2.0]},
        {"loss": "bce", "metrics": ["mae"]},
        {"loss": "bce", "metrics": ["AUC"]},
        {"loss": "bce", "metrics": [keras.metrics.AUC(num_thresholds=50)]},
        {"loss": "bce", "class_weight": {0: 1.0, 1: 3.0}},
        {"loss": "bce", "class_weight": {0: 1.0, 1: 2.0}},
    ]
    found = [described(**model) for model in models]
    assert len(set(found)) == len(models)
    assert [described(**model) for model in models[:3]] == found[:3]
    assert described("bce", metrics=["AUC"]) == found[6]
    assert described("bce", {1: 3.0, 0: 1.0}) == found[8] == ("{0: 1.0, 1: 3.0}", found[0][1])
