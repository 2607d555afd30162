"""MultiHashVariable and AdaptiveEmbedding: variables composed of several tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deeprec_spark.embedding import _core
from deeprec_spark.embedding.adaptive import AdaptiveEmbedding
from deeprec_spark.embedding.multi_hash import MultiHashVariable
from deeprec_spark.embedding.optimizers import SGD, Adagrad
from deeprec_spark.embedding.options import (
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    StorageOption,
    StorageType,
    TimeEvict,
)

# MultiHashVariable


@pytest.mark.parametrize("dims", [[(7, 4), (5, 4)], [(3, 4), (4, 4), (5, 4)]])
def test_distinct_ids_get_distinct_combinations(dims: list[tuple[int, int]]) -> None:
    table = MultiHashVariable("t", dims, complementary_strategy="mixed-radix")
    ids = np.arange(table.capacity)
    digits = table.digits(ids)
    assert len(set(zip(*(digit.tolist() for digit in digits), strict=True))) == table.capacity
    for digit, (rows, _) in zip(digits, dims, strict=True):
        assert set(digit.tolist()) == set(range(rows))
    # And no row of any table is ever made beyond its size.
    table.lookup(ids, train=True)
    assert [len(one) for one in table.tables] == [rows for rows, _ in dims]


@pytest.mark.parametrize("operation", ["add", "mult", "concat"])
def test_lookup_combines_and_gradients_follow_the_chain_rule(operation: str) -> None:
    dims = [(10, 3), (10, 3 if operation != "concat" else 2), (10, 3 if operation != "concat" else 4)]
    table = MultiHashVariable(
        "t", dims, complementary_strategy="mixed-radix", operation=operation, optimizer=SGD(1.0), seed=3
    )
    ids = np.array([5, 15, 905, 5])
    before = [one.lookup(np.arange(10)).astype(np.float64) for one in table.tables]
    digits = table.digits(ids)
    parts = [rows[digit] for rows, digit in zip(before, digits, strict=True)]
    combine = {"add": np.sum, "mult": np.prod, "concat": None}[operation]
    expected = np.concatenate(parts, axis=1) if combine is None else combine(parts, axis=0)
    np.testing.assert_allclose(table.lookup(ids, train=True), expected, rtol=1e-5)
    gradients = np.random.default_rng(0).normal(size=expected.shape)
    table.apply_gradients(ids, gradients, step=1)
    offsets = np.cumsum([0, *(dim for _, dim in dims)])
    for i, (one, digit) in enumerate(zip(table.tables, digits, strict=True)):
        change = np.zeros_like(before[i])
        for row, at in enumerate(digit):
            part = gradients[row]
            if operation == "concat":
                part = part[offsets[i] : offsets[i + 1]]
            if operation == "mult":
                for j, other in itertools.product(range(3), [row]):
                    part = part if i == j else part * parts[j][other]
            change[at] -= part
        np.testing.assert_allclose(one.lookup(np.arange(10)), before[i] + change, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dims": [(2, 2)]}, "needs two tables"),
        ({"dims": [(2, 2)] * 3}, "needs two tables"),
        ({"dims": [(2, 2), (2, 3)]}, "tables of one dimension"),
        ({"dims": [(2, 2), (0, 2)]}, "at least one row"),
        ({"dims": [(2, 2)] * 2, "operation": "min"}, "operation='min'"),
        ({"dims": [(2, 2)] * 2, "complementary_strategy": "hash"}, "complementary_strategy='hash'"),
    ],
)
def test_multi_hash_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHashVariable("t", **arguments)  # type: ignore[arg-type]  # on purpose


def test_ids_beyond_the_capacity_are_named() -> None:
    table = MultiHashVariable("t", [(10, 2), (10, 2)])
    with pytest.raises(ValueError, match=r"within \[0, 100\).*from -1 to 100"):
        table.lookup([-1, 100])
    assert table.lookup([]).shape == (0, 2)
    with pytest.raises(ValueError, match=r"shape=\(1, 3\)"):
        table.apply_gradients([1], np.zeros((1, 3)), step=1)


# AdaptiveEmbedding


def _adaptive(buckets: int = 4, freq: int = 3, **options: object) -> AdaptiveEmbedding:
    option = EmbeddingVariableOption(**options)  # type: ignore[arg-type]  # by name
    return AdaptiveEmbedding(
        "t", 4, hash_bucket_size=buckets, promote_freq=freq, option=option, optimizer=Adagrad(0.5)
    )


def test_cold_ids_share_rows_and_their_gradients() -> None:
    table = _adaptive(buckets=1, freq=100)
    rows = table.lookup([1, 2, -3], train=True)
    assert (rows == rows[0]).all()
    table.apply_gradients([1, 2], np.ones((2, 4)), step=1)
    expected = rows[0] - 0.5 * 2 / np.sqrt(0.1 + 4)
    np.testing.assert_allclose(table.lookup([-3])[0], expected, rtol=1e-5)
    assert (len(table.own), len(table.shared)) == (0, 1)


def test_a_hot_id_goes_on_from_the_shared_row_and_its_slots() -> None:
    table = _adaptive(buckets=1)
    table.lookup([1, 2], train=True)
    table.apply_gradients([1], np.ones((1, 4)), step=1)
    learned = table.lookup([1])[0]
    promoted = table.lookup([1, 1], train=True)  # its third occurrence
    np.testing.assert_array_equal(promoted, [learned, learned])
    own = next(table.own.export())
    assert (own.key.tolist(), own.frequency.tolist(), own.version.tolist()) == ([1], [3], [1])
    np.testing.assert_allclose(own.slots["accumulator"], 1.1, rtol=1e-6)
    # From now on the two part.
    table.apply_gradients([1, 2], np.array([[2.0] * 4, [-3.0] * 4]), step=2)
    np.testing.assert_allclose(table.lookup([1])[0], learned - 0.5 * 2 / np.sqrt(1.1 + 4), rtol=1e-5)
    np.testing.assert_allclose(table.lookup([2])[0], learned + 0.5 * 3 / np.sqrt(1.1 + 9), rtol=1e-5)


def test_promotions_of_many_ids_in_one_batch() -> None:
    table = _adaptive(buckets=16)
    ids = np.arange(-2000, 2000)
    shared = table.lookup(ids, train=True)
    table.lookup(ids, train=True)
    np.testing.assert_array_equal(table.lookup(ids, train=True), shared)
    assert len(table.own) == len(ids)
    assert len(table.shared) == 16
    assert np.bincount(table.shared_keys(ids)).min() > 150


def test_an_evicted_id_is_cold_again() -> None:
    table = _adaptive(freq=1, evict_option=GlobalStepEvict(2))
    table.lookup([5], train=True)
    table.apply_gradients([5], np.ones((1, 4)), step=1)
    assert table.evict(9).tolist() == [5]
    assert len(table.shared) == 1
    assert not np.array_equal(table.lookup([5]), np.zeros((1, 4)))


def test_adaptive_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="promote_freq=0"):
        _adaptive(freq=0)
    with pytest.raises(ValueError, match="promote_freq is the filter"):
        _adaptive(filter_option=CounterFilter(2))
    with pytest.raises(ValueError, match=r"shape=\(1, 3\)"):
        _adaptive().apply_gradients([1], np.zeros((1, 3)), step=1)


def test_an_error_half_way_loses_nothing_that_the_shared_row_learned() -> None:
    """Rows made before the error counted as promoted, with start values."""
    option = EmbeddingVariableOption(
        storage_option=StorageOption(StorageType.DRAM, storage_size=(64 * 20 * 40,))
    )
    table = AdaptiveEmbedding(
        "a",
        4,
        hash_bucket_size=1,
        promote_freq=2,
        optimizer=SGD(1.0),
        option=option,
    )
    ids = np.arange(3000)
    table.lookup(ids, train=True)
    table.apply_gradients([0], np.full((1, 4), -100.0), step=1)
    learned = table.lookup([5000])
    with pytest.raises(_core.StorageFullError, match="Table 'a/own'"):
        table.lookup(ids, train=True)
    own = ids[table.own.contains(ids)]
    assert 0 < len(own) < len(ids)
    np.testing.assert_array_equal(table.lookup(own), np.repeat(learned, len(own), axis=0))
    # Until they have taken the shared row over, they learn with it.
    table.apply_gradients(own[:1], np.full((1, 4), -1.0), step=2)
    np.testing.assert_allclose(table.lookup([5000]), learned + 1)
    np.testing.assert_allclose(table.lookup(own, train=True), np.repeat(learned + 1, len(own), axis=0))
    table.apply_gradients(own[:1], np.full((1, 4), -1.0), step=3)
    np.testing.assert_allclose(table.lookup(own[:2]), np.concatenate([learned + 2, learned + 1]))
    np.testing.assert_allclose(table.lookup([5000]), learned + 1)


def test_composed_tables_take_the_time_of_an_update() -> None:
    option = EmbeddingVariableOption(evict_option=TimeEvict(60))
    adaptive = AdaptiveEmbedding("a", 4, hash_bucket_size=1, promote_freq=1, option=option)
    adaptive.lookup([1, 2], train=True)
    for key, now in ((1, 1000.0), (2, 1050.0)):
        adaptive.apply_gradients([key], np.ones((1, 4)), step=1, now=now)
    assert adaptive.evict(2, now=1061.0).tolist() == [1]
    multi = MultiHashVariable("m", [(4, 4), (4, 4)], option=option)
    multi.apply_gradients([0], np.ones((1, 4)), step=1, now=1000.0)
    assert [next(table.export()).time.tolist() for table in multi.tables] == [[1000]] * 2  # type: ignore[union-attr]  # it has times
