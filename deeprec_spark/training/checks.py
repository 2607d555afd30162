"""Numbers that must stop a training: NaN and infinity, and what they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class NonFiniteError(ArithmeticError):
    """A loss, an output or a gradient that is NaN or infinite; nothing of the step was applied."""


def check_finite(
    checks: npt.NDArray[np.float32],
    outputs: Sequence[str],
    columns: Mapping[str, npt.NDArray[Any]],
    step: int,
    doing: str = "training",
) -> None:
    """Raise NonFiniteError if a check is not finite, naming the step, the outputs and the columns at fault.

    Args:
        checks: the loss, the sum of each output, and in training the sum of the gradients.
        outputs: names of the outputs.
        columns: the batch's feature and label arrays by name.
        step: updates applied so far.
        doing: "training" or "evaluation".
    """
    if np.isfinite(checks).all():
        return
    bad_outputs = [name for name, value in zip(outputs, checks[1:], strict=False) if not np.isfinite(value)]
    bad_columns = [
        name for name, array in columns.items() if array.dtype.kind == "f" and not np.isfinite(array).all()
    ]
    if bad_columns:
        culprit = (
            f"columns with NaN or infinite values: {bad_columns}; fill or drop them when preparing features"
        )
    elif bad_outputs:
        culprit = f"outputs that are not finite: {bad_outputs}; lower the learning rate or clip gradients (clipnorm)"
    elif np.isfinite(checks[0]):
        culprit = (
            "all outputs are finite but a gradient is not; clip gradients or check the model's derivatives"
        )
    else:
        culprit = "all outputs are finite, so the loss itself is not defined for these labels or weights"
    raise NonFiniteError(f"Not finite in {doing} at step {step}: {culprit}. Received: loss={checks[0]}")


def check_weight(weight: npt.NDArray[Any] | None) -> None:
    """Raise ValueError unless sample weights are one for each sample: others would be broadcast in the loss."""
    if weight is not None and weight.ndim != 1:
        raise ValueError(f"Sample weights are one for each sample. Received: shape {list(weight.shape)}")


def class_weights(labels: npt.NDArray[Any], weights: Mapping[int, float]) -> npt.NDArray[np.float32]:
    """The weight of each sample by its class, as Keras' `fit(class_weight=…)`; classes without one weigh 1.

    Args:
        labels: `[batch]` or `[batch, 1]` class numbers, or `[batch, classes]` one-hot.
        weights: weight by class number.
    """
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels[..., 0]
    classes, inverse = np.unique(np.round(labels).astype(np.int64), return_inverse=True)
    return np.array([weights.get(int(number), 1.0) for number in classes], np.float32)[inverse.reshape(-1)]
