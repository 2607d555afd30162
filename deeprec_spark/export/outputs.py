"""What predictions are called, in DataFrames and exported models alike, and where a model keeps its FeatureSpec."""

from __future__ import annotations

from collections.abc import Sequence

PREDICTION = "prediction"
METADATA = "assets.extra/deeprec_spark.json"


def prediction_names(outputs: Sequence[str]) -> list[str]:
    """The name of each output's prediction: `prediction`, or `prediction_<output>` where there are several.

    Example:
        >>> prediction_names(["click", "buy"])
        ['prediction_click', 'prediction_buy']
    """
    if len(outputs) == 1:
        return [PREDICTION]
    return [f"{PREDICTION}_{name}" for name in outputs]
