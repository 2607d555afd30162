"""Metrics of a model: read, merged exactly over workers, and never wrong in silence."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)
State = npt.NDArray[Any]


def variables(model: Any) -> list[Any]:
    """The state variables of all metrics of a compiled model, in a fixed order."""
    found: dict[int, Any] = {}
    for metric in model.metrics:
        for variable in metric.variables:
            found.setdefault(id(variable), variable)
    return list(found.values())


def states(model: Any) -> list[State]:
    """The values of all metric states: sums and counts since the last reset."""
    return [np.array(variable.numpy()) for variable in variables(model)]


def merge(parts: Sequence[Sequence[State]]) -> list[State]:
    """The states of several workers as those of one that saw all samples: their sums, in float64.

    Exact for every metric of Keras, whose states are sums and counts (AUC: of each threshold).
    """
    if not parts:
        return []
    shapes = [[state.shape for state in part] for part in parts]
    if any(other != shapes[0] for other in shapes):
        raise ValueError(f"Workers disagree on the metrics of the model. Received: state shapes {shapes}")
    return [
        sum((state.astype(np.float64) for state in same[1:]), same[0].astype(np.float64)).astype(
            same[0].dtype
        )
        if same[0].dtype.kind == "f"
        else np.sum(np.stack(same), axis=0, dtype=same[0].dtype)
        for same in zip(*parts, strict=True)
    ]


def load(model: Any, values: Sequence[State]) -> None:
    """Set the states of all metrics."""
    targets = variables(model)
    if len(targets) != len(values):
        raise ValueError(
            "The states do not fit the metrics of the model. "
            f"Received: {len(values)} states, expected {len(targets)}"
        )
    for variable, value in zip(targets, values, strict=True):
        variable.assign(value)


def results(model: Any) -> dict[str, Any]:
    """Every metric by name, one that is a vector as a list.

    An AUC without positives or without negatives is NaN, with a warning in the log.
    """
    with _undefined_as_nan(model):
        found = model.get_metrics_result()
    return {name: _scalar(value) for name, value in found.items()}


def flatten(metrics: Sequence[Any]) -> Iterator[Any]:
    """These metrics, and those that they are made of."""
    for metric in metrics:
        yield metric
        yield from flatten(getattr(metric, "metrics", []))


def _scalar(value: Any) -> Any:
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return float(array) if array.ndim == 0 else array.tolist()


@contextmanager
def _undefined_as_nan(model: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for metric in flatten(model.metrics):
            if not isinstance(metric, keras.metrics.AUC) or not hasattr(metric, "true_positives"):
                continue
            # Thresholds start below 0, where every sample counts as predicted positive.
            positives = float(np.sum((metric.true_positives.numpy() + metric.false_negatives.numpy())[0]))
            negatives = float(np.sum((metric.false_positives.numpy() + metric.true_negatives.numpy())[0]))
            if positives + negatives == 0 or (positives > 0 and negatives > 0):
                continue
            logger.warning(
                "%s is undefined, and reported as NaN: all labels are of one class (weight of positives %g, of "
                "negatives %g)",
                metric.name,
                positives,
                negatives,
            )
            metric.result = lambda: math.nan
            stack.callback(metric.__dict__.pop, "result", None)
        yield
