"""Arrays as bytes, without pickle: what nodes and tasks hand to the driver."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def pack_arrays(arrays: Sequence[npt.NDArray[Any]]) -> bytes:
    """Arrays of any shape and numeric dtype as one npz blob.

    Example:
        >>> [array.tolist() for array in unpack_arrays(pack_arrays([np.arange(2), np.zeros((1, 1))]))]
        [[0, 1], [[0.0]]]
    """
    stream = io.BytesIO()
    np.savez(stream, *arrays)
    return stream.getvalue()


def unpack_arrays(blob: bytes) -> list[npt.NDArray[Any]]:
    """The arrays of `pack_arrays`, in order; a ValueError for other bytes, pickled objects among them."""
    try:
        with np.load(io.BytesIO(blob), allow_pickle=False) as archive:
            return [archive[f"arr_{index}"] for index in range(len(archive.files))]
    except (ValueError, KeyError, OSError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"Not arrays that a node packed: {error}. Received: {len(blob)} bytes") from None
