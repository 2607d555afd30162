"""Rows of several row groups shuffled together: bounded, a function of seed, epoch and lease, exact in the middle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeprec_spark.cluster import ClusterOptions
from deeprec_spark.data import BatchReader, ParquetDataset, ReaderOptions, RowBuffer, RowRange, Work
from deeprec_spark.data.shuffle import buffers, leased_from_dict, pieces
from deeprec_spark.epochs import EpochPlan
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.position import FitIdentity

SPEC = FeatureSpec(
    features=(Feature(name="id", kind=FeatureKind.CATEGORICAL, raw_type="int64"),),
    labels=(Label(name="label"),),
)
ROWS, GROUP = 4000, 250


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ParquetDataset:
    """Rows in order of their id, in two files of eight row groups: nothing but shuffling mixes them."""
    folder = tmp_path_factory.mktemp("data")
    for file in range(2):
        ids = np.arange(ROWS // 2) + file * (ROWS // 2)
        table = pa.table({"label": (ids % 2).astype(np.float32), "unused": ids, "id": ids})
        pq.write_table(table, folder / f"part-{file}.parquet", row_group_size=GROUP)
    return ParquetDataset.scan(str(folder))


def plan(dataset: ParquetDataset, **changes: object) -> EpochPlan:
    cluster = ClusterOptions(num_ps=1, num_workers=2, mode="sync" if changes.pop("sync", False) else "async")
    return EpochPlan(
        **{"dataset": dataset, "cluster": cluster, "batch_size": 50, "shuffle_rows": 1000, **changes}
    )  # type: ignore[arg-type]


def leases(made: EpochPlan, epoch: int = 0) -> list[list[RowBuffer]]:
    """The buffers of an epoch, of each worker where they are dealt out."""
    phase = made.phase("train", {}, made.rows(epoch))
    lists = phase.assignment or [phase.items.to_dict()["items"]]  # type: ignore[union-attr]
    found = [[leased_from_dict(item) for item in items] for items in lists]
    assert all(isinstance(one, RowBuffer) for items in found for one in items)
    return found  # type: ignore[return-value]


def read(
    parts: Sequence[RowBuffer], seed: int | None = 3, epoch: int = 0, done: int = 0, size: int = 50
) -> list[int]:
    reader = BatchReader(SPEC, ReaderOptions(size, shuffle_seed=seed, epoch=epoch))
    work = (Work(part, done if part is parts[0] else 0) for part in parts)
    return [i for step in reader.steps(work) for i in step.batch.features["id"].tolist()]


@pytest.mark.parametrize("sync", [False, True])
def test_an_epoch_has_each_row_once_and_each_buffer_rows_of_many_groups(
    dataset: ParquetDataset, sync: bool
) -> None:
    shares = leases(plan(dataset, sync=sync))
    seen = [read(share) for share in shares]
    assert sorted(i for ids in seen for i in ids) == list(range(ROWS))
    for buffer in (one for share in shares for one in share):
        assert buffer.rows <= 1000
        assert len({(part.file, part.row_group) for part in buffer.parts}) >= 3
    # Of two neighbours in the order of reading, hardly any were neighbours in the data.
    steps = np.abs(np.diff(seen[0]))
    assert np.median(steps) > GROUP


def test_the_order_is_a_function_of_seed_and_epoch(dataset: ParquetDataset) -> None:
    made = plan(dataset, seed=3)
    [first] = leases(made)
    assert leases(made) == [first]
    assert read(first) == read(first)
    assert leases(made, epoch=1) != [first]
    assert leases(plan(dataset, seed=4)) != [first]
    assert read(first, seed=4) != read(first)
    assert read(first, epoch=1) != read(first)


@given(done=st.integers(0, 999), size=st.integers(1, 300))
def test_going_on_in_the_middle_of_a_buffer_gives_the_rest_of_it(
    dataset: ParquetDataset, done: int, size: int
) -> None:
    [parts] = leases(plan(dataset))
    rest = parts[1:]
    assert (
        read(rest, done=min(done, rest[0].rows - 1), size=size) == read(rest)[min(done, rest[0].rows - 1) :]
    )


def test_row_groups_larger_than_a_piece_are_cut_and_others_stay_whole(dataset: ParquetDataset) -> None:
    assert {part.rows for part in pieces(dataset, 4 * GROUP).ranges} == {GROUP}
    assert {part.rows for part in pieces(dataset, 500).ranges} == {125}
    assert pieces(dataset, 3).num_rows == ROWS


@given(sizes=st.lists(st.integers(1, 50), max_size=40), limit=st.integers(1, 100))
def test_packing_keeps_order_and_limit(sizes: list[int], limit: int) -> None:
    ranges = tuple(RowRange("a", 0, index, 0, rows) for index, rows in enumerate(sizes))
    packed = buffers(ParquetDataset(ranges), limit)
    assert tuple(part for buffer in packed for part in buffer.parts) == ranges
    for buffer in packed:
        assert buffer.rows <= limit or len(buffer.parts) == 1
    assert [leased_from_dict(buffer.to_dict()) for buffer in packed] == packed


def test_asynchronous_workers_have_several_buffers_each(dataset: ParquetDataset) -> None:
    [parts] = leases(plan(dataset, shuffle_rows=10**9))
    assert len(parts) >= 2 * 4
    assert [len(share) for share in leases(plan(dataset, shuffle_rows=10**9, sync=True))] == [1, 1]


def test_without_it_and_in_evaluation_leases_are_ranges(dataset: ParquetDataset) -> None:
    ordered, plain = plan(dataset, shuffle=False), plan(dataset, shuffle_rows=0)
    for made, kind in ((plain, "train"), (plan(dataset), "evaluate"), (ordered, "train")):
        queue = made.phase(kind, {}, made.rows(0)).queue()
        assert queue is not None
        assert all("parts" not in item for item in queue.to_dict()["items"])


def test_a_fit_does_not_go_on_in_another_order() -> None:
    mine = FitIdentity("async", 1, 0, 50, None, True, 0, 2, "x", shuffle_rows=1000)
    other = {**mine.__dict__, "shuffle_rows": 500}
    assert mine.differences(other) == ["shuffle_rows=1000 instead of 500"]
    # Checkpoints of before had no such thing.
    del other["shuffle_rows"]
    assert FitIdentity("async", 1, 0, 50, None, True, 0, 2, "x").differences(other) == []


def test_a_fit_does_not_go_on_with_other_labels_or_leases() -> None:
    mine = FitIdentity("async", 1, 0, 50, None, True, 0, 2, "x", columns="user for click", cutting="16, 4")
    other = {**mine.__dict__, "columns": "user for buy", "cutting": "16, 8"}
    assert mine.differences(other) == [
        "columns='user for click' instead of 'user for buy'",
        "cutting='16, 4' instead of '16, 8'",
    ]
    # Checkpoints of before had no such things.
    del other["columns"], other["cutting"]
    assert mine.differences(other) == []
