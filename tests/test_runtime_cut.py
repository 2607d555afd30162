"""Cuts through running jobs of real processes, proven by counting: each row id of the data adds 1 to its table row."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.store import PullRequest, TableSpec, UniqueKeys
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions, Phase
from deeprec_spark.runtime.cut import Cutter
from deeprec_spark.runtime.errors import NodeError
from deeprec_spark.runtime.job import NodeSettings
from deeprec_spark.runtime.orders import OrderError
from deeprec_spark.runtime.supervisor import NodeProcessError, supervise
from deeprec_spark.runtime.work_queue import WorkQueue
from deeprec_spark.saving import CheckpointOptions, Saver

TESTS = str(Path(__file__).parent)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def importable_entries(monkeypatch):
    monkeypatch.syspath_prepend(TESTS)


class Job:
    """A coordinator in this process and nodes in processes of their own; a lost node is started again."""

    def __init__(
        self,
        num_ps,
        num_workers,
        mode="async",
        respawn=True,
        semi_sync=None,
        entry="runtime_entries:count_rows",
        payload=b"",
        **options,
    ):
        defaults = {"heartbeat_interval": 0.5, "failure_grace": 0.5, "registration_timeout": 60}
        self.coordinator = Coordinator(
            CoordinatorOptions(num_ps, num_workers, mode, **{**defaults, **options})
        )
        self.cutter = Cutter(self.coordinator)
        self.respawn = respawn
        self.pool = ThreadPoolExecutor(12)
        self.settings = NodeSettings(
            num_ps, num_workers, mode, self.coordinator.address, self.coordinator.token,
            entry, semi_sync=semi_sync, placement=self.coordinator.options.placement,
        )  # fmt: skip
        self.payload = payload
        self.nodes = [self.pool.submit(self._supervise, rank) for rank in range(num_ps + num_workers)]
        self.coordinator.wait_ready()

    def _supervise(self, rank):
        """As Spark does with a task: twice at most."""
        for attempt in range(2 if self.respawn else 1):
            try:
                return supervise(self.settings, rank, f"{rank}, attempt {attempt}", self.payload)
            except NodeProcessError as error:  # noqa: PERF203
                last = error
        return str(last)

    def run(self, *arguments):
        """Start a phase; its future, once all workers are some steps into it."""
        moving = threading.Event()
        self.reports = []

        def on_progress(reports):
            self.reports = reports
            if all(report.data["steps"] > 2 for report in reports) and len(reports) == len(
                self.coordinator.options.worker_ranks
            ):
                moving.set()

        future = self.pool.submit(self.coordinator.run_phase, Phase(*arguments), on_progress)
        assert moving.wait(60), future
        return future

    def close(self):
        self.coordinator.stop(timeout=10)
        self.pool.shutdown(wait=True)


@pytest.fixture
def start_job():
    jobs = []

    def start(*arguments, **options):
        jobs.append(Job(*arguments, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def items_of(rows, lease):
    return [{"first": first, "rows": min(lease, rows - first)} for first in range(0, rows, lease)]


def sums(rows, *chain):
    """What was added to each row, by what a checkpoint says; its step, and its one dense number."""
    store = LocalStore()
    store.create_tables([TableSpec("rows", 1, optimizer=SGD(learning_rate=1.0))])
    store.init_dense(np.zeros(1, np.float32), np.zeros(1, np.float32), SGD(learning_rate=1.0))
    keys = UniqueKeys(np.arange(rows, dtype=np.int64), np.ones(rows, np.int64))
    start = store.pull(PullRequest({"rows": keys}, train=False)).rows["rows"][:, 0]
    store.restore([str(part) for part in chain])
    reply = store.pull(PullRequest({"rows": keys}, train=False))
    return reply.rows["rows"][:, 0] - start, store.step, round(float(reply.dense[0]))


def counts(rows, *chain):
    """The same in whole numbers: how often each row was trained."""
    found, step, dense = sums(rows, *chain)
    return np.rint(found).astype(int), step, dense


def trained(position, items):
    """1 for each row that is done by a position, 0 for the others."""
    found = np.zeros(sum(item["rows"] for item in items), int)
    for index in position["completed"]:
        found[items[index]["first"] :][: items[index]["rows"]] = 1
    for index, rows in position["done"]:
        found[items[index]["first"] :][:rows] = 1
    return found


@pytest.mark.parametrize(("num_ps", "num_workers"), [(0, 1), (2, 2)])
def test_a_cut_of_an_asynchronous_job_has_the_rows_of_its_position(start_job, tmp_path, num_ps, num_workers):
    job = start_job(num_ps, num_workers)
    items = items_of(1200, 50)
    running = job.run("train", {"pause": 0.005}, items)
    full = job.cutter.take()
    files, seconds = job.cutter.write(full, str(tmp_path / "full"))
    assert files
    assert seconds > 0
    found, step, dense = counts(1200, tmp_path / "full")
    np.testing.assert_array_equal(found, trained(full.queue, items))
    assert 0 < found.sum() < 1200, "in the middle"
    assert step == full.step == dense > 0, "tables and dense parameters are of the same step"
    assert len(full.workers) == num_workers
    assert sum(state.data["steps"] for state in full.workers.values()) == step
    assert 0 < full.pause < 5
    part = job.cutter.take(base=full.save_id)
    job.cutter.write(part, str(tmp_path / "part"))
    assert part.base == full.save_id
    found, step, _ = counts(1200, tmp_path / "full", tmp_path / "part")
    np.testing.assert_array_equal(found, trained(part.queue, items))
    assert step == part.step > full.step
    running.result(60)
    last = job.cutter.take(base=part.save_id)
    job.cutter.write(last, str(tmp_path / "last"))
    found, _, _ = counts(1200, tmp_path / "full", tmp_path / "part", tmp_path / "last")
    np.testing.assert_array_equal(found, 1)


def test_a_cut_of_a_synchronous_job_is_after_the_same_step_everywhere(start_job, tmp_path):
    job = start_job(1, 2, "sync")
    parts = [items_of(400, 50), [{**item, "first": item["first"] + 400} for item in items_of(400, 50)]]
    phase = ("train", {"pause": 0.005}, None, parts)
    running = job.run(*phase)
    cut = job.cutter.take()
    job.cutter.write(cut, str(tmp_path / "cut"))
    assert {state.standing.steps for state in cut.workers.values()} == {cut.step}
    assert cut.queue is None
    found, _, dense = sums(800, tmp_path / "cut")
    assert dense == cut.step
    # A step has 4 rows of each worker, whose gradients are averaged.
    done = np.arange(400) < 4 * cut.step
    np.testing.assert_allclose(found, np.concatenate([done, done]) * 0.5, atol=1e-6)
    running.result(60)
    job.close()
    again = start_job(1, 2, "sync")
    again.coordinator.run_phase(Phase("train", assignment=[[], []]))
    again.cutter.restore([str(tmp_path / "cut")], cut.save_id)
    again.coordinator.run_phase(Phase("train", {"steps_done": cut.steps}, assignment=parts))
    end = again.cutter.take()
    again.cutter.write(end, str(tmp_path / "end"))
    np.testing.assert_allclose(sums(800, tmp_path / "end")[0], 0.5, atol=1e-6)


def test_a_cut_that_cannot_be_described_leaves_nothing_fixed(start_job, tmp_path):
    job = start_job(1, 1)
    items = items_of(400, 40)
    running = job.run("train", {"pause": 0.005}, items)
    with pytest.raises(ZeroDivisionError):
        job.cutter.take(describe=lambda cut: {"never": 1 // 0})
    cut = job.cutter.take()
    job.cutter.write(cut, str(tmp_path / "cut"))
    found, _, _ = counts(400, tmp_path / "cut")
    np.testing.assert_array_equal(found, trained(cut.queue, items))
    running.result(60)


def test_a_job_goes_on_from_a_cut_on_other_nodes(start_job, tmp_path):
    items = items_of(900, 40)
    first = start_job(2, 2)
    first.run("train", {"pause": 0.01}, items)
    cut = first.cutter.take()
    first.cutter.write(cut, str(tmp_path / "cut"))
    first.close()
    second = start_job(1, 3)
    second.coordinator.run_phase(Phase("train", items=[]))
    assert second.cutter.restore([str(tmp_path / "cut")], cut.save_id) == cut.step
    queue = WorkQueue.from_dict({**WorkQueue(items).to_dict(), **cut.queue})
    second.coordinator.run_phase(Phase("train", items=queue))
    end = second.cutter.take()
    second.cutter.write(end, str(tmp_path / "end"))
    found, _, _ = counts(900, tmp_path / "end")
    np.testing.assert_array_equal(found, 1)


def test_what_a_killed_worker_has_not_pushed_is_trained_by_others(start_job, tmp_path):
    """kill -9 in the middle of a lease: its rest goes back, each row is trained once, and a new copy rejoins."""
    job = start_job(1, 2)
    items = items_of(1500, 100)
    running = job.run("train", {"pause": 0.01}, items)
    victim = job.reports[0].data["pid"]
    os.kill(victim, signal.SIGKILL)
    results = running.result(90)
    assert victim not in {result.data["pid"] for result in results}
    end = job.cutter.take()
    job.cutter.write(end, str(tmp_path / "end"))
    found, _, _ = counts(1500, tmp_path / "end")
    np.testing.assert_array_equal(found, 1)


def test_a_phase_ends_without_the_lost_worker(start_job):
    """Nobody starts it again: the other one does all, and the job goes on with fewer."""
    job = start_job(1, 2, respawn=False, rejoin_timeout=1.0)
    running = job.run("train", {"pause": 0.01}, items_of(600, 50))
    os.kill(job.reports[0].data["pid"], signal.SIGKILL)
    assert len(running.result(60)) == 1
    assert len(job.coordinator.run_phase(Phase("train", {}, items_of(100, 50)))) == 1


def test_a_slow_worker_keeps_no_lease_from_an_idle_one(start_job):
    """Tenfold slower, it finishes at most the lease that it works on once nothing else is left."""
    job = start_job(1, 2)
    items = items_of(1000, 50)
    results = job.run("train", {"pause": 0.01, "slow": {"1": 10}}, items).result(90)
    ends = {result.rank: result.data["ends"] for result in results}
    assert len(ends[1]) + len(ends[2]) == len(items)
    assert sum(end > max(ends[1]) for end in ends[2]) <= 1


def test_a_callback_can_end_a_phase_between_two_steps(start_job):
    job = start_job(1, 2, "sync")
    parts = [items_of(4000, 50), items_of(4000, 50)]
    running = job.run("train", {"pause": 0.005}, None, parts)
    job.cutter.stop_phase()
    assert len(running.result(30)) == 2
    cut = job.cutter.take()
    assert len({state.data["steps"] for state in cut.workers.values()}) == 1
    assert cut.step < 1000
    job.cutter.drop(cut.save_id)


def test_an_unknown_base_makes_a_full_save(start_job, tmp_path):
    job = start_job(1, 1)
    job.coordinator.run_phase(Phase("train", items=items_of(10, 10)))
    cut = job.cutter.take(base="of another job")
    assert cut.base is None
    job.cutter.write(cut, str(tmp_path / "cut"))
    np.testing.assert_array_equal(counts(10, tmp_path / "cut")[0], 1)


def test_a_save_that_cannot_be_written_is_an_error_and_training_goes_on(start_job, tmp_path):
    job = start_job(1, 1)
    running = job.run("train", {"pause": 0.01}, items_of(400, 50))
    cut = job.cutter.take()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OrderError, match=r"server 0 \(rank 0\) on .* could not write"):
        job.cutter.write(cut, str(tmp_path / "file"))
    running.result(60)


def test_a_save_that_falls_due_with_the_last_report_of_a_phase_is_taken_before_it_ends(start_job, tmp_path):
    job = start_job(0, 1)
    coordinator, driver = job.coordinator, job.coordinator._driver
    phases, ended = [], []

    def describe(cut):
        phases.append((cut.phase, len(ended)))
        return {}

    def commit(draft):
        draft.write(str(tmp_path))
        return str(tmp_path)

    options = CheckpointOptions(save_secs=None, save_steps=1)
    saver = Saver(job.cutter, options, describe=describe, commit=commit, on_saved=lambda record: None)

    def tick():
        # With this lock the saver's thread gets no further than to where run_phase waits, for it or not at all.
        driver.acquire()
        assert driver.wait_for(lambda: coordinator._state.phase.finished, 30)
        saver.tick(1)

    try:
        coordinator.run_phase(Phase("train", {}, items_of(20, 10)), on_tick=tick)
        ended.append(True)
    finally:
        driver.release()
    saver.wait(30)
    assert phases == [(1, 0)]


def test_phases_wait_for_a_cut_longer_than_one_order_takes_but_not_for_ever():
    def waited(coordinator):
        with coordinator._driver:
            coordinator._wait_for_cut()

    options = CoordinatorOptions(1, 1, order_timeout=0.3, heartbeat_interval=0.05, heartbeat_timeout=1.0)
    with ThreadPoolExecutor(1) as pool, Coordinator(options) as coordinator:
        coordinator.begin_cut()
        waiting = pool.submit(waited, coordinator)
        with pytest.raises(TimeoutError):
            waiting.result(0.6)
        coordinator.end_cut()
        waiting.result(10)
        coordinator.begin_cut()
        with pytest.raises(NodeError, match="A save has held the workers for 2 s"):
            waited(coordinator)


def test_a_failure_during_a_cut_is_raised_and_frees_nobody_who_is_gone(start_job):
    job = start_job(1, 1, respawn=False, rejoin_timeout=0.5)
    running = job.run("train", {"pause": 0.2}, items_of(400, 50))
    pid = job.reports[0].data["pid"]
    holding = job.pool.submit(job.cutter.take)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(NodeError):
        running.result(60)
    holding.exception(60)
    assert time.monotonic() - started < 60
