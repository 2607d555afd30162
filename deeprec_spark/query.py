"""Ask an exported model: needs TensorFlow only, neither Spark nor the training code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeprec_spark.export.names import METADATA, input_names
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec

SIGNATURE = "serving_default"


def query(model_dir: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Predictions of a SavedModel for rows given as raw values by column name.

    Args:
        model_dir: The folder that `export` wrote.
        rows: One mapping per row, each with all columns of the model. None is a missing value and takes the
            feature's default; sequences are lists of any length.

    Returns:
        For each row the model's outputs by name.

    Raises:
        FileNotFoundError: There is no exported model.
        ValueError: A column is missing, unknown, or holds values of another type.

    Example:
        >>> query("model", [{"user": 1, "item": 2}])  # doctest: +SKIP
        [{'prediction': 0.73}]
    """
    import tensorflow as tf

    spec = model_spec(model_dir)
    if not rows:
        raise ValueError("A query needs at least one row. Received: rows=[]")
    for row in rows:
        _check_columns(spec, row)
    columns = {
        feature.name: _column(feature, [row[feature.name] for row in rows]) for feature in spec.features
    }
    # Signatures live as long as the object they come from.
    loaded = tf.saved_model.load(model_dir)
    signature = loaded.signatures[SIGNATURE]
    types = signature.structured_input_signature[1]
    names = input_names(columns)
    outputs = signature(
        **{names[column]: tf.constant(array, types[names[column]].dtype) for column, array in columns.items()}
    )
    arrays = {name: value.numpy().reshape(len(rows), -1) for name, value in sorted(outputs.items())}
    return [
        {
            name: array[i, 0].item() if array.shape[1] == 1 else array[i].tolist()
            for name, array in arrays.items()
        }
        for i in range(len(rows))
    ]


def parse_row(text: str, name: str) -> dict[str, Any]:
    """A row from its JSON text; a ValueError calls it `name`."""
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{name} must be a JSON object of values by column, but is not JSON: {error}. Received: {text!r}"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"{name} must be a JSON object of values by column. Received: {text!r}")
    return row


def model_spec(model_dir: str) -> FeatureSpec:
    """The columns that an exported model takes; a FileNotFoundError where there is none."""
    folder = Path(model_dir)
    if not (folder / "saved_model.pb").is_file() or not (folder / METADATA).is_file():
        raise FileNotFoundError(f"There is no exported model in this folder. Received: model={model_dir!r}")
    description = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    return FeatureSpec.model_validate(description["feature_spec"])


def _check_columns(spec: FeatureSpec, row: Mapping[str, Any]) -> None:
    missing, unknown = sorted(set(spec.feature_names) - set(row)), sorted(set(row) - set(spec.feature_names))
    if missing or unknown:
        raise ValueError(
            f"A row must name each column of the model, with null where there is no value. "
            f"Received: missing {missing}, unknown {unknown} in {json.dumps(dict(row))[:200]}"
        )


def _column(feature: Feature, values: Sequence[Any]) -> np.ndarray:
    """The raw values of one column as the array that the graph takes."""
    try:
        if feature.kind is FeatureKind.SEQUENCE:
            filler = "" if feature.raw_type == "string" else feature.padding_value
            lists = [_list(value) for value in values]
            longest = max(1, *map(len, lists)) if lists else 1
            full = [[*items, *[filler] * (longest - len(items))] for items in lists]
            return _array(feature, [item for items in full for item in items]).reshape(len(full), longest)
        missing: Any = "" if feature.raw_type == "string" else -1
        if feature.kind is FeatureKind.DENSE:
            missing = float("nan")  # the graph gives it the feature's default
        elif feature.default is not None:
            missing = feature.default
        if feature.width is not None:
            rows = [[missing] * feature.width if value is None else _list(value) for value in values]
            return _array(feature, rows).reshape(len(rows), feature.width)
        return _array(feature, [missing if value is None else value for value in values])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"Column {feature.name!r} takes {feature.raw_type} values ({feature.kind.value}): {error}. "
            f"Received: {list(values[:3])!r}"
        ) from error


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError("a list is needed")
    return value


def _array(feature: Feature, values: list[Any]) -> np.ndarray:
    """A flat array of raw values; text is not taken for numbers in silence, nor the other way round."""
    if feature.raw_type == "string":
        if not all(isinstance(value, str) for value in values):
            raise TypeError("text is needed, in quotes in JSON")
        return np.array([value.encode("utf-8") for value in values], dtype=object)
    array = np.array(values)
    if array.dtype.kind not in ("iu" if feature.raw_type == "int64" else "iuf"):
        raise TypeError(f"{'whole ' if feature.raw_type == 'int64' else ''}numbers are needed")
    return array.astype(feature.raw_type)
