"""CBFFilter and ProbabilityFilter; CounterFilter is with the variable."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.options import (
    CBFFilter,
    Constant,
    CounterFilter,
    EmbeddingVariableOption,
    FilterOption,
    InitializerOption,
    ProbabilityFilter,
)
from deeprec_spark.embedding.store import TableSpec
from deeprec_spark.embedding.variable import EmbeddingVariable

SPARSE = np.arange(10**6, 10**6 + 3000)


def _option(filter_option: FilterOption) -> EmbeddingVariableOption:
    return EmbeddingVariableOption(filter_option, init_option=InitializerOption(Constant(7.0), 0.5))


def _table(filter_option: FilterOption, seed: int = 0) -> EmbeddingVariable:
    return EmbeddingVariable("t", 2, option=_option(filter_option), seed=seed)


def _bloom(freq: int = 3, size: int = 10_000, p: float = 0.001, counter_type: str = "uint16") -> CBFFilter:
    return CBFFilter(freq, size, p, counter_type)


@pytest.mark.parametrize("filter_option", [CounterFilter(3), _bloom()], ids=["counter", "bloom"])
def test_one_threshold_rule_for_all(filter_option: FilterOption) -> None:
    """DeepRec's Bloom filter was off by one between its paths."""
    table = _table(filter_option)
    assert (table.lookup([1, 2, 2], train=True) == 0.5).all()
    assert table.lookup([2, 1, 3, 3, 3], train=True)[:, 0].tolist() == [7, 0.5, 7, 7, 7]
    table.apply_gradients([1, 2], np.ones((2, 2)), step=1)
    assert table.lookup([1], train=False)[0, 0] == 0.5
    assert table.lookup([1], counts=[1], train=True)[0, 0] == 7
    assert sorted(table.keys()[0]) == [1, 2, 3]


@pytest.mark.parametrize("counter_type", ["uint8", "uint16", "uint32", "uint64"])
def test_bloom_never_admits_late_and_rarely_early(counter_type: str) -> None:
    n, p = 20_000, 0.01
    table = _table(CBFFilter(2, n, p, counter_type))
    keys = np.random.default_rng(0).choice(2**40, n, replace=False)
    table.lookup(keys, train=True)
    early = len(table)  # each key occurred once; those with a row came too early
    assert early <= 2 * p * n
    table.lookup(keys, train=True)
    assert len(table) == n


def test_bloom_counters_saturate_and_do_not_wrap() -> None:
    """DeepRec: uint8 counters wrapped for big counts."""
    table = _table(_bloom(freq=255, counter_type="uint8"))
    table.lookup([1], counts=[254], train=True)
    assert len(table) == 0
    table.lookup([2], counts=[1 << 40], train=True)
    assert table.keys()[0].tolist() == [2]
    table.lookup([1], train=True)
    assert sorted(table.keys()[0]) == [1, 2]


def test_bloom_memory_does_not_grow_with_rare_ids() -> None:
    table = _table(_bloom(freq=5, size=100_000))
    before = table.stats()["bytes"]
    table.lookup(np.arange(50_000), train=True)
    assert table.stats()["bytes"] - before < 100_000


def test_sizes_follow_the_formulas() -> None:
    option = CBFFilter(2, 1 << 20, 0.01)
    assert option.num_counters == math.ceil((1 << 20) * abs(math.log(0.01)) / math.log(2) ** 2)
    assert option.num_hashes == 7
    assert CBFFilter(2, 10, 1e-9).num_hashes == 30  # DeepRec divided by zero from 26 on
    _table(CBFFilter(2, 10, 1e-9)).lookup([1], train=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filter_freq": 300, "max_element_size": 10, "counter_type": "uint8"}, "filter_freq=300"),
        ({"filter_freq": 2}, "max_element_size=0"),
        ({"filter_freq": 2, "max_element_size": 10, "false_positive_probability": 0.0}, "probability=0.0"),
        ({"filter_freq": 2, "max_element_size": 10, "counter_type": "int64"}, "counter_type='int64'"),
    ],
)
def test_bloom_options_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CBFFilter(**arguments)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("shards", [1, 3])
def test_bloom_counts_survive_on_any_number_of_shards(tmp_path: Path, shards: int) -> None:
    spec = TableSpec("t", 2, _option(_bloom(freq=3, size=3000)))
    store = LocalStore()
    store.create_tables([spec])
    store.table("t").lookup(np.repeat(SPARSE, 2), train=True)
    store.save(str(tmp_path))
    stores = [LocalStore(shard, shards) for shard in range(shards)]
    for again in stores:
        again.create_tables([spec])
        again.restore(str(tmp_path))
    again = stores[0]
    own = SPARSE if shards == 1 else np.array([k for k in SPARSE if _shard(int(k), shards) == 0])
    again.table("t").lookup(own, train=True)
    assert len(again.table("t")) == len(own)
    if shards > 1:  # keys of other shards were not counted here
        others = np.setdiff1d(SPARSE, own)
        again.table("t").lookup(others, train=True)
        assert len(again.table("t")) < len(own) + 0.05 * len(others)


def _shard(key: int, shards: int) -> int:
    from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket

    return int(bucket([key])[0]) * shards // NUM_BUCKETS


