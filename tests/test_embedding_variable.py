"""EmbeddingVariable: keys, start values, admission, eviction, memory."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from deeprec_spark.embedding import _core
from deeprec_spark.embedding.hashing import bucket
from deeprec_spark.embedding.optimizers import SGD, Adagrad, Adam
from deeprec_spark.embedding.options import (
    Constant,
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    Initializer,
    InitializerOption,
    Normal,
    TruncatedNormal,
    Uniform,
)
from deeprec_spark.embedding.variable import NEVER_UPDATED, EmbeddingVariable, RowBlock
from tests.embedding_reference import mix64

EDGES = np.array([0, -1, -2, -3, 1, 2**63 - 1, -(2**63), -(2**63) + 1, 4096, -4096], np.int64)


def _table(
    dim: int = 4, freq: int = 0, live: int | None = None, start: Initializer | None = None
) -> EmbeddingVariable:
    option = EmbeddingVariableOption(
        filter_option=CounterFilter(freq) if freq else None,
        evict_option=None if live is None else GlobalStepEvict(live),
        init_option=InitializerOption(start or Uniform(), default_value_no_permission=0.5),
    )
    return EmbeddingVariable("t", dim, option=option, optimizer=SGD(1.0))


# Keys


def test_no_key_is_reserved() -> None:
    """HKV #189, HugeCTR 23.12, DeepRec: markers and negative keys broke tables."""
    table = _table()
    values = np.arange(len(EDGES) * 4, dtype=np.float32).reshape(-1, 4)
    assert table.lookup(EDGES).shape == values.shape
    assert len(table) == 0
    table.upsert(EDGES, values)
    np.testing.assert_array_equal(table.lookup(EDGES), values)
    assert len(table) == len(EDGES)
    assert sorted(table.keys()[0]) == sorted(EDGES)
    assert table.erase(EDGES[:5]) == 5
    assert sorted(table.keys()[0]) == sorted(EDGES[5:])
    np.testing.assert_array_equal(table.lookup(EDGES[5:]), values[5:])


def test_empty_batches_are_legal() -> None:
    """An empty batch crashed FBGEMM, Paddle's server and recsys-examples."""
    table = _table(live=1, freq=2)
    nothing = np.empty(0, np.int64)
    assert table.lookup(nothing, train=True).shape == (0, 4)
    table.apply_gradients(nothing, np.empty((0, 4)), step=1)
    table.upsert(nothing, np.empty((0, 4)))
    assert table.erase(nothing) == 0
    assert table.evict(10).shape == (0,)
    assert list(table.export()) == []


def test_an_unseen_key_reads_its_start_value_and_stays_unseen() -> None:
    """HugeCTR: evaluation aborted on a key that training had not seen."""
    table = _table()
    first = table.lookup([77])
    assert len(table) == 0
    np.testing.assert_array_equal(table.lookup([77], train=True), first)
    assert len(table) == 1


def test_the_same_key_reads_the_same_row_everywhere_in_a_batch() -> None:
    """TFRA #239: one id gave different vectors on repeated lookups."""
    table = _table()
    rows = table.lookup(np.full(1000, -5), train=True)
    assert (rows == rows[0]).all()
    assert len(table) == 1
    assert next(table.export()).frequency.tolist() == [1000]


def test_growth_keeps_every_row() -> None:
    table = _table(dim=3)
    keys = np.random.default_rng(0).permutation(np.arange(-60_000, 60_000))
    values = np.stack([keys, keys * 2, keys * 3], 1).astype(np.float32)
    for part in np.array_split(np.arange(len(keys)), 7):
        table.upsert(keys[part], values[part])
    np.testing.assert_array_equal(table.lookup(keys), values)
    assert len(table) == len(keys)


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 16, 17, 64, 100, 2000])
def test_every_width_keeps_rows_apart(dim: int) -> None:
    """torchrec #3673: rows wider than 1024 read as zeros."""
    table = EmbeddingVariable("t", dim, optimizer=Adam(0.1))
    keys = np.arange(200)
    values = np.random.default_rng(dim).normal(size=(200, dim)).astype(np.float32)
    table.upsert(keys, values)
    table.apply_gradients(keys[::2], np.ones((100, dim)), step=1)
    rows = table.lookup(keys)
    np.testing.assert_array_equal(rows[1::2], values[1::2])
    np.testing.assert_allclose(rows[::2], values[::2] - 0.1, atol=1e-5)


