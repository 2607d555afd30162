"""The feature functions on plain arrays: what serving calls, and what the Spark columns must equal.

Every function takes anything that pyarrow can turn into an array (lists, numpy arrays, pandas series,
arrow arrays), works on whole arrays, and maps null to null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deeprec_spark.embedding import hashing

SEPARATOR = "\x1f"  # stands between the parts of a cross: ASCII's unit separator

__all__ = ["SEPARATOR", "bucketize", "cross64", "fingerprint64", "fingerprint64_lists", "log1p", "split"]


def fingerprint64(values: Any) -> pa.Int64Array:
    """Hash strings to 64 bits with FarmHash Fingerprint64.

    Equals `tf.bitcast(tf.fingerprint(x), tf.int64)` bit for bit, the empty string included. Integers are
    hashed as their decimal digits.

    Args:
        values: `[n]` strings, bytes or integers; null gives null.

    Returns:
        int64 `[n]`.

    Raises:
        TypeError: for floats and other types, whose text form is not defined.

    Example:
        >>> fingerprint64(["a", None, ""]).to_pylist()
        [-5528939962900187677, None, -7286425919675154353]
    """
    array = as_text(values)
    hashed = hashing.fingerprint64(array.fill_null(b"" if pa.types.is_binary(array.type) else ""))
    return pa.array(hashed, type=pa.int64(), mask=_null_mask(array))


def fingerprint64_lists(values: pa.Array) -> pa.ListArray:
    """Hash the strings of each list; null elements are dropped and a null list becomes an empty one.

    Args:
        values: `[n]` lists of strings.

    Returns:
        `[n]` lists of int64.
    """
    array = _combined(values)
    parents = pc.list_parent_indices(array)
    elements = pc.list_flatten(array)
    valid = pc.is_valid(elements)
    parents = parents.filter(valid).to_numpy(zero_copy_only=False)
    counts = np.bincount(parents, minlength=len(array))
    offsets = np.zeros(len(array) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), fingerprint64(elements.filter(valid)))


def cross64(*columns: Any) -> pa.Int64Array:
    """Cross columns: the hash of their texts joined by `SEPARATOR`.

    Args:
        columns: at least two arrays `[n]` of strings or integers; a null in any of them gives null.

    Returns:
        int64 `[n]`.

    Example:
        >>> cross64(["a"], [7]) == fingerprint64(["a\\x1f7"])
        True
    """
    if len(columns) < 2:
        raise ValueError(f"A cross needs at least two columns. Received: {len(columns)}")
    texts = [as_text(column).cast(pa.string()) for column in columns]
    return fingerprint64(pc.binary_join_element_wise(*texts, SEPARATOR))


def bucketize(values: Any, boundaries: Sequence[float] | npt.NDArray[Any]) -> pa.Int64Array:
    """The bucket of each number: how many boundaries are less than or equal to it.

    With boundaries `[0, 10]` the buckets are `(-inf, 0)`, `[0, 10)` and `[10, inf)`, numbered from 0, as in
    `keras.layers.Discretization`. NaN is in no bucket: it gives null.

    Args:
        values: `[n]` numbers.
        boundaries: ascending numbers.

    Returns:
        int64 `[n]`.
    """
    edges = check_boundaries(boundaries)
    numbers = _as_double(values)
    plain = numbers.fill_null(np.nan).to_numpy(zero_copy_only=False)
    return pa.array(
        np.searchsorted(edges, plain, side="right").astype(np.int64), type=pa.int64(), mask=np.isnan(plain)
    )


def log1p(values: Any) -> pa.FloatArray:
    """`ln(1 + max(x, 0))`: the scale on which counts enter a model. NaN gives null.

    Args:
        values: `[n]` numbers.

    Returns:
        float32 `[n]`.
    """
    plain = _as_double(values).fill_null(np.nan).to_numpy(zero_copy_only=False)
    return pa.array(log1p_array(plain), type=pa.float32(), mask=np.isnan(plain))


def log1p_array(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """`log1p` on a numpy array `[n]`, computed in float64."""
    return np.log1p(np.maximum(values.astype(np.float64), 0.0)).astype(np.float32)


def split(values: Any, separator: str) -> pa.ListArray:
    """Split multi-valued strings such as `Action|Comedy`; empty parts are dropped, null gives an empty list.

    Args:
        values: `[n]` strings.
        separator: the plain text (no pattern) between two values.
    """
    lists = pc.split_pattern(as_text(values).cast(pa.string()).fill_null(""), separator)
    elements = lists.flatten()
    keep = pc.not_equal(elements, "")
    parents = pc.list_parent_indices(lists).filter(keep).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(np.bincount(parents, minlength=len(lists)), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), elements.filter(keep))


def check_boundaries(boundaries: Sequence[float] | npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Boundaries as float64, or a ValueError where they do not ascend."""
    edges = np.asarray(boundaries, dtype=np.float64)
    if edges.ndim != 1 or edges.size == 0 or np.isnan(edges).any() or not np.all(np.diff(edges) > 0):
        raise ValueError(f"boundaries must be ascending numbers, at least one. Received: {edges.tolist()}")
    return edges


def as_text(values: Any) -> pa.Array:
    """Strings as they are, integers and booleans as text; a TypeError for other types."""
    array = _combined(values)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        return array
    if pa.types.is_large_string(array.type) or pa.types.is_string_view(array.type):
        return array.cast(pa.string())
    if pa.types.is_large_binary(array.type) or pa.types.is_binary_view(array.type):
        return array.cast(pa.binary())
    if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type) or pa.types.is_null(array.type):
        return array.cast(pa.string())
    raise TypeError(
        f"Only strings, bytes and integers can be hashed: cast the column first. Received: {array.type}"
    )


def _as_double(values: Any) -> pa.DoubleArray:
    array = _combined(values)
    if not (
        pa.types.is_integer(array.type)
        or pa.types.is_floating(array.type)
        or pa.types.is_boolean(array.type)
        or pa.types.is_decimal(array.type)
        or pa.types.is_null(array.type)
    ):
        raise TypeError(
            f"Only numbers can be bucketed or logged: cast the column first. Received: {array.type}"
        )
    return array.cast(pa.float64(), safe=False)


def _combined(values: Any) -> pa.Array:
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, from_pandas=True)
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _null_mask(array: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(pc.is_null(array).to_numpy(zero_copy_only=False), dtype=np.bool_)
