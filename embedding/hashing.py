"""Keys: string fingerprints, placement buckets, and de-duplication, in C++ without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import deeprec_spark.embedding._core as _core

Int64Array = npt.NDArray[np.int64]

NUM_BUCKETS: int = _core.NUM_BUCKETS
"""Virtual buckets that place keys; server `bucket * num_servers // NUM_BUCKETS` holds a bucket."""


def as_keys(keys: npt.ArrayLike, name: str = "keys") -> Int64Array:
    """Keys as a contiguous int64 array `[n]`; a TypeError or ValueError names what cannot be keys.

    Narrower integers are widened. Floats are refused, and so is uint64, which int64 cannot hold.
    """
    array = np.asarray(keys)
    if array.size == 0 and not isinstance(keys, np.ndarray):
        array = array.astype(np.int64)
    if not np.can_cast(array.dtype, np.int64, "safe") or array.dtype == np.bool_:
        raise TypeError(f"{name} must be integers that fit int64. Received: dtype={array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis. Received: shape={array.shape}")
    return np.ascontiguousarray(array, dtype=np.int64)


def bucket(keys: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Virtual bucket of each key: int64 `[n]` to int32 `[n]` within [0, NUM_BUCKETS)."""
    result: npt.NDArray[np.int32] = _core.bucket(as_keys(keys))
    return result


def unique(keys: npt.ArrayLike) -> tuple[Int64Array, npt.NDArray[np.int32], Int64Array]:
    """Distinct keys in the order of first occurrence.

    Args:
        keys: int64 `[n]`; every value is legal.

    Returns:
        The distinct keys int64 `[u]`, the position of every key among them int32 `[n]`, and how often each
        occurs int64 `[u]`.

    Example:
        >>> keys, inverse, counts = unique([7, -1, 7])
        >>> keys.tolist(), inverse.tolist(), counts.tolist()
        ([7, -1], [0, 1, 0], [2, 1])
    """
    return unique_many([keys])[0]


def unique_many(
    batches: Sequence[npt.ArrayLike],
) -> list[tuple[Int64Array, npt.NDArray[np.int32], Int64Array]]:
    """`unique` of several arrays in one call, in parallel."""
    return list(_core.unique_many([as_keys(keys) for keys in batches]))


def fingerprint64(values: pa.StringArray | pa.BinaryArray | pa.ChunkedArray) -> Int64Array:
    """FarmHash Fingerprint64 of each string: int64 `[n]`, equal to `tf.bitcast(tf.fingerprint(x), tf.int64)`.

    Args:
        values: strings (taken as UTF-8) or bytes, plain or large, without nulls.

    Raises:
        TypeError: for another type.
        ValueError: for nulls; give them a default first.

    Example:
        >>> fingerprint64(pa.array(["a", ""])).tolist()
        [-5528939962900187677, -7286425919675154353]
    """
    if isinstance(values, pa.ChunkedArray):
        parts = [fingerprint64(chunk) for chunk in values.chunks]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not isinstance(values, pa.Array) or not _is_binary(values.type):
        kind = values.type if isinstance(values, pa.Array) else type(values).__name__
        raise TypeError(f"fingerprint64 takes a pyarrow string or binary array. Received: {kind}")
    if values.null_count:
        raise ValueError(
            f"fingerprint64 has no value for null; fill nulls with a default first. Received: {values.null_count} nulls"
        )
    large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    _, offset_buffer, data_buffer = values.buffers()
    if len(values) == 0 or offset_buffer is None:
        return np.empty(0, np.int64)
    width: Any = np.int64 if large else np.int32
    offsets = np.frombuffer(offset_buffer, width)[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    result: Int64Array = _core.fingerprint64(data, offsets.astype(np.int64))
    return result


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )
