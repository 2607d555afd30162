"""TimeEvict, L2WeightEvict, combinations and triggers; GlobalStepEvict is with the variable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.options import (
    Constant,
    EmbeddingVariableOption,
    EvictOption,
    GlobalStepEvict,
    InitializerOption,
    L2WeightEvict,
    TimeEvict,
)
from deeprec_spark.embedding.store import PushRequest, SparseGradient, TableSpec
from deeprec_spark.embedding.variable import EmbeddingVariable, RowBlock

ONE = np.ones(1, np.int64)


def _option(*policies: EvictOption, evict_steps: int | None = None) -> EmbeddingVariableOption:
    return EmbeddingVariableOption(
        evict_option=policies, init_option=InitializerOption(Constant(0.0)), evict_steps=evict_steps
    )


def _table(*policies: EvictOption, evict_steps: int | None = None) -> EmbeddingVariable:
    return EmbeddingVariable("t", 4, option=_option(*policies, evict_steps=evict_steps), optimizer=SGD(1.0))


def _touch(table: EmbeddingVariable, keys: list[int], step: int, now: float = 0.0) -> None:
    table.apply_gradients(keys, np.full((len(keys), 4), -1.0), step=step, now=now)


def test_time_evict_counts_seconds_since_the_last_update() -> None:
    table = _table(TimeEvict(60))
    _touch(table, [1], 1, now=1000)
    _touch(table, [2], 2, now=1030)
    table.lookup([3], train=True)
    assert table.evict(9, now=1060).tolist() == []  # key 3 is stamped
    assert table.evict(9, now=1061).tolist() == [1]
    _touch(table, [2], 10, now=1085)
    assert table.evict(11, now=1130).tolist() == [3]
    assert table.evict(11, now=1145).tolist() == []
    assert table.evict(11, now=1146).tolist() == [2]


def test_l2_evict_takes_the_norm_and_not_half_its_square() -> None:
    """DeepRec documented the L2 norm and compared half of its square."""
    table = _table(L2WeightEvict(2.0))
    table.upsert([1, 2, 3], np.array([[1, 1, 1, 1], [1, 1, 1, 0.99], [-3, 0, 0, 0]]))
    assert table.evict(1).tolist() == [2]
    assert sorted(table.keys()[0]) == [1, 3]


def test_any_policy_of_several_removes_a_row() -> None:
    table = _table(GlobalStepEvict(5), TimeEvict(60), L2WeightEvict(1.0))
    _touch(table, [1], 1, now=1000)
    _touch(table, [2], 10, now=1000)
    _touch(table, [3], 10, now=1050)
    _touch(table, [4], 10, now=1050)
    table.upsert([4], np.full((1, 4), 0.1))
    assert sorted(table.evict(11, now=1055)) == [1, 4]
    assert sorted(table.keys()[0]) == [2, 3]
    assert table.evict(11, now=1061).tolist() == [2]


def test_eviction_every_n_steps() -> None:
    table = _table(GlobalStepEvict(2), evict_steps=5)
    for step in range(1, 10):
        _touch(table, [step], step)
        if step == 4:
            assert len(table) == 4
        if step == 5:
            assert sorted(table.keys()[0]) == [3, 4, 5]


def test_a_store_evicts_before_it_saves(tmp_path: Path) -> None:
    store = LocalStore()
    store.create_tables([TableSpec("t", 4, _option(L2WeightEvict(1.0)), SGD(1.0))])
    store.table("t").upsert([1, 2], np.array([[1, 1, 1, 1], [0.1, 0, 0, 0]]))
    store.save(str(tmp_path))
    assert store.table("t").keys()[0].tolist() == [1]


def test_times_survive_a_checkpoint(tmp_path: Path) -> None:
    store = LocalStore()
    store.create_tables([TableSpec("t", 4, _option(TimeEvict(60)), SGD(1.0))])
    table = store.table("t")
    _touch(table, [1], 1, now=5e9)  # far ahead, so that saving evicts nothing
    store.save(str(tmp_path))
    again = LocalStore()
    again.create_tables(list(store.specs.values()))
    again.restore(str(tmp_path))
    assert again.table("t").evict(2, now=5e9 + 60).tolist() == []
    assert again.table("t").evict(2, now=5e9 + 61).tolist() == [1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TimeEvict(-1), "seconds_to_live=-1"),
        (lambda: L2WeightEvict(0.0), "l2_weight_threshold=0.0"),
        (lambda: EmbeddingVariableOption(evict_option=(TimeEvict(1), TimeEvict(2))), "may be given once"),
        (lambda: EmbeddingVariableOption(evict_steps=0), "evict_steps=0"),
    ],
)
def test_options_are_checked(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]  # a lambda


@pytest.mark.parametrize(
    "steps", [range(1, 30, 2), [1, 9, 8, 12, 11, 21, 20], range(1, 30)], ids=["odd", "late", "all"]
)
def test_eviction_is_due_once_for_every_n_steps_whichever_steps_come(steps: Sequence[int]) -> None:
    """It was due only at a multiple, which odd steps never reach."""
    table = _table(GlobalStepEvict(5), evict_steps=10)
    due = []
    for step in steps:
        # A row as old as can be shows whether a pass was made.
        table.erase([1])
        table.import_rows(RowBlock(ONE, ONE, -100 * ONE, np.ones((1, 4)), {}))
        table.end_step(step)
        if not table.contains([1])[0]:
            due.append(step)
    assert [step // 10 for step in due] == [1, 2]


def test_a_store_evicts_from_tables_that_its_steps_touch_in_turn() -> None:
    store = LocalStore()
    store.create_tables(
        [TableSpec(name, 4, _option(GlobalStepEvict(2), evict_steps=10), SGD(1.0)) for name in "ab"]
    )
    gradient = np.ones((1, 4), np.float32)
    for step in range(1, 11):
        part = SparseGradient(np.array([step]), gradient)
        store.push(PushRequest({"ab"[step % 2]: part}, None, None, samples=1))
    assert sorted(store.table("a").keys()[0]) == [8, 10]
    assert sorted(store.table("b").keys()[0]) == [9]


def test_a_late_step_does_not_make_a_row_older() -> None:
    table = _table(GlobalStepEvict(5), TimeEvict(60))
    _touch(table, [1], 100, now=1000)
    _touch(table, [1], 90, now=900)
    assert table.lookup([1]).tolist() == [[2.0] * 4]
    assert next(table.export()).version.tolist() == [100]
    assert table.evict(101, now=1060).tolist() == []
    assert table.evict(101, now=1061).tolist() == [1]


def test_a_row_that_a_pass_has_stamped_keeps_its_age() -> None:
    table = _table(GlobalStepEvict(5))
    table.lookup([1], train=True)
    table.evict(50)
    _touch(table, [1], 40)
    assert table.evict(55).tolist() == []
    assert table.evict(56).tolist() == [1]
