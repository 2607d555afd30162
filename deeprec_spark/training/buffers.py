"""Arrays that TensorFlow can take and give without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from deeprec_spark.runtime.messages import ALIGNMENT, aligned_empty

# Messages, too, lie so that TensorFlow takes their arrays: it aborts the process on a DLPack import of a worse place.
__all__ = ["ALIGNMENT", "aligned_empty", "as_array", "as_tensor", "concatenate"]


def as_tensor(array: npt.NDArray[Any]) -> Any:
    """The array as a tensor, sharing memory where that is safe; do not write to `array` afterwards."""
    shareable = (
        array.size > 0
        and array.flags.c_contiguous
        and array.flags.writeable
        and array.ctypes.data % ALIGNMENT == 0
        and array.dtype.kind in "if"
        and array.dtype.isnative
    )
    if shareable:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array)


def as_array(tensor: Any) -> npt.NDArray[Any]:
    """The tensor's values as a read-only array that shares its memory and keeps it alive."""
    return np.asarray(memoryview(tensor))


def concatenate(
    arrays: Sequence[npt.NDArray[Any]], tail: tuple[int, ...], dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """The arrays one after the other, aligned; uncopied, if they lie so already."""
    filled = [array for array in arrays if array.size]
    if filled and filled[0].ctypes.data % ALIGNMENT == 0 and _adjoin(filled, dtype):
        length = sum(len(array) for array in filled)
        return np.lib.stride_tricks.as_strided(
            filled[0].reshape(-1), (length * math.prod(tail),), (np.dtype(dtype).itemsize,)
        ).reshape(length, *tail)
    result = aligned_empty((sum(len(array) for array in arrays), *tail), dtype)
    if arrays:
        np.concatenate(arrays, out=result)
    return result


def _adjoin(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> bool:
    """Whether these are contiguous and lie one after the other in the memory of one owner, which each keeps alive."""
    owner = arrays[0].base
    end = arrays[0].ctypes.data
    for array in arrays:
        if array.dtype != dtype or not array.flags.c_contiguous:
            return False
        if len(arrays) > 1 and (owner is None or array.base is not owner or array.ctypes.data != end):
            return False
        end += array.nbytes
    return True
