"""How predictions are called and shaped, in DataFrames and exported models alike."""

from __future__ import annotations

from collections.abc import Sequence

PREDICTION = "prediction"


def prediction_names(outputs: Sequence[str]) -> list[str]:
    """The name of each output's prediction: `prediction`, or `prediction_<output>` where there are several.

    Example:
        >>> prediction_names(["click", "buy"])
        ['prediction_click', 'prediction_buy']
    """
    if len(outputs) == 1:
        return [PREDICTION]
    return [f"{PREDICTION}_{name}" for name in outputs]
