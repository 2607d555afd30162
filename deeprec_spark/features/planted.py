"""Criteo-like data with a planted truth, in numpy: every value is a pure function of seed, column and row.

The probability of a click is known for each row, and with it the best AUC that any model can reach. No
import of Spark here: benchmarks and worker processes use it too; `synthetic` wraps it for Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

NUM_DENSE = 13
# Sizes of the 26 vocabularies: most are small, four have a long tail; in all about 26,000 ids.
CARDINALITIES = (
    *(60, 60, 20_000, 60, 60, 20, 2_000, 60, 3, 1_000, 60, 60, 60),
    *(26, 60, 2_000, 10, 60, 60, 4, 60, 15, 12, 60, 50, 60),
)
# Share of missing values, where a column has some.
MISSING_CATEGORY = {2: 0.03, 5: 0.12, 18: 0.4, 21: 0.75, 25: 0.4}
MISSING_DENSE = {0: 0.45, 2: 0.2, 5: 0.2, 9: 0.45, 11: 0.75}
# Pairs of columns whose combination matters beyond its parts.
INTERACTIONS = ((5, 8), (13, 19), (16, 21), (22, 8))
ZIPF_EXPONENT = 1.1
# Tuned so that a DeepFM comes within 0.015 of the best AUC on 160,000 rows in one epoch: effects lie on the most
# frequent ids (rarer ones cannot be learned from so little data), and pairs are weak beside their parts.
_KNOWN_RANKS = 30
_INTERCEPT = -1.7
_SLOPE = 0.18
_EFFECT = 0.35
_LONG_TAIL_EFFECT = 0.2
_PAIR_EFFECT = 0.12

__all__ = ["CARDINALITIES", "NUM_DENSE", "PlantedRows", "criteo_like_batches", "exact_auc", "planted_rows"]


@dataclass(frozen=True)
class PlantedRows:
    """Rows of generated data.

    `dense` is float64 `[n, 13]` (NaN where missing), `ranks` int64 `[n, 26]`: the frequency rank of each id in
    its column, from 0, -1 where missing; `probability` float64 `[n]`; `label` int8 `[n]`.
    """

    dense: Float64Array
    ranks: Int64Array
    probability: Float64Array
    label: npt.NDArray[np.int8]


def planted_rows(rows: npt.ArrayLike, seed: int = 0) -> PlantedRows:
    """Make the rows of these numbers.

    logit = intercept + effects of the 26 ids + effects of the 13 counts + effects of 4 pairs of ids;
    label ~ Bernoulli(sigmoid(logit)).

    Args:
        rows: row numbers `[n]`; equal numbers give equal rows, whatever else is asked for.
        seed: of the whole data set, truth included.

    Example:
        >>> data = planted_rows(np.arange(1000), seed=1)
        >>> data.ranks.shape, round(exact_auc(data.label, data.probability), 1)
        ((1000, 26), 0.8)
    """
    number = np.asarray(rows, dtype=np.uint64)
    size = len(number)
    ranks = np.empty((size, len(CARDINALITIES)), np.int64)
    dense = np.empty((size, NUM_DENSE))
    logit = np.full(size, _INTERCEPT)
    for column, cardinality in enumerate(CARDINALITIES):
        rank = zipf_ranks(uniform(seed, "rank", column, number), cardinality)
        missing = uniform(seed, "missing id", column, number) < MISSING_CATEGORY.get(column, 0.0)
        ranks[:, column] = np.where(missing, -1, rank)
        logit += id_effects(ranks[:, column], column, seed)
    for left, right in INTERACTIONS:
        logit += pair_effects(ranks[:, left], ranks[:, right], left, right, seed)
    for column in range(NUM_DENSE):
        spread = 0.6 + 0.15 * (column % 5)
        log_count = 1.5 + 0.25 * column + spread * normal(seed, "count", column, number)
        count = np.floor(np.exp(log_count))
        if column == 1:
            count -= 3  # Criteo's second count goes below 0
        missing = uniform(seed, "missing count", column, number) < MISSING_DENSE.get(column, 0.0)
        dense[:, column] = np.where(missing, np.nan, count)
        slope = _SLOPE * normal(seed, "slope", column, np.zeros(1, np.uint64))[0]
        scaled = np.log1p(np.maximum(np.nan_to_num(dense[:, column]), 0.0)) - (1.5 + 0.25 * column)
        logit += slope * scaled
    probability = 1.0 / (1.0 + np.exp(-logit))
    label = (uniform(seed, "label", 0, number) < probability).astype(np.int8)
    return PlantedRows(dense=dense, ranks=ranks, probability=probability, label=label)


def id_effects(ranks: Int64Array, column: int, seed: int) -> Float64Array:
    """What each id adds to the logit: 0 for missing and for rare ids. `[n]`"""
    strength = _EFFECT if CARDINALITIES[column] <= 1_000 else _LONG_TAIL_EFFECT
    known = (ranks >= 0) & (ranks < _KNOWN_RANKS)
    return np.where(known, strength * normal(seed, "effect", column, ranks.astype(np.uint64)), 0.0)


def pair_effects(left: Int64Array, right: Int64Array, first: int, second: int, seed: int) -> Float64Array:
    """What a pair of ids adds to the logit beyond its parts; 0 where one is missing. `[n]`"""
    known = (left >= 0) & (right >= 0)
    pair = (left * CARDINALITIES[second] + right).astype(np.uint64)
    return np.where(known, _PAIR_EFFECT * normal(seed, "pair", first * 64 + second, pair), 0.0)


def id_codes(ranks: Int64Array, column: int, seed: int) -> npt.NDArray[np.uint32]:
    """Criteo's ids are 32-bit codes: a bijection of (column, rank), so no two ids of a column collide. `[n]`"""
    code = (ranks.astype(np.uint32) ^ np.uint32(stream(seed, "code", column) & np.uint64(0xFFFFFFFF))).copy()
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        code ^= code >> np.uint32(shift)
        code *= np.uint32(factor)
    return code ^ (code >> np.uint32(16))


