"""Semi-synchronous jobs of real processes, one worker ten times slower: what holds is shown by counting."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deeprec_spark.runtime.errors import NodeError
from deeprec_spark.runtime.phases import Phase, PhaseResult
from deeprec_spark.runtime.semi_sync import SemiSyncOptions, SemiSyncReport
from tests.test_runtime_cut import TESTS, Job, counts, items_of, sums, trained

pytestmark = pytest.mark.timeout(180)

SLOW = {"pause": 0.004, "slow": {"1": 10}}
StartJob = Callable[..., Job]
PLACES = pytest.mark.parametrize(("num_ps", "placement"), [(2, "separate"), (0, "colocated")])


@pytest.fixture(autouse=True)
def importable_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TESTS)


@pytest.fixture
def start_job() -> Iterator[StartJob]:
    with ExitStack() as stack:

        def start(*arguments: Any, **options: Any) -> Job:
            job = Job(*arguments, **options)
            stack.callback(job.close)
            return job

        yield start


def total(results: Sequence[PhaseResult]) -> SemiSyncReport:
    found = SemiSyncReport()
    for result in results:
        found.add(SemiSyncReport.from_dict(result.data["semi_sync"]))
    return found


def leads(results: Sequence[PhaseResult]) -> list[int]:
    """By how many steps a worker was ahead of the other one when it began a step, as the workers themselves saw it.

    The other one's steps count from the moment at which it had computed them, so that a lead is never overestimated.
    Before its first and after its last step it is not looked at.
    """
    times = {result.rank: result.data["times"] for result in results}
    found = []
    for rank, steps in times.items():
        [other] = [steps for one, steps in times.items() if one != rank]
        for number, began, _ in steps:
            if not other[0][1] < began < other[-1][2]:
                continue
            done = max([other[0][0], *(theirs + 1 for theirs, _, computed in other if computed <= began)])
            found.append(number - done)
    return found


@PLACES
def test_workers_drift_apart_by_so_many_steps_and_no_more(
    start_job: StartJob, tmp_path: Path, num_ps: int, placement: str
) -> None:
    job = start_job(num_ps, 2, placement=placement, semi_sync=SemiSyncOptions(max_staleness=3))
    items = items_of(320, 40)
    results = job.coordinator.run_phase(Phase("train", SLOW, items))
    ahead, report = leads(results), total(results)
    assert len(ahead) > 10
    assert max(ahead) <= 3
    assert report.max_lead == 3
    assert report.waits > 0
    assert not report.left_out
    cut = job.cutter.take()
    job.cutter.write(cut, str(tmp_path))
    assert counts(320, tmp_path)[0].tolist() == [1] * 320


def test_without_the_bound_they_drift_further(start_job: StartJob) -> None:
    job = start_job(1, 2)
    assert max(leads(job.coordinator.run_phase(Phase("train", SLOW, items_of(320, 40))))) > 3


def test_a_save_holds_workers_that_wait_for_others(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(1, 2, semi_sync=SemiSyncOptions(max_staleness=0))
    items = items_of(400, 40)
    running = job.run("train", SLOW, items)
    cut = job.cutter.take()
    job.cutter.write(cut, str(tmp_path))
    assert counts(400, tmp_path)[0].tolist() == trained(cut.queue, items).tolist()
    results = running.result(90)
    assert total(results).max_lead == 0


def test_a_lost_worker_holds_nobody_up(start_job: StartJob) -> None:
    semi_sync = SemiSyncOptions(max_staleness=1, patience_secs=600.0)
    job = start_job(1, 2, respawn=False, rejoin_timeout=1.0, semi_sync=semi_sync)
    running = job.run("train", SLOW, items_of(400, 40))
    os.kill(job.reports[1].data["pid"], signal.SIGKILL)
    [left] = running.result(60)
    assert left.rank == 1
    assert not total([left]).left_out


def test_a_worker_that_hangs_is_left_out_until_it_goes_on(start_job: StartJob) -> None:
    job = start_job(1, 2, semi_sync=SemiSyncOptions(max_staleness=1, patience_secs=1.0))
    running = job.run("train", {"pause": 0.004}, items_of(2000, 40))
    hanging = job.reports[1].data["pid"]
    os.kill(hanging, signal.SIGSTOP)
    try:
        since = job.reports[0].data["steps"]
        wait_until(lambda: job.reports[0].data["steps"] > since + 20)
    finally:
        os.kill(hanging, signal.SIGCONT)
    report = total(running.result(90))
    assert report.left_out[2] >= 1
    assert report.max_lead <= 1


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.02)


@PLACES
def test_a_step_goes_on_without_the_late_worker_whose_samples_are_dropped_and_counted(
    start_job: StartJob, tmp_path: Path, num_ps: int, placement: str
) -> None:
    """Of three workers, two make a step: half a count for each sample that has updated the model."""
    job = start_job(num_ps, 3, "sync", placement=placement, semi_sync=SemiSyncOptions(backup_workers=1))
    rows, steps = 240, 60
    parts = [
        [{"first": worker * rows + item["first"], "rows": item["rows"]} for item in items_of(rows, 40)]
        for worker in range(3)
    ]
    running = job.run("train", SLOW, None, parts)
    cut = job.cutter.take()
    job.cutter.write(cut, str(tmp_path / "middle"))
    assert {state.standing.steps for state in cut.workers.values()} == {cut.step}
    assert halves(3 * rows, tmp_path / "middle") == {0.0: 3 * rows - 2 * 4 * cut.step, 0.5: 2 * 4 * cut.step}
    report = total(running.result(90))
    last = job.cutter.take()
    job.cutter.write(last, str(tmp_path / "end"))
    assert last.step == steps
    assert halves(3 * rows, tmp_path / "end") == {0.0: rows, 0.5: 2 * rows}
    assert sum(report.dropped_samples.values()) == rows
    assert sum(report.dropped_steps.values()) == steps
    slow = job.coordinator.options.worker_ranks[1]
    assert report.dropped_steps[slow] > steps / 2
    again = job.coordinator.run_phase(Phase("train", {}, assignment=parts))
    assert sum(total(again).dropped_steps.values()) == steps, "the workers are at the same step again"


def halves(rows: int, *chain: Path) -> dict[float, int]:
    values, often = np.unique(np.round(sums(rows, *chain)[0], 3), return_counts=True)
    return dict(zip(values.tolist(), often.tolist(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "mode", "workers", "message"),
    [
        ({}, "async", 2, "needs max_staleness .* or backup_workers .*max_staleness=None, backup_workers=0"),
        ({"max_staleness": 1, "backup_workers": 1}, "sync", 3, "not both"),
        ({"max_staleness": -1}, "async", 2, "max_staleness=-1"),
        ({"backup_workers": -1}, "sync", 2, "backup_workers=-1"),
        ({"max_staleness": 1, "patience_secs": 0.0}, "async", 2, "patience_secs=0"),
        ({"max_staleness": 1}, "sync", 2, "set mode='async'.*mode='sync'"),
        ({"backup_workers": 1}, "async", 2, "set mode='sync'.*mode='async'"),
        ({"backup_workers": 2}, "sync", 2, "backup_workers=2, num_workers=2"),
    ],
)
def test_options_are_checked(arguments: Mapping[str, Any], mode: str, workers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SemiSyncOptions(**arguments).check(mode, workers)


def test_reports_add_up_and_travel() -> None:
    one = SemiSyncReport(max_lead=2, waits=3, wait_seconds=1.5, left_out={4: 1})
    other = SemiSyncReport(max_lead=1, waits=1, dropped_steps={4: 2}, dropped_samples={4: 20})
    one.add(SemiSyncReport.from_dict(other.to_dict()))
    one.drop(5, 7)
    assert one == SemiSyncReport(2, 4, 1.5, {4: 1}, {4: 2, 5: 1}, {4: 20, 5: 7})
    assert "at most 2 steps" in one.describe(SemiSyncOptions(max_staleness=2))
    assert "left out: rank 4: 1" in one.describe(SemiSyncOptions(max_staleness=2))
    text = one.describe(SemiSyncOptions(backup_workers=1))
    assert (
        text == "3 late steps with 27 samples did not update the model: steps by worker: rank 4: 2, rank 5: 1"
    )


def test_with_backup_workers_a_killed_job_goes_on_and_trains_no_row_twice(
    start_job: StartJob, tmp_path: Path
) -> None:
    """A step takes one of two workers' rows. What is not dropped for being late is trained once, before or after."""
    half, size = 400, 4
    parts = [items_of(half, 50), [{**item, "first": item["first"] + half} for item in items_of(half, 50)]]
    options = SemiSyncOptions(backup_workers=1)
    job = start_job(1, 2, "sync", respawn=False, semi_sync=options)
    running = job.run("train", {"pause": 0.01}, None, parts)
    cut = job.cutter.take()
    job.cutter.write(cut, str(tmp_path / "cut"))
    before, step, _ = counts(2 * half, tmp_path / "cut")
    assert before.sum() == size * step == size * cut.steps, "one worker's rows a step"
    os.kill(job.reports[0].data["pid"], signal.SIGKILL)
    with pytest.raises(NodeError):
        running.result(60)
    job.close()
    job = start_job(1, 2, "sync", semi_sync=options)
    job.coordinator.run_phase(Phase("train", assignment=[[], []]))
    job.cutter.restore([str(tmp_path / "cut")], cut.save_id)
    results = job.coordinator.run_phase(Phase("train", {"steps_done": cut.steps}, assignment=parts))
    job.cutter.write(job.cutter.take(), str(tmp_path / "end"))
    end, _, _ = counts(2 * half, tmp_path / "end")
    assert end.max() == 1
    passed = np.tile(np.arange(half) < size * cut.steps, 2)
    np.testing.assert_array_equal(end[passed], before[passed])
    dropped = sum(total(results).dropped_samples.values())
    assert end[~passed].sum() == (~passed).sum() - dropped
