"""Fingerprints, buckets and de-duplication."""

import random

import farmhash
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket, fingerprint64, unique, unique_many
from tests.embedding_reference import mix64

INT64 = st.integers(-(2**63), 2**63 - 1)
EDGES = [0, 1, -1, -2, -3, 2**63 - 1, -(2**63), -(2**63) + 1, 2**62, 2**32, -(2**32)]


def _strings() -> list[str]:
    rng = random.Random(7)
    made = [
        "".join(chr(rng.choice([rng.randint(32, 126), rng.randint(160, 0x2FFF)])) for _ in range(n))
        for n in range(150)
    ]
    return [*made, "", "a", "ü", "日本語", "\x00", "x" * 1000]


def test_fingerprint_is_farmhash() -> None:
    values = _strings()
    expected = np.array([farmhash.fingerprint64(value) for value in values], np.uint64).view(np.int64)
    for kind in (pa.string(), pa.large_string()):
        np.testing.assert_array_equal(fingerprint64(pa.array(values, kind)), expected)
    np.testing.assert_array_equal(
        fingerprint64(pa.array([v.encode() for v in values], pa.binary())), expected
    )
    np.testing.assert_array_equal(fingerprint64(pa.array(values).slice(40, 17)), expected[40:57])
    chunked = pa.chunked_array([values[:10], values[10:10], values[10:]], pa.string())
    np.testing.assert_array_equal(fingerprint64(chunked), expected)


def test_fingerprint_is_what_tensorflow_computes_in_a_graph() -> None:
    tf = pytest.importorskip("tensorflow")
    values = _strings()
    in_graph = tf.bitcast(tf.fingerprint(tf.constant(values)), tf.int64).numpy().reshape(-1)
    np.testing.assert_array_equal(fingerprint64(pa.array(values)), in_graph)


def test_fingerprint_of_nothing_and_of_wrong_input() -> None:
    assert fingerprint64(pa.array([], pa.string())).shape == (0,)
    assert fingerprint64(pa.chunked_array([], pa.string())).shape == (0,)
    with pytest.raises(ValueError, match=r"Received: 1 nulls"):
        fingerprint64(pa.array(["a", None]))
    with pytest.raises(TypeError, match=r"Received: int64"):
        fingerprint64(pa.array([1]))
    with pytest.raises(TypeError, match=r"Received: list"):
        fingerprint64(["a"])


def test_bucket_is_the_top_of_the_fixed_mixer() -> None:
    """Placement is part of the checkpoint format: it must never change."""
    expected = [mix64(key) >> 54 for key in EDGES]
    assert bucket(EDGES).tolist() == expected
    assert NUM_BUCKETS == 1024
    assert bucket([0, 1, -1, 12345]).tolist() == [0, 346, 723, 973]


def test_buckets_are_even() -> None:
    counts = np.bincount(bucket(np.arange(1 << 17)), minlength=NUM_BUCKETS)
    assert counts.min() > 64
    assert counts.max() < 256


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(INT64, st.sampled_from(EDGES)), max_size=400))
def test_unique_keeps_first_occurrence_order(keys: list[int]) -> None:
    distinct, inverse, counts = unique(np.array(keys, np.int64))
    order = list(dict.fromkeys(keys))
    assert distinct.tolist() == order
    assert [order[i] for i in inverse] == keys
    assert counts.tolist() == [keys.count(key) for key in order]


def test_unique_of_many_and_large() -> None:
    rng = np.random.default_rng(1)
    batches = [rng.integers(-50, 50, 5000), np.empty(0, np.int64), rng.integers(-(2**63), 2**63 - 1, 20000)]
    for keys, (distinct, inverse, counts) in zip(batches, unique_many(batches), strict=True):
        np.testing.assert_array_equal(distinct[inverse], keys)
        expected, expected_counts = np.unique(keys, return_counts=True)
        order = np.argsort(distinct)
        np.testing.assert_array_equal(distinct[order], expected)
        np.testing.assert_array_equal(counts[order], expected_counts)


@pytest.mark.parametrize(
    "keys", [np.array([1.0]), np.array([True]), np.array([1], np.uint64), np.array(["a"])]
)
def test_only_integers_are_keys(keys: np.ndarray) -> None:
    with pytest.raises(TypeError, match="Received: dtype"):
        unique(keys)


def test_narrow_and_strided_integers_are_keys() -> None:
    assert unique(np.array([3, 1, 3], np.int8))[0].tolist() == [3, 1]
    assert unique(np.arange(10, dtype=np.int64)[::3])[0].tolist() == [0, 3, 6, 9]
    assert unique([])[0].shape == (0,)
    with pytest.raises(ValueError, match=r"shape=\(1, 1\)"):
        unique(np.zeros((1, 1), np.int64))