def criteo_like_batches(
    batch_size: int,
    num_batches: int,
    *,
    seed: int = 0,
    total_ids: int = 5_200_000,
    num_columns: int = 26,
    exponent: float = 1.1,
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Batches for benchmarks, made fast: Zipf ids without meaning, `total_ids` over all columns.

    Yields:
        `dense` float32 `[batch_size, 13]`, `ids` int64 `[batch_size, num_columns]` with the ids of column c in
        `[c * n, (c + 1) * n)` where n = total_ids // num_columns, `label` float32 `[batch_size]`.

    Example:
        >>> batch = next(criteo_like_batches(512, 1))
        >>> batch["ids"].shape, int(batch["ids"].max()) < 5_200_000
        ((512, 26), True)
    """
    generator = np.random.default_rng(seed)
    per_column = total_ids // num_columns
    offsets = np.arange(num_columns, dtype=np.int64) * per_column
    for _ in range(num_batches):
        ranks = zipf_ranks(generator.random((batch_size, num_columns)), per_column, exponent)
        # Frequent ids lie all over the range, not side by side: no help from the cache that real ids do not give.
        scattered = (ranks * 2_654_435_761 + 97) % per_column
        yield {
            "dense": generator.standard_normal((batch_size, NUM_DENSE), dtype=np.float32),
            "ids": scattered + offsets,
            "label": (generator.random(batch_size) < 0.25).astype(np.float32),
        }


def exact_auc(label: npt.ArrayLike, score: npt.ArrayLike) -> float:
    """The area under the ROC curve, exactly: the share of (positive, negative) pairs in order, ties as one half.

    Raises:
        ValueError: only one class is there.

    Example:
        >>> exact_auc([0, 1, 1, 0], [0.1, 0.9, 0.4, 0.4])
        0.875
    """
    positive = np.asarray(label) > 0.5
    values, inverse = np.unique(np.asarray(score), return_inverse=True)
    positives = np.bincount(inverse, weights=positive, minlength=len(values))
    negatives = np.bincount(inverse, weights=~positive, minlength=len(values))
    if not positives.sum() or not negatives.sum():
        raise ValueError(
            f"AUC needs both classes. Received: {int(positives.sum())} positive of {len(positive)}"
        )
    below = np.cumsum(negatives) - negatives
    in_order = float(np.sum(positives * (below + negatives / 2)))
    return in_order / float(positives.sum() * negatives.sum())


def zipf_ranks(uniforms: Float64Array, cardinality: int, exponent: float = ZIPF_EXPONENT) -> Int64Array:
    """Uniform numbers in [0, 1) to ranks in [0, cardinality), rank r about as often as (r + 1) ** -exponent."""
    power = 1.0 - exponent
    last = (cardinality + 1.0) ** power
    ranks = (1.0 + uniforms * (last - 1.0)) ** (1.0 / power)
    return np.asarray(np.minimum(ranks.astype(np.int64) - 1, cardinality - 1))


def mix64(values: UInt64Array) -> UInt64Array:
    """A bijection of 64-bit numbers that leaves no pattern (the finalizer of splitmix64)."""
    mixed = values ^ (values >> np.uint64(30))
    mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
    mixed = mixed ^ (mixed >> np.uint64(27))
    mixed = mixed * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def stream(seed: int, purpose: str, column: int) -> np.uint64:
    """A number for each stream of randomness: seed, purpose and column apart."""
    text = np.frombuffer(f"{seed}/{purpose}/{column}".encode(), np.uint8).astype(np.uint64)
    value = np.zeros(1, np.uint64)
    for byte in text:  # a dozen characters, not rows
        value = mix64(value * np.uint64(31) + byte + np.uint64(0x9E3779B97F4A7C15))
    return np.uint64(value[0])


def uniform(seed: int, purpose: str, column: int, index: UInt64Array) -> Float64Array:
    """Uniform in [0, 1), a pure function of its arguments. `[n]`"""
    start = np.asarray([stream(seed, purpose, column)], np.uint64)
    mixed = mix64(mix64(index + np.uint64(0x9E3779B97F4A7C15)) ^ start)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(seed: int, purpose: str, column: int, index: UInt64Array) -> Float64Array:
    """Standard normal, a pure function of its arguments (Box and Muller). `[n]`"""
    first = uniform(seed, purpose + "/1", column, index)
    second = uniform(seed, purpose + "/2", column, index)
    return np.asarray(np.sqrt(-2.0 * np.log1p(-first)) * np.cos(2.0 * np.pi * second))
