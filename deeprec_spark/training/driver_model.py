"""The model on the driver: it trains nothing, but names tables, merges metrics, and is what callbacks see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy.typing as npt

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.store import Float32Array, TableSpec
from deeprec_spark.features.labels import LabelKind, LabelKinds
from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.layers import tables
from deeprec_spark.training import objective, optimizers
from deeprec_spark.training.options import TrainerOptions
from deeprec_spark.training.trainer import Trainer
from deeprec_spark.training.worker import sample_batch


class DriverModel:
    """A built copy of the workers' model over an empty store of its own.

    Args:
        model: a compiled Keras model, not yet trained.
        spec: its columns.
        options: those of the workers' trainers.

    Raises:
        ValueError: the model has no SparseEmbedding, is not compiled, or does not fit the columns.
    """

    def __init__(self, model: keras.Model, spec: FeatureSpec, options: TrainerOptions) -> None:
        self.model = model
        # Making ops deterministic and seeding are process-wide: they belong to the workers' processes alone.
        self._trainer = Trainer(model, LocalStore(), replace(options, deterministic=False))
        self._trainer.initialize(sample_batch(spec))
        self.dense_optimizer: Optimizer = optimizers.from_keras(model.optimizer)
        self.table_specs: list[TableSpec] = tables.table_specs(
            model, options.sparse_optimizer or self.dense_optimizer
        )
        self.class_weight = objective.describe_weights(options.class_weight)
        self.objective = objective.describe(model)

    def load_dense(self, dense: Float32Array, state: Float32Array) -> None:
        """Set the dense weights."""
        self._trainer.load_dense(dense, state)

    def metric_results(self, parts: Sequence[Sequence[npt.NDArray[Any]]]) -> dict[str, float]:
        """The metrics of all workers together, from the states of each."""
        self._trainer.merge_metric_states(parts)
        return self._trainer.metric_results()


def label_kinds(model: keras.Model) -> LabelKinds:
    """What the labels of a compiled model are, by its losses: this decides how labels are checked.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(loss="bce")
        >>> label_kinds(model).of(["click"])
        ['binary']
    """
    losses = model.loss
    if isinstance(losses, Mapping):
        named = {str(name): _kind_of_loss(loss) for name, loss in losses.items()}
        return LabelKinds(tuple(named.values()), named)
    if isinstance(losses, (list, tuple)):
        return LabelKinds(tuple(_kind_of_loss(loss) for loss in losses))
    return LabelKinds((_kind_of_loss(losses),))


def _kind_of_loss(loss: Any) -> LabelKind:
    found = keras.losses.get(loss)
    function = getattr(found, "fn", found)
    name = getattr(function, "__name__", "")
    binary = (keras.losses.BinaryCrossentropy, keras.losses.BinaryFocalCrossentropy)
    if isinstance(found, binary) or name in ("binary_crossentropy", "binary_focal_crossentropy"):
        return "binary"
    if (
        isinstance(found, keras.losses.SparseCategoricalCrossentropy)
        or name == "sparse_categorical_crossentropy"
    ):
        return "multiclass"
    return "regression"