def test_another_bloom_geometry_starts_anew_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore()
    store.create_tables([TableSpec("t", 2, _option(_bloom(freq=3)))])
    store.table("t").lookup([1, 1], train=True)
    store.save(str(tmp_path))
    again = LocalStore()
    again.create_tables([TableSpec("t", 2, _option(_bloom(freq=3, size=77)))])
    again.restore(str(tmp_path))
    assert "counting starts anew" in caplog.text
    again.table("t").lookup([1], train=True)
    assert len(again.table("t")) == 0


def test_probability_filter_admits_its_share_and_repeats_exactly() -> None:
    keys = np.arange(20_000)
    tables = [_table(ProbabilityFilter(0.1), seed=3) for _ in range(2)]
    for table in tables:
        table.lookup(keys, train=True)
    share = len(tables[0]) / len(keys)
    assert abs(share - 0.1) < 0.01
    # The same draws whatever the order or the split of a lookup's keys over servers.
    tables[1].clear()
    tables[1].lookup(keys[::-1], train=True)
    assert tables[0].keys()[0].tolist() == tables[1].keys()[0].tolist()
    # Another occurrence is another draw; not admitted ids read the default, also in evaluation.
    tables[0].lookup(keys, train=True)
    assert abs(len(tables[0]) / len(keys) - 0.19) < 0.01
    rows = tables[0].lookup(keys)[:, 0]
    assert ((rows == 7) == tables[0].contains(keys)).all()
    assert set(rows) == {7.0, 0.5}


def test_probability_counts_repeats() -> None:
    table = _table(ProbabilityFilter(0.1))
    table.lookup(np.arange(20_000), counts=np.full(20_000, 5), train=True)
    assert abs(len(table) / 20_000 - (1 - 0.9**5)) < 0.02


@pytest.mark.parametrize("dim", [2, 64])
def test_probability_filter_draws_once_for_every_repeat_in_a_batch(dim: int) -> None:
    """The repeats of a key in a batch were all the same draw."""
    keys = np.arange(20_000)
    counted, repeated, shuffled = (
        EmbeddingVariable("t", dim, option=_option(ProbabilityFilter(0.1))) for _ in "123"
    )
    counted.lookup(keys, counts=np.full(len(keys), 10), train=True)
    repeated.lookup(np.repeat(keys, 10), train=True)
    rows = shuffled.lookup(np.random.default_rng(0).permutation(np.repeat(keys, 10)), train=True)
    assert abs(len(counted) / len(keys) - (1 - 0.9**10)) < 0.02
    for table in (repeated, shuffled):
        np.testing.assert_array_equal(table.keys()[0], counted.keys()[0])
        assert set(next(table.export()).frequency) == {10}
    assert len(rows) == 10 * len(keys)


@pytest.mark.parametrize(
    "filter_option",
    [CounterFilter(3), _bloom(size=50_000), ProbabilityFilter(0.01)],
    ids=["counter", "bloom", "draw"],
)
def test_statistics_say_how_much_is_filtered(filter_option: FilterOption) -> None:
    table = _table(filter_option)
    table.lookup(np.arange(10_000), train=True)
    assert table.stats()["filtered"] == pytest.approx(10_000 - len(table), rel=0.03)
    if not isinstance(filter_option, ProbabilityFilter):
        table.lookup(np.repeat(np.arange(4000), 2), train=True)
        assert len(table) == pytest.approx(4000, rel=0.01)
        assert table.stats()["filtered"] == pytest.approx(6000, rel=0.05)
    table.clear()
    assert table.stats()["filtered"] == 0


def test_statistics_of_a_bloom_filter_survive_a_checkpoint(tmp_path: Path) -> None:
    stores = [LocalStore() for _ in range(2)]
    for store in stores:
        store.create_tables([TableSpec("t", 2, _option(_bloom(size=50_000)))])
    stores[0].table("t").lookup(np.arange(10_000), train=True)
    stores[0].save(str(tmp_path))
    stores[1].restore([str(tmp_path)])
    filtered = stores[1].table("t").stats()["filtered"]
    assert filtered == stores[0].table("t").stats()["filtered"] > 9000


@pytest.mark.parametrize("size", [10**13, 10**18])
def test_a_bloom_filter_beyond_all_memory_names_its_size(size: int) -> None:
    with pytest.raises((MemoryError, ValueError), match=rf"Received: .*max_element_size={size}"):
        _table(CBFFilter(2, size, 0.001, "uint64"))


def test_negative_counts_are_refused_and_change_nothing() -> None:
    table = _table(CounterFilter(2))
    with pytest.raises(ValueError, match=r"counts.*Received: counts\[1\]=-5"):
        table.lookup([1, 2], counts=[1, -5], train=True)
    with pytest.raises(ValueError, match=r"counts.*Received: counts\[0\]=-1"):
        table.import_filtered([1], [-1])
    rows, filtered, counts = table.keys()
    assert (len(rows), len(filtered), len(counts)) == (0, 0, 0)


def test_an_erased_key_keeps_its_count_in_a_bloom_filter_only() -> None:
    for filter_option, admitted in ((CounterFilter(2), False), (_bloom(freq=2), True)):
        table = _table(filter_option)
        table.lookup([1, 1], train=True)
        assert table.erase([1]) == 1
        table.lookup([1], train=True)
        assert table.contains([1]).tolist() == [admitted]
