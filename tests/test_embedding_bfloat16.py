"""bfloat16 as the rest of the world has it: rounded to the nearest even, NaN stays NaN."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from deeprec_spark.embedding import _core


def test_all_kinds_of_floats_become_what_ml_dtypes_makes_of_them() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0, 0x7F7FFFFF, 0x7F800000, 0x3F808000, 0x3F818000, 0x00000001, 0x007FFFFF], np.uint32)
    values = np.concatenate([bits, edges, edges | 0x80000000]).view(np.float32)
    values = values[~np.isnan(values)]
    narrow = _core.to_bfloat16([values[:1000], values[1000:1000], values[1000:]])
    with np.errstate(over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    assert np.array_equal(narrow, expected.view(np.uint16))
    assert np.array_equal(_core.from_bfloat16(narrow), expected.astype(np.float32))


def test_a_nan_stays_one() -> None:
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(_core.from_bfloat16(_core.to_bfloat16([nans]))).all()


def test_nothing() -> None:
    assert _core.to_bfloat16([]).shape == (0,)
    assert _core.from_bfloat16(np.empty(0, np.uint16)).shape == (0,)
