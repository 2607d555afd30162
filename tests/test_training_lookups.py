"""From ids to distinct keys and back: outputs are made of the rows of their own keys, and gradients find them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deeprec_spark.embedding._core as _core
from deeprec_spark.training.lookups import LookupCall, LookupPlan, sum_by_row

KEYS = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)
WIDTHS = {"a": 4, "b": 4, "c": 3, "d": 16}
COMBINERS = st.sampled_from([None, "sum", "mean", "sqrtn"])

Calls = list[tuple[LookupCall, list[list[int]]]]


@st.composite
def batches(draw: st.DrawFn) -> Calls:
    """Each call, and its ids in one or two parts of the batch."""
    num_parts = draw(st.integers(1, 2))
    planned: Calls = []
    computed = 0
    for number in range(draw(st.integers(1, 5))):
        table, combiner = draw(st.sampled_from(sorted(WIDTHS))), draw(COMBINERS)
        length = 1 if combiner is None else draw(st.integers(1, 3))
        ids = [
            draw(st.lists(KEYS, min_size=bags * length, max_size=bags * length))
            for bags in draw(st.lists(st.integers(0, 5), min_size=num_parts, max_size=num_parts))
        ]
        if draw(st.booleans()):
            call = LookupCall(table, WIDTHS[table], recorded=computed, combiner=combiner, length=length)
            computed += 1
        else:
            call = LookupCall(
                table,
                WIDTHS[table],
                column=f"x{number}",
                padding_value=draw(st.none() | st.integers(-2, 2)),
                combiner=combiner,
                length=length,
            )
        planned.append((call, ids))
    return planned


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(0, 2**32 - 1))
def test_every_output_is_made_of_its_rows_and_every_gradient_finds_them(planned: Calls, seed: int) -> None:
    calls = [call for call, _ in planned]
    plan = LookupPlan(calls)
    parts = [
        (
            {call.column: np.array(ids[part], np.int64) for call, ids in planned if call.column},
            [np.array(ids[part], np.int64) for call, ids in planned if call.recorded is not None],
        )
        for part in range(len(planned[0][1]))
    ]
    lookups = plan.collect(parts)

    keys = lookups[0].keys
    for table, unique in keys.items():
        seen = [
            key for call, ids in planned if call.table == table for part in ids for key in _kept(call, part)
        ]
        values, counts = np.unique(np.array(seen, np.int64), return_counts=True)
        order = np.argsort(unique.keys)
        np.testing.assert_array_equal(unique.keys[order], values)
        np.testing.assert_array_equal(unique.counts[order], counts)

    random = np.random.default_rng(seed)
    rows = {
        name: random.normal(size=(len(keys[name].keys), plan.dims[name])).astype(np.float32) for name in keys
    }
    places = {name: {key: place for place, key in enumerate(keys[name].keys.tolist())} for name in keys}
    expected = {name: np.zeros_like(values, np.float64) for name, values in rows.items()}
    gradients = []
    for part, found in enumerate(lookups):
        outputs = found.spread(plan.join_rows(rows))
        upstream = [random.normal(size=values.shape).astype(np.float32) for values in outputs]
        gradients.append(upstream)
        for position, (call, ids) in enumerate(planned):
            group, place = plan.places[position]
            start = int(found.sizes[group][:place].sum())
            bags = _bags(call, ids[part])
            assert found.sizes[group][place] == len(bags)
            for bag, output, gradient in zip(
                bags, outputs[group][start:], upstream[group][start:], strict=False
            ):
                numbers = [places[call.table][key] for key in bag]
                divisor = {"mean": len(bag), "sqrtn": np.sqrt(len(bag))}.get(call.combiner or "", 1) or 1
                wanted = rows[call.table][numbers].astype(np.float64).sum(0) / divisor
                np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6)
                np.add.at(expected[call.table], numbers, gradient / divisor)

    by_row, check = sum_by_row(lookups, gradients, plan.widths)
    for table, gradient in plan.split_gradients(keys, by_row).items():
        np.testing.assert_array_equal(gradient.keys, keys[table].keys)
        np.testing.assert_allclose(gradient.gradient, expected[table], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(check, sum(values.sum() for values in by_row), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tables", [1, 7])
def test_sums_do_not_depend_on_threads(tables: int) -> None:
    random = np.random.default_rng(3)
    plan = LookupPlan(
        [
            LookupCall(f"t{table}", 16, column=f"x{table}", combiner="mean", length=20, padding_value=0)
            for table in range(tables)
        ]
    )
    columns = {f"x{table}": random.zipf(1.2, (2000, 20)) % 5000 for table in range(tables)}
    [lookups] = plan.collect([(columns, [])])
    rows = {
        name: random.normal(size=(len(unique.keys), 16)).astype(np.float32)
        for name, unique in lookups.keys.items()
    }
    threads = _core.num_threads()
    found: list[list[npt.NDArray[Any]]] = []
    try:
        for count in (1, 5):
            _core.set_num_threads(count)
            outputs = lookups.spread(plan.join_rows(rows))
            found.append([*outputs, *sum_by_row([lookups], [outputs], plan.widths)[0]])
    finally:
        _core.set_num_threads(threads)
    for one, five in zip(*found, strict=True):
        np.testing.assert_array_equal(one, five)


def test_the_check_shows_what_is_not_finite() -> None:
    plan = LookupPlan([LookupCall("a", 4, column="x")])
    [lookups] = plan.collect([({"x": np.array([1, 2, 1])}, [])])
    gradient = np.full((3, 4), 3e38, np.float32)  # each is finite, the sum of two is not
    rows, check = sum_by_row([lookups], [[gradient]], plan.widths)
    assert np.isinf(rows[0][0]).all()
    assert not np.isfinite(check)
    gradient[1] = np.nan
    assert np.isnan(sum_by_row([lookups], [[gradient]], plan.widths)[1])


CALL = [0, 2, 1, 0, 0, 3, 0]  # two ids, each of one row of three


@pytest.mark.parametrize(
    ("numbers", "ends", "change", "message"),
    [
        ([0, 3], [], {}, "no row of its table"),
        ([0, -1], [], {}, "no row of its table"),
        ([0], [], {}, "must lie in numbers"),
        ([0, 1], [], {0: 1}, "must lie in numbers"),
        ([0, 1], [], {5: 4}, "among those that are given"),
        ([0, 1], [], {1: -2}, "must not be negative"),
        ([0, 1], [2], {2: -1}, "must lie in ends"),
        ([0, 1], [2, 1], {2: -1}, "must not decrease"),
        ([0, 1], [1, 3], {2: -1}, "must lie in numbers"),
        ([0, 1], [], {6: 3}, "no such combiner"),
    ],
)
def test_what_would_corrupt_memory_is_refused(
    numbers: list[int], ends: list[int], change: dict[int, int], message: str
) -> None:
    call = list(CALL)
    for column, value in change.items():
        call[column] = value
    with pytest.raises(ValueError, match=message):
        _core.sum_bags(
            np.ones((3, 4), np.float32),
            np.array(numbers, np.int32),
            np.array(ends, np.int32),
            np.array([call], np.int64),
        )


def test_gradients_must_fit_their_calls() -> None:
    numbers, ends, calls = np.array([0, 1], np.int32), np.empty(0, np.int32), np.array([CALL], np.int64)
    with pytest.raises(ValueError, match="rows must be"):
        _core.sum_by_row([np.ones((3, 4), np.float32)], [numbers], [ends], [calls], 3, 4)
    with pytest.raises(ValueError, match="do not make up all rows"):
        _core.sum_by_row([np.ones((2, 4), np.float32)], [numbers], [ends], [calls], 5, 4)


def test_an_empty_participation_names_every_table() -> None:
    plan = LookupPlan(
        [LookupCall("a", 4, column="x"), LookupCall("b", 2, column="y"), LookupCall("a", 4, column="z")]
    )
    assert {name: len(unique.keys) for name, unique in plan.empty().items()} == {"a": 0, "b": 0}
    assert not plan.needs_recording
    assert plan.groups == [(2, ["b"]), (4, ["a"])]


def _bags(call: LookupCall, ids: list[int]) -> list[list[int]]:
    """The ids that count of each output."""
    if call.combiner is None:
        return [[key] for key in _kept(call, ids)]
    return [_kept(call, ids[start : start + call.length]) for start in range(0, len(ids), call.length)]


def _kept(call: LookupCall, ids: list[int]) -> list[int]:
    return [key for key in ids if call.padding_value is None or key != call.padding_value]
