"""What inputs and predictions are called in DataFrames and exported models, and where a model describes itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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


def input_names(columns: Iterable[str]) -> dict[str, str]:
    """What a signature calls each column: TensorFlow takes only names that Python would, and not `self`.

    Example:
        >>> input_names(["zip code", "zip_code", "1st", "self", "age"])
        {'zip code': 'zip_code_', 'zip_code': 'zip_code', '1st': 'arg_1st', 'self': 'self_', 'age': 'age'}
    """
    columns = list(columns)
    # A name that can stay as it is does so, whatever comes before it.
    taken = {name for name in columns if _argument(name) == name}
    names = {}
    for column in columns:
        name = _argument(column)
        while name != column and name in taken:
            name += "_"
        taken.add(name)
        names[column] = name
    return names


def _argument(column: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_]", "_", column)
    if not name[:1].isalpha():
        name = f"arg_{name}"
    return f"{name}_" if name == "self" else name
