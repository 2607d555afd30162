"""From ids to distinct keys and back: every id gets the row of its own key, whatever the tables and widths."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprec_spark.training.lookups import LookupCall, LookupPlan

KEYS = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)
WIDTHS = {"a": 4, "b": 4, "c": 8}


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[str, list[int], int | None, bool]]:
    """Table, ids, padding value, and whether the model computes them."""
    return [
        (
            draw(st.sampled_from(sorted(WIDTHS))),
            draw(st.lists(KEYS, max_size=8)),
            draw(st.none() | st.integers(-2, 2)),
            draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


@settings(max_examples=60, deadline=None)
@given(calls())
def test_every_id_finds_its_row_and_its_gradient(
    given_calls: list[tuple[str, list[int], int | None, bool]],
) -> None:
    planned, columns, recorded, expected = [], {}, [], []
    for number, (table, ids, padding, computed) in enumerate(given_calls):
        array = np.array(ids, np.int64)
        kept = array if padding is None else array[array != padding]
        expected.append(kept)
        if computed:  # the layer has dropped the padding already
            planned.append(LookupCall(table, WIDTHS[table], recorded=len(recorded)))
            recorded.append(kept)
        else:
            planned.append(LookupCall(table, WIDTHS[table], column=f"x{number}", padding_value=padding))
            columns[f"x{number}"] = array
    plan = LookupPlan(planned)
    lookups = plan.collect([(columns, recorded)])[0]

    for table, unique in lookups.keys.items():
        seen = np.concatenate([e for e, call in zip(expected, planned, strict=True) if call.table == table])
        keys, counts = np.unique(seen, return_counts=True)
        order = np.argsort(unique.keys)
        np.testing.assert_array_equal(unique.keys[order], keys)
        np.testing.assert_array_equal(unique.counts[order], counts)

    # A "row" is its table's number and its key's position there, so that a wrong row shows.
    rows = {
        table: np.repeat(
            np.arange(len(unique.keys), dtype=np.float32)[:, None] + 1000 * sorted(WIDTHS).index(table),
            WIDTHS[table],
            1,
        )
        for table, unique in lookups.keys.items()
    }
    joined = plan.join_rows(rows)
    gradients = [np.zeros_like(values) for values in joined]
    for position, call in enumerate(planned):
        group, place = plan.places[position]
        start = int(lookups.sizes[group][:place].sum())
        numbers = lookups.inverse[group][start : start + int(lookups.sizes[group][place])]
        found = joined[group][numbers][:, 0] - 1000 * sorted(WIDTHS).index(call.table)
        np.testing.assert_array_equal(
            lookups.keys[call.table].keys[found.astype(int)], expected[position], err_msg=f"call {position}"
        )
        np.add.at(gradients[group], numbers, 1.0)
    for table, gradient in plan.split_gradients(lookups.keys, gradients).items():
        np.testing.assert_array_equal(gradient.keys, lookups.keys[table].keys)
        np.testing.assert_array_equal(gradient.gradient[:, 0], lookups.keys[table].counts)


def test_an_empty_participation_names_every_table() -> None:
    plan = LookupPlan(
        [LookupCall("a", 4, column="x"), LookupCall("b", 2, column="y"), LookupCall("a", 4, column="z")]
    )
    assert {name: len(unique.keys) for name, unique in plan.empty().items()} == {"a": 0, "b": 0}
    assert not plan.needs_recording
    assert plan.groups == [(2, ["b"]), (4, ["a"])]
