"""The model on the driver: it trains nothing, but names tables, merges metrics, and is what callbacks see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import keras
import numpy.typing as npt

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.store import Float32Array, TableSpec
from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.layers import tables
from deeprec_spark.training import optimizers
from deeprec_spark.training.options import TrainerOptions
from deeprec_spark.training.trainer import Trainer
from deeprec_spark.training.worker import sample_batch

LabelKind = Literal["binary", "regression", "multiclass"]


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

    def load_dense(self, dense: Float32Array, state: Float32Array) -> None:
        """Set the dense weights."""
        self._trainer.load_dense(dense, state)

    def metric_results(self, parts: Sequence[Sequence[npt.NDArray[Any]]]) -> dict[str, float]:
        """The metrics of all workers together, from the states of each."""
        self._trainer.merge_metric_states(parts)
        return self._trainer.metric_results()


def label_kind(model: keras.Model) -> LabelKind:
    """What the labels of a compiled model are, by its losses: this decides how labels are checked.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(loss="binary_crossentropy")
        >>> label_kind(model)
        'binary'
    """
    kinds = {_kind_of_loss(loss) for loss in keras.tree.flatten(model.loss) if loss is not None}
    return kinds.pop() if len(kinds) == 1 else "regression"


def _kind_of_loss(loss: Any) -> LabelKind:
    name = loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", "")
    if str(name) in ("binary_crossentropy", "binary_focal_crossentropy"):
        return "binary"
    return "multiclass" if str(name) == "sparse_categorical_crossentropy" else "regression"
