"""What a fit minimizes and measures, as text: fits with other texts are other fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from deeprec_spark.training import metrics

_PLAIN = (bool, int, float, str)


def describe(model: keras.Model) -> str:
    """The losses with their plain settings, their weights, and the metrics with the shapes of their states.

    It holds no name that Keras counts up, so that a model that is made again has the same text. The model is one that
    a Trainer was initialized with.

    Example:
        >>> describe(model)  # doctest: +SKIP
        "binary_crossentropy; metrics Mean [(), ()], AUC [(200,), (200,), (200,), (200,)]"
    """
    weights = getattr(model._compile_loss, "_user_loss_weights", None)
    weighted = "" if weights is None else f", weights {weights}"
    losses = _by_name(model.loss)
    states = [
        f"{type(metric).__name__} {[tuple(variable.shape) for variable in metric.variables]}"
        for metric in metrics.flatten(model.metrics)
        if not getattr(metric, "metrics", [])
    ]
    return f"{losses}{weighted}; metrics {', '.join(states)}"


def describe_weights(class_weight: Mapping[int, float] | None) -> str:
    """The weights of classes, in order; nothing where there are none."""
    return "" if class_weight is None else str(dict(sorted(class_weight.items())))


def _by_name(losses: Any) -> str:
    if isinstance(losses, Mapping):
        return ", ".join(f"{name}: {_by_name(loss)}" for name, loss in sorted(losses.items()))
    if isinstance(losses, (list, tuple)):
        return ", ".join(map(_by_name, losses))
    found = keras.losses.get(losses)
    if not isinstance(found, keras.losses.Loss):
        return str(getattr(found, "__name__", type(found).__name__))
    settings = {
        name: value
        for name, value in found.get_config().items()
        if name != "name" and isinstance(value, _PLAIN)
    }
    return f"{type(found).__name__} {settings}"
