"""Options of a Trainer; importing them does not load TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deeprec_spark.embedding.optimizers import Optimizer


@dataclass(frozen=True)
class TrainerOptions:
    """Options of a Trainer.

    Args:
        sparse_optimizer: optimizer of the tables, which keeps its learning rate: schedules and callbacks then change
            that of the dense weights alone. None: that of `model.compile`, schedule and gradient clipping included.
        class_weight: weight of each class in training, as in Keras' `fit`; for a model with one output.
        deterministic: make TensorFlow's ops deterministic and seed what the model draws at random.
        seed: that seed.
        check_finite: stop with a NonFiniteError before a loss or gradient that is NaN or infinite is applied.
    """

    sparse_optimizer: Optimizer | None = None
    class_weight: Mapping[int, float] | None = None
    deterministic: bool = False
    seed: int = 0
    check_finite: bool = True
