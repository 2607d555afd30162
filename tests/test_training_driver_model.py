"""The model on the driver."""

from typing import Any

import keras
import pytest

from deeprec_spark.training.driver_model import label_kinds


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
