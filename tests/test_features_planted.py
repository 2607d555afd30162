"""The planted truth: pure functions, known AUC."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeprec_spark.features.planted import (
    CARDINALITIES,
    criteo_like_batches,
    exact_auc,
    id_codes,
    planted_rows,
    zipf_ranks,
)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=25))
def test_exact_auc_is_the_share_of_ordered_pairs(pairs: list[tuple[bool, int]]) -> None:
    positives = [score for label, score in pairs if label]
    negatives = [score for label, score in pairs if not label]
    labels, scores = [label for label, _ in pairs], [score for _, score in pairs]
    if not positives or not negatives:
        with pytest.raises(ValueError, match="both classes"):
            exact_auc(labels, scores)
        return
    won = sum((p > n) + 0.5 * (p == n) for p, n in itertools.product(positives, negatives))
    assert exact_auc(labels, scores) == pytest.approx(won / len(positives) / len(negatives))


def test_rows_are_pure_functions_of_their_numbers() -> None:
    whole, part = planted_rows(np.arange(500), seed=3), planted_rows(np.array([499, 7]), seed=3)
    np.testing.assert_array_equal(part.ranks, whole.ranks[[499, 7]])
    np.testing.assert_array_equal(part.dense, whole.dense[[499, 7]])
    np.testing.assert_array_equal(part.probability, whole.probability[[499, 7]])
    np.testing.assert_array_equal(part.label, whole.label[[499, 7]])
    assert (planted_rows(np.arange(500), seed=4).ranks != whole.ranks).any()


def test_labels_follow_the_planted_probability() -> None:
    data = planted_rows(np.arange(40_000))
    for low in np.arange(0.0, 1.0, 0.2):
        inside = (data.probability >= low) & (data.probability < low + 0.2)
        count, mean = int(inside.sum()), float(data.probability[inside].mean())
        assert count > 300
        assert abs(float(data.label[inside].mean()) - mean) < 5 * np.sqrt(mean * (1 - mean) / count)
    assert 0.8 < exact_auc(data.label, data.probability) < 0.9
    assert (data.ranks < np.array(CARDINALITIES)).all()
    assert (data.ranks >= -1).all()


def test_zipf_ranks_have_their_frequencies() -> None:
    ranks = zipf_ranks(np.random.default_rng(0).random(400_000), 1000, 1.1)
    counts = np.bincount(ranks, minlength=1000)
    assert counts.min() > 0
    # Each rank has the mass of the density x ** -1.1 over [rank + 1, rank + 2).
    mass = np.diff(np.arange(1, 1002, dtype=float) ** -0.1)
    np.testing.assert_allclose(counts[:20] / 400_000, (mass / mass.sum())[:20], rtol=0.05)


@given(st.integers(0, 25), st.integers(0, 10))
def test_no_two_ids_of_a_column_share_a_code(column: int, seed: int) -> None:
    codes = id_codes(np.arange(20_000), column, seed)
    assert len(np.unique(codes)) == 20_000


def test_benchmark_batches() -> None:
    first, second = criteo_like_batches(4096, 2, seed=1)
    assert (first["dense"].dtype, first["ids"].dtype, first["label"].dtype) == ("float32", "int64", "float32")
    assert first["dense"].shape == (4096, 13)
    columns = first["ids"] // (5_200_000 // 26)
    assert (columns == np.arange(26)).all()
    assert (first["ids"] != second["ids"]).any()
    repeated = next(criteo_like_batches(4096, 1, seed=1))
    np.testing.assert_array_equal(repeated["ids"], first["ids"])
    share = len(np.unique(first["ids"])) / first["ids"].size
    assert 0.2 < share < 0.6  # Zipf: much is repeated, much is rare
