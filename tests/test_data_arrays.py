"""Arrays as bytes."""

import numpy as np
import pytest

from deeprec_spark.data.arrays import pack_arrays, unpack_arrays


def test_round_trip_keeps_shape_dtype_and_order() -> None:
    arrays = [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.float32(1.5).reshape(()),
        np.zeros((0, 4), np.float64),
    ]
    arrays += [np.full(1, i) for i in range(12)]
    found = unpack_arrays(pack_arrays(arrays))
    assert len(found) == len(arrays)
    for mine, theirs in zip(arrays, found, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(mine, theirs)


def test_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        unpack_arrays(pack_arrays([np.array([{"a": 1}], dtype=object)]))
