"""Ask an exported model: needs TensorFlow only, neither Spark nor the training code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

SIGNATURE = "serving_default"


def query(model_dir: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Predictions of a SavedModel for rows given as raw values by column name.

    Args:
        model_dir: The folder that `export` wrote.
        rows: One mapping per row; all rows name the same columns.

    Returns:
        For each row the model's outputs by name.

    Raises:
        FileNotFoundError: There is no SavedModel.
        ValueError: A column is missing, unknown, or holds values of another type.

    Example:
        >>> query("model", [{"user": 1, "item": 2}])  # doctest: +SKIP
        [{'prediction': 0.73}]
    """
    import tensorflow as tf

    if not (Path(model_dir) / "saved_model.pb").is_file():
        raise FileNotFoundError(f"There is no SavedModel in this folder. Received: model={model_dir!r}")
    # Signatures live as long as the object they come from.
    loaded = tf.saved_model.load(model_dir)
    signature = loaded.signatures[SIGNATURE]
    specs = signature.structured_input_signature[1]
    outputs = signature(**{name: _tensor(name, spec, rows) for name, spec in _checked(specs, rows).items()})
    arrays = {name: value.numpy().reshape(len(rows), -1) for name, value in sorted(outputs.items())}
    return [
        {
            name: array[i, 0].item() if array.shape[1] == 1 else array[i].tolist()
            for name, array in arrays.items()
        }
        for i in range(len(rows))
    ]


def inputs(model_dir: str) -> dict[str, str]:
    """The columns that a SavedModel takes, and their types, as `int64 [batch, 8]`."""
    import tensorflow as tf

    specs = tf.saved_model.load(model_dir).signatures[SIGNATURE].structured_input_signature[1]
    return {
        name: f"{spec.dtype.name} [{', '.join(['batch', *(str(size or '?') for size in spec.shape[1:])])}]"
        for name, spec in specs.items()
    }


def _checked(
    specs: Mapping[str, tf.TensorSpec], rows: Sequence[Mapping[str, Any]]
) -> Mapping[str, tf.TensorSpec]:
    if not rows:
        raise ValueError("A query needs at least one row. Received: rows=[]")
    for row in rows:
        missing, unknown = sorted(set(specs) - set(row)), sorted(set(row) - set(specs))
        if missing or unknown:
            raise ValueError(
                f"A row must name each column of the model. "
                f"Received: missing {missing}, unknown {unknown} in {json.dumps(dict(row))[:200]}"
            )
    return specs


def _tensor(name: str, spec: tf.TensorSpec, rows: Sequence[Mapping[str, Any]]) -> tf.Tensor:
    import tensorflow as tf

    values = [row[name] for row in rows]
    try:
        if spec.dtype == tf.string:
            array = np.array([_text(value) for value in values])
        else:
            array = np.array(values)
            wanted = spec.dtype.as_numpy_dtype
            if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and np.dtype(wanted).kind in "iu"):
                raise TypeError("these are not such numbers")
            array = array.astype(wanted)
        return tf.reshape(tf.constant(array, spec.dtype), [-1, *spec.shape[1:]])
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        raise ValueError(
            f"Column {name!r} takes {spec.dtype.name} values of shape {tuple(spec.shape[1:])}: {error}. "
            f"Received: {values[:3]!r}"
        ) from error


def _text(value: Any) -> Any:
    """Strings (and lists of strings) as bytes; numbers are not taken for text in silence."""
    if isinstance(value, list):
        return [_text(item) for item in value]
    if not isinstance(value, str):
        raise TypeError("text is in quotes in JSON")
    return value.encode("utf-8")
