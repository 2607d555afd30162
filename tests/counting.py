"""A model that counts: what a checkpoint says was trained can be compared with the rows of the data, one by one.

Each row's number is a key of a table that adds 1 for each sample (SGD with rate 1, a gradient of -1).
"""

from __future__ import annotations

from typing import Any

import keras

from deeprec_spark.embedding.options import Constant, EmbeddingVariableOption, InitializerOption
from deeprec_spark.features.spec import Feature, FeatureSpec, Label
from deeprec_spark.layers import SparseEmbedding

SPEC = FeatureSpec(
    features=[
        Feature(name="row", kind="categorical", raw_type="int64"),
        Feature(name="one", kind="dense", raw_type="float32"),
    ],
    labels=[Label(name="y", kind="regression")],
)
"""The rows: their number, a one, and the number again as the label."""
ZEROS = EmbeddingVariableOption(init_option=InitializerOption(Constant(0.0)))


@keras.saving.register_keras_serializable("counting")
class Negative(keras.losses.Loss):
    """The sum of the predictions, negated: each sample's gradient is -1."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return -keras.ops.sum(y_pred, axis=-1)


@keras.saving.register_keras_serializable("counting")
class SumOfLabels(keras.metrics.Sum):
    """With the row's number as its label: says which rows have reached the metrics."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(y_true)


def counting(config: dict[str, Any]) -> keras.Model:
    """Output: the row of the id, and a weight that counts steps."""
    row = keras.Input((), dtype="int64", name="row")
    one = keras.Input((), dtype="float32", name="one")
    counted = SparseEmbedding(1, name="rows", ev_option=ZEROS)(row)
    step = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(keras.layers.Reshape((1,))(one))
    model = keras.Model({"row": row, "one": one}, keras.layers.Add()([counted, step]))
    model.compile(keras.optimizers.SGD(1e-3), Negative(reduction="sum"), metrics=[SumOfLabels(name="labels")])
    return model
