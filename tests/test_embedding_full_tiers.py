"""Tiers without room: what is there stays readable, can be trained, evicted and saved, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deeprec_spark.embedding import _core
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.options import (
    CacheStrategy,
    DynamicDimensionOption,
    EmbeddingVariableOption,
    GlobalStepEvict,
    StorageOption,
    StorageType,
)
from deeprec_spark.embedding.store import TableSpec
from deeprec_spark.embedding.variable import EmbeddingVariable, RowBlock
from tests.embedding_storage import BLOCKS, DIM, ROW, fill, is_refused, make_storage, make_table

FULL = [
    (StorageType.DRAM_PMEM, (64 * 20 * ROW, 2 << 20)),
    (StorageType.DRAM_SSDHASH, (64 * 20 * ROW, 2 << 20)),
    # A sixteenth of the first tier is more than a row: moves down are in groups.
    (StorageType.DRAM_PMEM_SSDHASH, (64 * 60 * ROW, 1 << 20, 2 << 20)),
]


@pytest.mark.parametrize("strategy", list(CacheStrategy))
@pytest.mark.parametrize(("kind", "sizes"), FULL)
def test_a_full_table_is_read_and_trained(
    kind: StorageType, sizes: tuple[int, ...], strategy: CacheStrategy, tmp_path: Path
) -> None:
    option = EmbeddingVariableOption(storage_option=make_storage(kind, tmp_path, sizes, strategy))
    table = EmbeddingVariable("t", DIM, option=option, optimizer=SGD(1.0))
    keys = fill(table)
    fresh = EmbeddingVariable("t", DIM, optimizer=SGD(1.0))
    expected = fresh.lookup(keys)
    np.testing.assert_array_equal(table.lookup(keys), expected)
    rng = np.random.default_rng(0)
    for step in range(1, 30):
        # Gradients of any table are exact enough: the same float operations as here.
        chosen = rng.permutation(len(keys))[:400]
        table.apply_gradients(keys[chosen], np.ones((400, DIM)), step=step)
        expected[chosen] -= 1
        table.lookup(rng.choice(keys, 400), train=True)  # what has a row needs no room
    np.testing.assert_array_equal(table.lookup(keys), expected)
    assert table.contains(keys).all()
    assert len(table.keys()[1]) == 0  # without a filter, nothing is only counted
    assert len(table) == len(keys)
    for tier, size in zip(table.stats()["tiers"], sizes, strict=True):
        assert tier["bytes"] <= size


@pytest.mark.parametrize(("kind", "sizes"), FULL)
def test_a_hit_in_a_full_tier_changes_places_with_a_colder_row(
    kind: StorageType, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    table = make_table(kind, tmp_path, sizes)
    keys = fill(table)
    hot = keys[: len(keys) // 50]
    for _ in range(8):
        table.lookup(hot, train=True)
    before = table.stats()["promoted"]
    table.lookup(hot, train=True)
    assert table.stats()["promoted"] - before < len(hot) // 5


@pytest.mark.parametrize(("kind", "sizes"), FULL)
def test_a_full_table_is_evicted_and_saved(kind: StorageType, sizes: tuple[int, ...], tmp_path: Path) -> None:
    option = EmbeddingVariableOption(
        evict_option=GlobalStepEvict(50), storage_option=make_storage(kind, tmp_path / "tiers", sizes)
    )
    store = LocalStore()
    store.create_tables([TableSpec("t", DIM, option, SGD(1.0))])
    table = store.table("t")
    keys = fill(table)
    old, young = keys[: len(keys) // 2], keys[len(keys) // 2 :]
    promoted = table.stats()["promoted"]
    store.save(str(tmp_path / "save"))  # evicts: the rows begin to age where they are
    assert table.evict(1).tolist() == []
    assert table.stats()["promoted"] == promoted
    table.apply_gradients(young, np.ones((len(young), DIM)), step=60)
    assert sorted(table.evict(61).tolist()) == old.tolist()
    assert len(table) == len(young)
    assert sorted(table.evict(200).tolist()) == young.tolist()
    assert len(table) == 0
    again = LocalStore()
    again.create_tables([TableSpec("t", DIM, EmbeddingVariableOption(), SGD(1.0))])
    again.restore(str(tmp_path / "save"))
    assert np.sort(again.table("t").keys()[0]).tolist() == keys.tolist()


@pytest.mark.parametrize(("kind", "sizes"), FULL)
def test_ranks_of_a_full_table_are_found_where_rows_are(
    kind: StorageType, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    table = make_table(kind, tmp_path, sizes, dynamic_dimension=DynamicDimensionOption(2, refresh_steps=2))
    keys = fill(table)
    promoted = table.stats()["promoted"]
    for _ in range(3):
        table.refresh_ranks()
    assert table.stats()["promoted"] == promoted
    for step in range(1, 5):
        table.apply_gradients(keys[:10], np.ones((10, DIM)), step=step)
    assert len(table) == len(keys)


def test_importing_into_a_full_table_loses_no_row() -> None:
    option = EmbeddingVariableOption(
        dynamic_dimension=DynamicDimensionOption(2, (3,)),
        storage_option=StorageOption(StorageType.DRAM, None, (64 * 20 * 40,)),
    )
    table = EmbeddingVariable("t", 8, option=option)
    keys = fill(table)
    before = next(table.export(10**6))
    refused = 0
    for i in range(len(keys)):
        one = slice(i, i + 1)
        row = RowBlock(
            before.key[one],
            before.frequency[one],
            before.version[one],
            before.value[one],
            {},
            None,
            np.array([2]),
        )
        try:
            table.import_rows(row)
        except _core.StorageFullError:
            refused += 1
    assert refused > len(keys) // 2
    after = next(table.export(10**6))
    assert after.blocks is not None
    grown = after.blocks == 2
    assert 0 < refused == (~grown).sum()
    np.testing.assert_array_equal(after.key, before.key)
    np.testing.assert_array_equal(after.frequency, before.frequency)
    np.testing.assert_array_equal(after.value, before.value)


def test_a_row_that_has_no_room_to_grow_stays_as_it_is(tmp_path: Path) -> None:
    table = make_table(StorageType.DRAM_PMEM, tmp_path, (64 * 20 * ROW, 2 << 20), dynamic_dimension=BLOCKS)
    keys = fill(table)
    before = table.lookup(keys)
    for _ in range(3):
        for start in range(0, len(keys), 64):
            is_refused(table, keys[start : start + 64])
    after = table.lookup(keys)
    assert len(table) == len(keys)
    grown = next(table.export(10**6, keys)).blocks
    assert grown is not None
    known = np.arange(DIM) < 4
    np.testing.assert_array_equal(after[:, known], before[:, known])
    np.testing.assert_array_equal((after != 0).sum(1), grown * DIM // 4)
