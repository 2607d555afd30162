"""The feature functions on plain arrays."""

from __future__ import annotations

import math
import struct

import farmhash
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeprec_spark.udfs import functions

NUMBERS = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(-100, 100))


def expected_hash(text: str | bytes) -> int:
    return int(np.uint64(farmhash.fingerprint64(text)).astype(np.int64))


@given(st.lists(st.one_of(st.none(), st.text(alphabet=st.characters(exclude_categories=["Cs"])))))
def test_fingerprint64_is_farmhash_and_null_is_null(texts: list[str | None]) -> None:
    found = functions.fingerprint64(pa.array(texts, pa.string())).to_pylist()
    assert found == [None if text is None else expected_hash(text) for text in texts]


@pytest.mark.parametrize(
    "values",
    [
        ["a", None, ""],
        pd.Series(["a", None, ""]),
        np.array(["a", None, ""], dtype=object),
        pa.chunked_array([["a"], [None, ""]]),
        pa.array(["a", None, ""]).dictionary_encode(),
        pa.array(["a", None, ""], pa.large_string()),
        pa.array([b"a", None, b""]),
        pa.array(["x", "a", None, ""])[1:],
    ],
    ids=["list", "series", "object", "chunked", "dictionary", "large", "bytes", "slice"],
)
def test_fingerprint64_of_every_kind_of_array(values: object) -> None:
    assert functions.fingerprint64(values).to_pylist() == [expected_hash("a"), None, expected_hash("")]


def test_integers_are_hashed_as_their_digits_and_floats_refused() -> None:
    assert functions.fingerprint64([-(2**63), None]).to_pylist() == [expected_hash(str(-(2**63))), None]
    with pytest.raises(TypeError, match=r"cast the column first\. Received: double"):
        functions.fingerprint64([1.5])


def test_lists_drop_null_elements() -> None:
    lists = pa.array([["a", None], None, [], ["b", "c"]], pa.list_(pa.string()))
    expected = [[expected_hash("a")], [], [], [expected_hash("b"), expected_hash("c")]]
    assert functions.fingerprint64_lists(lists).to_pylist() == expected
    assert functions.fingerprint64_lists(lists[2:]).to_pylist() == expected[2:]


def test_cross_is_the_hash_of_the_joined_texts() -> None:
    crossed = functions.cross64(["a", "a", None], pa.array([7, None, 7], pa.int64()), ["x", "y", "z"])
    assert crossed.to_pylist() == [expected_hash("a\x1f7\x1fx"), None, None]
    with pytest.raises(ValueError, match="at least two"):
        functions.cross64(["a"])


@given(
    st.lists(NUMBERS, max_size=20),
    st.lists(st.floats(-50, 50), min_size=1, max_size=6, unique=True).map(sorted),
)
def test_bucketize_counts_the_edges_below(numbers: list[float | None], edges: list[float]) -> None:
    found = functions.bucketize(pa.array(numbers, pa.float64()), edges).to_pylist()
    for number, bucket in zip(numbers, found, strict=True):
        if number is None or math.isnan(number):
            assert bucket is None
        else:
            assert bucket == sum(edge <= number for edge in edges)


def test_boundaries_must_ascend() -> None:
    for boundaries in ([], [2, 1], [1, 1], [math.nan]):
        with pytest.raises(ValueError, match="ascending"):
            functions.bucketize([1.0], boundaries)


@given(st.lists(NUMBERS, max_size=20))
def test_log1p_is_clipped_at_zero(numbers: list[float | None]) -> None:
    found = functions.log1p(pa.array(numbers, pa.float64())).to_pylist()
    for number, logged in zip(numbers, found, strict=True):
        if number is None or math.isnan(number):
            assert logged is None
        elif number == math.inf:
            assert logged == math.inf
        else:
            assert logged == struct.unpack("f", struct.pack("f", math.log1p(max(number, 0.0))))[0]


def test_split_takes_a_plain_separator() -> None:
    assert functions.split(["a|b||", "", None, "c"], "|").to_pylist() == [["a", "b"], [], [], ["c"]]