def test_results_are_aligned_and_new() -> None:
    table = _table(dim=5)
    results = [table.lookup(np.arange(n), train=True) for n in (1, 3, 1000, 100_000)]
    assert all(rows.ctypes.data % 64 == 0 for rows in results)
    again = table.lookup([0])
    results[0][:] = 99
    np.testing.assert_array_equal(table.lookup([0]), again)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.lookup(np.zeros((2, 2), np.int64)), ValueError, r"shape=\(2, 2\)"),
        (lambda t: t.lookup(np.zeros(2)), TypeError, "dtype=float64"),
        (lambda t: t.lookup([1, 2], counts=[1], train=True), ValueError, "1 counts, 2 keys"),
        (lambda t: t.apply_gradients([1], np.zeros((1, 3)), step=1), ValueError, r"shape=\(1, 3\)"),
        (lambda t: t.apply_gradients([1], np.zeros((1, 4)), step=0), ValueError, "step=0"),
        (lambda t: t.upsert([1, 2], np.zeros((1, 4))), ValueError, r"shape=\(1, 4\)"),
        (lambda t: EmbeddingVariable("t", 0), ValueError, "embedding_dim=0"),
        (lambda t: EmbeddingVariable("t", 2**31), ValueError, f"1 to 65536.*embedding_dim={2**31}"),
    ],
)
def test_errors_name_what_was_received(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(_table())  # type: ignore[operator]  # a lambda


# Start values


def test_start_values_depend_on_seed_and_key_only() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 5000)
    whole = EmbeddingVariable("a", 16, seed=3).lookup(keys, train=True)
    table = EmbeddingVariable("b", 16, seed=3)
    threads = _core.num_threads()
    try:
        _core.set_num_threads(1)
        for part in np.array_split(np.random.default_rng(1).permutation(5000), 9):
            np.testing.assert_array_equal(table.lookup(keys[part], train=True), whole[part])
    finally:
        _core.set_num_threads(threads)
    assert not np.array_equal(EmbeddingVariable("a", 16, seed=4).lookup(keys), whole)
    # A key of the same remainder has another start (DeepRec: congruent modulo 4096, identical).
    assert len(np.unique(whole[:, 0])) > 4900
    # A prefix of a wider row is the narrower row, so a dimension can grow later.
    np.testing.assert_array_equal(EmbeddingVariable("a", 7, seed=3).lookup(keys), whole[:, :7])


