"""Options of a Trainer; importing them does not load TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deeprec_spark.embedding.optimizers import Optimizer


@dataclass(frozen=True)
class DenseStepOptions:
    """How TensorFlow computes the dense part of a step.

    Args:
        xla: compile it with XLA, for batches that have as many samples and ids as an earlier one; others, such as the
            last of an epoch, are computed without. Models with padded sequences that no combiner sums, or ids that they
            compute, have no such batches, and data in groups have few: a warning says so.
        micro_batch: compute a batch in equal parts of at most so many samples, and add up their gradients: one update
            with the gradients of the whole batch, in less memory. None: in one part. Layers that look at a batch as a
            whole (BatchNormalization) see the parts.
    """

    xla: bool = False
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(
                f"micro_batch must be None or at least 1. Received: micro_batch={self.micro_batch}"
            )


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
        dense_step: see DenseStepOptions.
    """

    sparse_optimizer: Optimizer | None = None
    class_weight: Mapping[int, float] | None = None
    deterministic: bool = False
    seed: int = 0
    check_finite: bool = True
    dense_step: DenseStepOptions = field(default_factory=DenseStepOptions)
