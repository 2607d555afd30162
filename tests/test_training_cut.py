"""Cuts through the training of real workers whose pulls run ahead of their pushes, proven by counting rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deeprec_spark.cluster import ClusterOptions
from deeprec_spark.data import ParquetDataset
from deeprec_spark.data.arrays import unpack_arrays
from deeprec_spark.data.dataset import RowRange
from deeprec_spark.data.reader import BatchReader, ReaderOptions
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.store import PullRequest, UniqueKeys
from deeprec_spark.epochs import EpochPlan
from deeprec_spark.layers.tables import table_specs
from deeprec_spark.runtime.cut import Cut
from deeprec_spark.runtime.phases import Phase
from deeprec_spark.runtime.work_queue import WorkQueue
from deeprec_spark.training.options import TrainerOptions
from deeprec_spark.training.pipeline import PipelineOptions
from deeprec_spark.training.worker import ENTRY, WorkerJob
from tests.counting import SPEC, counting
from tests.test_runtime_cut import Job

pytestmark = pytest.mark.timeout(180)

ROWS, BATCH, SEED = 5700, 4, 7  # some cuts fall into them; the sum of their numbers is exact as float32
PAYLOAD: dict[str, Any] = {
    "epoch": 0, "batch_size": BATCH, "shuffle_seed": SEED, "learning_rate": None, "resume": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ParquetDataset:
    """Rows numbered from 0, in row groups that are no multiples of a batch."""
    number = np.arange(ROWS)
    table = pa.table({"row": number, "one": np.ones(ROWS, np.float32), "y": number.astype(np.float32)})
    place = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(table, place, row_group_size=307)
    return ParquetDataset.scan(str(place))


class Training:
    """Workers that train the counting model in processes of their own."""

    def __init__(self, dataset: ParquetDataset, num_ps: int, num_workers: int, staleness: int) -> None:
        job = WorkerJob(
            counting,
            {},
            SPEC,
            TrainerOptions(sparse_optimizer=SGD(1.0)),
            pipeline=PipelineOptions(2, staleness),
        )
        self.job = Job(num_ps, num_workers, entry=ENTRY, payload=job.to_bytes())
        self.plan = EpochPlan(dataset, ClusterOptions(num_ps, num_workers), BATCH, seed=SEED)
        self.items = self.queue().to_dict()["items"]

    def queue(self, done: Any = None) -> WorkQueue:
        queue = self.plan.phase("train", PAYLOAD, self.plan.rows(0), done).queue()
        assert queue is not None
        return queue

    def trained(self, position: Any) -> np.ndarray:
        """How often each row was trained, as a position says."""
        reader = BatchReader(SPEC, ReaderOptions(ROWS, shuffle_seed=SEED))
        done = {
            **{index: self.items[index]["rows"] for index in position["completed"]},
            **dict(position["done"]),
        }
        found = np.zeros(ROWS, int)
        for index, rows in done.items():
            [(batch, _)] = reader.batches(iter([RowRange.from_dict(self.items[index])]))
            np.add.at(found, batch.features["row"][:rows], 1)
        return found

    def write(self, cut: Cut, directory: Path) -> Path:
        self.job.cutter.write(cut, str(directory))
        return directory


def counts(directory: Path, rows: int = ROWS) -> np.ndarray:
    """How often each row was trained, as the tables say."""
    store = LocalStore()
    store.create_tables(table_specs(counting({}), SGD(1.0)))
    store.restore([str(directory)])
    keys = np.arange(rows)
    reply = store.pull(PullRequest({"rows": UniqueKeys(keys, np.ones_like(keys))}, train=False, dense=False))
    store.close()
    return np.rint(reply.rows["rows"][:, 0]).astype(int)


@pytest.fixture(params=[(0, 1, 2), (1, 2, 1)], ids=["one worker", "two workers"])
def training(request: pytest.FixtureRequest, dataset: ParquetDataset) -> Iterator[Training]:
    made = Training(dataset, *request.param)
    yield made
    made.job.close()


def test_a_cut_is_of_one_moment_though_pulls_run_ahead(training: Training, tmp_path: Path) -> None:
    """Tables, position in the data, steps, samples and metrics; and what is left of it is trained once."""
    job, cutter = training.job, training.job.cutter
    job.coordinator.run_phase(Phase("dense"))
    running = job.pool.submit(job.coordinator.run_phase, Phase("train", PAYLOAD, training.queue()))
    inside: list[tuple[Cut, Path]] = []
    while not running.done():
        cut = cutter.take()
        directory = training.write(cut, tmp_path / cut.save_id)
        if not cut.phase:
            break
        done = training.trained(cut.queue)
        np.testing.assert_array_equal(counts(directory), done)
        assert sum(state.standing.steps for state in cut.workers.values()) == cut.step
        told = [(state.data, unpack_arrays(state.blob)) for state in cut.workers.values()]
        assert sum(data["samples"] for data, _ in told) == done.sum()
        # Each has the loss's total and count, and the sum of the labels of the samples that it has seen.
        seen = [arrays[: data["metrics"]] for data, arrays in told]
        assert sum(int(states[1]) for states in seen) == done.sum()
        assert sum(int(states[2]) for states in seen) == np.flatnonzero(done).sum()
        if 0 < done.sum() < ROWS:
            inside.append((cut, directory))
    results = running.result(60)
    assert sum(result.data["stale_pulls"] for result in results) > 0, "pulls ran ahead"
    assert sum(result.data["samples"] for result in results) == ROWS
    assert inside, "no cut fell into the training"
    np.testing.assert_array_equal(counts(training.write(cutter.take(), tmp_path / "end")), 1)
    middle, directory = inside[len(inside) // 2]
    assert cutter.restore([str(directory)], middle.save_id) == middle.step
    rest = job.coordinator.run_phase(Phase("train", PAYLOAD, training.queue(middle.queue)))
    assert sum(result.data["samples"] for result in rest) == ROWS - training.trained(middle.queue).sum()
    np.testing.assert_array_equal(counts(training.write(cutter.take(), tmp_path / "resumed")), 1)