def test_start_values_are_fixed_for_ever() -> None:
    """Servers, checkpoints and exported models of other versions must make the same rows."""
    golden = 0x9E3779B97F4A7C15
    for seed, key in ((0, 0), (3, -1), (2**40, 2**63 - 1)):
        base = mix64(mix64(key) ^ mix64(seed + golden))
        expected = []
        for i in range(5):
            draw = mix64(base + (i // 2 + 1) * golden)
            bits = (draw >> 32 if i % 2 == 0 else draw) & 0xFFFFFFFF
            expected.append(-0.05 + (bits >> 8) * 2.0**-24 * 0.1)
        np.testing.assert_allclose(EmbeddingVariable("t", 5, seed=seed).lookup([key])[0], expected, atol=1e-8)


def test_initializers_follow_their_distributions() -> None:
    keys = np.arange(20_000)
    uniform = _table(8, start=Uniform(-1.0, 3.0)).lookup(keys).ravel()
    assert uniform.min() >= -1
    assert uniform.max() < 3
    np.testing.assert_allclose([uniform.mean(), uniform.std()], [1.0, 4 / 12**0.5], atol=0.02)
    normal = _table(8, start=Normal(2.0, 0.5)).lookup(keys).ravel()
    quantiles = np.linspace(0.001, 0.999, 41)
    expected = [NormalDist(2.0, 0.5).inv_cdf(q) for q in quantiles]
    np.testing.assert_allclose(np.quantile(normal, quantiles), expected, atol=0.04)
    cut = _table(8, start=TruncatedNormal(0.0, 1.0)).lookup(keys).ravel()
    assert abs(cut).max() <= 2.0
    np.testing.assert_allclose([cut.mean(), cut.std()], [0.0, 0.8796], atol=0.01)
    assert (_table(8, start=Constant(0.25)).lookup(keys[:10]) == 0.25).all()


# Admission


def test_the_nth_occurrence_gets_the_row_counting_repeats_in_a_batch() -> None:
    table = _table(freq=3, start=Constant(7.0))
    assert (table.lookup([1, 2, 2], train=True) == 0.5).all()
    # Key 2 is at 2: its third occurrence admits it, for every place of the batch. Key 1 is at 1 + 1.
    rows = table.lookup([2, 1, 3, 3, 3], train=True)[:, 0]
    assert rows.tolist() == [7.0, 0.5, 7.0, 7.0, 7.0]
    assert table.stats()["rows"] == 2
    assert table.stats()["filtered"] == 1
    assert table.lookup([1], counts=[1], train=True)[0, 0] == 7.0
    assert table.stats()["filtered"] == 0


def test_counts_weigh_like_repeats() -> None:
    table = _table(freq=5, start=Constant(7.0))
    assert table.lookup([1], counts=[4], train=True)[0, 0] == 0.5
    assert table.lookup([2], counts=[5], train=True)[0, 0] == 7.0
    assert next(table.export()).frequency.tolist() == [5]


def test_reading_does_not_count() -> None:
    table = _table(freq=2)
    for _ in range(5):
        assert (table.lookup([1]) == 0.5).all()
    assert table.stats()["filtered"] == 0


def test_keys_without_permission_take_no_update() -> None:
    table = _table(freq=2, start=Constant(7.0))
    table.lookup([1, 2, 2], train=True)
    table.apply_gradients([1, 2, 3], np.ones((3, 4)), step=1)
    assert table.lookup([1, 2, 3])[:, 0].tolist() == [0.5, 6.0, 0.5]
    assert table.stats()["dropped"] == 2
    table.lookup([1], train=True)
    assert table.lookup([1])[0, 0] == 7.0


def test_counts_saturate() -> None:
    table = _table()
    table.lookup([1], counts=[2**62], train=True)
    table.lookup([1], counts=[2**31], train=True)
    assert next(table.export()).frequency.tolist() == [2**30 - 1]


# Eviction


def test_eviction_is_strict_and_stamps_rows_that_were_never_updated() -> None:
    table = _table(live=10)
    table.lookup([1, 2, 3], train=True)
    table.apply_gradients([1], np.ones((1, 4)), step=5)
    table.apply_gradients([2], np.ones((1, 4)), step=6)
    assert table.evict(15).tolist() == []  # 15 - 5 = 10 is not more than 10; key 3 is stamped with 15
    assert table.evict(16).tolist() == [1]
    assert sorted(table.evict(100).tolist()) == [2, 3]
    assert table.stats()["evicted"] == 3
    assert len(table) == 0


def test_an_evicted_key_starts_anew() -> None:
    table = _table(live=1, freq=2, start=Constant(7.0))
    table.lookup([1, 1], train=True)
    table.apply_gradients([1], np.ones((1, 4)), step=1)
    assert table.evict(9).tolist() == [1]
    assert (table.lookup([1], train=True) == 0.5).all()
    assert (table.lookup([1], train=True) == 7.0).all()


def test_evicted_keys_are_sorted_by_bucket() -> None:
    table = _table(live=0)
    table.apply_gradients(np.arange(500), np.ones((500, 4)), step=1)
    evicted = table.evict(2)
    assert (np.diff(bucket(evicted)) >= 0).all()
    assert sorted(evicted) == list(range(500))


def test_evicted_memory_is_used_again() -> None:
    table = _table(dim=16, live=0)
    sizes = []
    for round_ in range(6):
        keys = np.arange(round_ * 20_000, (round_ + 1) * 20_000)
        table.apply_gradients(keys, np.ones((20_000, 16)), step=round_ + 1)
        assert len(table.evict(round_ + 2)) == 20_000
        sizes.append(table.stats()["bytes"])
    assert sizes[-1] <= sizes[1] * 1.05


def test_erase_among_full_lines_loses_no_key() -> None:
    """Deletions in a probe chain must not cut off the keys behind them."""
    table = _table(dim=1)
    rng = np.random.default_rng(0)
    alive: dict[int, float] = {}
    for _ in range(40):
        keys = rng.integers(0, 4000, 300)
        values = rng.normal(size=(300, 1)).astype(np.float32)
        table.upsert(keys, values)
        alive.update(zip(keys.tolist(), values[:, 0].tolist(), strict=True))
        gone = rng.integers(0, 4000, 250)
        table.erase(gone)
        for key in gone.tolist():
            alive.pop(key, None)
        got = table.keys()[0]
        assert sorted(got) == sorted(alive)
        np.testing.assert_array_equal(table.lookup(got)[:, 0], [alive[key] for key in got.tolist()])


# Export and import


def test_export_in_blocks_sorted_by_bucket_with_everything_of_a_row() -> None:
    table = EmbeddingVariable("t", 4, optimizer=Adagrad(0.1))
    keys = np.arange(-500, 500)
    table.lookup(keys, train=True)
    table.apply_gradients(keys[:300], np.ones((300, 4)), step=4)
    blocks = list(table.export(batch_rows=128))
    assert [len(block) for block in blocks] == [128] * 7 + [104]
    order = np.concatenate([block.key for block in blocks])
    assert (np.diff(bucket(order)) >= 0).all()
    version = np.concatenate([block.version for block in blocks])
    assert sorted(order[version == 4]) == list(range(-500, -200))
    assert (version[version != 4] == NEVER_UPDATED).all()
    copy = EmbeddingVariable("u", 4, optimizer=Adagrad(0.1))
    for block in blocks:
        copy.import_rows(block)
    np.testing.assert_array_equal(copy.lookup(keys), table.lookup(keys))
    for ours, theirs in zip(copy.export(), table.export(), strict=True):
        np.testing.assert_array_equal(ours.slots["accumulator"], theirs.slots["accumulator"])
        np.testing.assert_array_equal(ours.frequency, theirs.frequency)


def test_import_refuses_the_slots_of_another_optimizer() -> None:
    table = EmbeddingVariable("t", 2, optimizer=Adagrad())
    one = np.ones(1, np.int64)
    with pytest.raises(ValueError, match=r"slots \['accumulator'\] of Adagrad. Received: \['m', 'v'\]"):
        table.import_rows(
            RowBlock(one, one, one, np.zeros((1, 2)), {"m": np.zeros((1, 2)), "v": np.zeros((1, 2))})
        )


# Memory


def test_memory_for_each_row_is_bounded() -> None:
    table = EmbeddingVariable("t", 16, optimizer=Adagrad())
    n = 300_000
    for start in range(0, n, 100_000):
        table.lookup(np.arange(start, start + 100_000), train=True)
    ideal = n * (8 + 64 + 64 + 16)
    assert table.stats()["bytes"] <= 1.25 * ideal
