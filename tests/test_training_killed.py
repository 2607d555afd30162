"""kill -9 in a job of real workers that train on groups and keep to a bound of staleness: samples are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deeprec_spark.cluster import ClusterOptions
from deeprec_spark.data import ParquetDataset
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.epochs import EpochPlan
from deeprec_spark.features.spec import Feature, FeatureSpec, Grouping
from deeprec_spark.runtime.cut import Cut
from deeprec_spark.runtime.phases import Phase
from deeprec_spark.runtime.semi_sync import SemiSyncOptions
from deeprec_spark.training.options import TrainerOptions
from deeprec_spark.training.pipeline import PipelineOptions
from deeprec_spark.training.worker import ENTRY, WorkerJob
from tests.command_lines import command_line
from tests.counting import SPEC, counting
from tests.test_runtime_cut import Job
from tests.test_training_cut import PAYLOAD, counts

pytestmark = pytest.mark.timeout(180)

ROWS = 3000

GROUPED = FeatureSpec(
    features=[Feature(name="user", kind="categorical", raw_type="int64"), *SPEC.features],
    labels=SPEC.labels,
    grouping=Grouping(by=("user",), features=("user",)),
)
StartJob = Callable[..., Job]


@pytest.fixture
def start_job() -> Iterator[StartJob]:
    with ExitStack() as stack:

        def start(
            spec: FeatureSpec, cluster: ClusterOptions, staleness: int = 0, respawn: bool = True
        ) -> Job:
            options = TrainerOptions(sparse_optimizer=SGD(1.0))
            worker = WorkerJob(counting, {}, spec, options, pipeline=PipelineOptions(2, staleness))
            job = Job(
                cluster.num_ps, cluster.num_workers, cluster.mode, respawn, cluster.semi_sync, ENTRY,
                worker.to_bytes(),
            )  # fmt: skip
            stack.callback(job.close)
            job.coordinator.run_phase(Phase("dense"))
            return job

        yield start


def cut_in_the_middle(
    job: Job,
    running: Future[Any],
    done: Callable[[Cut], int],
    directory: Path,
    then: Callable[[], None] = lambda: None,
) -> Cut:
    """The first cut that has trained something; `then` happens before it is written, while training goes on."""
    while True:
        assert not running.done()
        cut = job.cutter.take()
        if done(cut):
            then()
            job.cutter.write(cut, str(directory))
            return cut
        job.cutter.drop(cut.save_id)


def kill(name: str) -> None:
    """kill -9 of a node that this process has started."""
    [node] = [
        child
        for child in psutil.Process().children(recursive=True)
        if "deeprec_spark.runtime.node" in (line := command_line(child))
        and any(part.startswith(f"{name} ") for part in line)
    ]
    node.kill()


def at_the_end(job: Job, directory: Path) -> np.ndarray:
    """How often each row was trained."""
    job.cutter.write(job.cutter.take(), str(directory))
    return counts(directory, ROWS)


def test_groups_within_a_bound_are_trained_once_whoever_is_killed(
    start_job: StartJob, tmp_path: Path
) -> None:
    """A worker in the middle of an epoch; then the job goes on from what was saved before, as after a killed driver."""
    sizes = np.random.default_rng(3).integers(1, 6, ROWS)
    ends = np.cumsum(sizes)
    ends = [*ends[ends < ROWS], ROWS]
    rows = np.split(np.arange(ROWS), ends[:-1])
    table = pa.table(
        {
            "user": np.arange(len(rows)),
            "row": [group.tolist() for group in rows],
            "one": pa.array([[1.0] * len(group) for group in rows], pa.list_(pa.float32())),
            "y": pa.array([group.astype(float).tolist() for group in rows], pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, tmp_path / "groups.parquet", row_group_size=211)
    plan = EpochPlan(
        ParquetDataset.scan(str(tmp_path / "groups.parquet")),
        ClusterOptions(1, 2, semi_sync=SemiSyncOptions(max_staleness=3)),
        batch_size=1,
    )
    payload = {**PAYLOAD, "batch_size": 1}
    job = start_job(GROUPED, plan.cluster, staleness=1, respawn=False)
    running = job.pool.submit(job.coordinator.run_phase, plan.phase("train", payload, plan.rows(0)))

    def killed() -> None:
        kill("worker 0")
        assert not running.done(), "in the middle"

    def completed(cut: Cut) -> int:
        return len((cut.queue or {"done": []})["done"])

    cut = cut_in_the_middle(job, running, completed, tmp_path / "cut", killed)
    running.result(60)
    np.testing.assert_array_equal(at_the_end(job, tmp_path / "end"), 1)
    job.cutter.restore([str(tmp_path / "cut")], cut.save_id)
    before = counts(tmp_path / "cut", ROWS).sum()
    results = job.coordinator.run_phase(plan.phase("train", payload, plan.rows(0), cut.queue))
    np.testing.assert_array_equal(at_the_end(job, tmp_path / "resumed"), 1)
    assert sum(result.data["samples"] for result in results) == ROWS - before > 0
