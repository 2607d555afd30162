"""A worker that is ten times slower keeps no more than one lease from the other, however far its reading is ahead.

Two real workers and a real coordinator in one process; who may push is decided by counting, not by time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deeprec_spark.data import ParquetDataset
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.store import PullRequest, PushRequest, UniqueKeys
from deeprec_spark.runtime.context import WorkerContext
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions, Phase
from deeprec_spark.runtime.gate import StepGate
from deeprec_spark.runtime.pace import Pace
from deeprec_spark.runtime.work_queue import Item, Lease, WorkQueue
from deeprec_spark.runtime.worker_client import NodeClient, WorkerClient
from deeprec_spark.training.options import TrainerOptions
from deeprec_spark.training.pipeline import PipelineOptions
from deeprec_spark.training.trainer import Trainer
from deeprec_spark.training.worker import Worker, WorkerJob, sample_batch
from tests.counting import SPEC, counting

BATCH, SLOWER, PATIENCE = 4, 10, 60.0
FAST, SLOW = 0, 1


class Turns:
    """Lets the fast worker push ten times for each push of the slow one, and one that waits for rows hold nobody up."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._idle = [False, False]
        self.pushed = [0, 0]
        self.while_fast_was_idle: list[int] = []

    def idle(self, worker: int, idle: bool) -> None:
        with self._condition:
            if self._idle[worker] == idle:
                return
            self._idle[worker] = idle
            if worker == FAST and idle:
                self.while_fast_was_idle.append(0)
            self._condition.notify_all()

    def push(self, worker: int) -> None:
        end = time.monotonic() + PATIENCE
        with self._condition:
            while not self._may_push(worker):
                assert self._condition.wait(end - time.monotonic()), f"{self._idle}, {self.pushed}"
            self.pushed[worker] += 1
            if worker == SLOW and self._idle[FAST]:
                self.while_fast_was_idle[-1] += 1
            self._condition.notify_all()

    def _may_push(self, worker: int) -> bool:
        fast, slow = self.pushed
        if worker == FAST:
            return self._idle[SLOW] or fast < SLOWER * (slow + 1)
        return self._idle[FAST] or fast >= SLOWER * (slow + 1)


class TurnStore:
    """One store for both workers, which push when it is their turn."""

    def __init__(self, store: LocalStore, worker: int) -> None:
        self._store = store
        self._worker = worker
        self.turns = Turns()

    def push(self, request: PushRequest) -> int:
        self.turns.push(self._worker)
        return self._store.push(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Queue(WorkQueue):
    """Tells at once which worker waits for rows, and when it has some again."""

    def __init__(self, items: Sequence[Item], turns: Turns) -> None:
        super().__init__(items)
        self._turns = turns

    def take(self, owner: Any, *, steal: bool = False) -> Lease | None:
        lease = super().take(owner, steal=steal)
        if steal or lease is not None:
            self._turns.idle(owner[0] - 1, lease is None)
        return lease


class Pair:
    """A coordinator, and two workers that carry out its phases in threads."""

    def __init__(self) -> None:
        options = CoordinatorOptions(1, 2, "async", heartbeat_timeout=3600.0)
        self.coordinator = Coordinator(options)
        self.store = LocalStore()
        self.pool = ThreadPoolExecutor(3)
        address, token = self.coordinator.address, self.coordinator.token
        self._server = NodeClient(address, token=token, rank=0)
        self._stores = [TurnStore(self.store, worker) for worker in (FAST, SLOW)]
        self._clients = [WorkerClient(address, token=token, rank=1 + worker) for worker in (FAST, SLOW)]
        for client in (self._server, *self._clients):
            assert client.claim("first", "here")["status"] == "accepted"
            client.announce("nowhere:1" if client is self._server else None)
        self._trainers = []
        for store in self._stores:
            keras.utils.set_random_seed(1)
            trainer = Trainer(counting({}), store, TrainerOptions(sparse_optimizer=SGD(1.0)))  # type: ignore[arg-type]
            trainer.initialize(sample_batch(SPEC))
            self._trainers.append(trainer)

    def train(self, items: list[dict[str, Any]], staleness: int) -> Turns:
        """One epoch; how it went."""
        job = WorkerJob(counting, {}, SPEC, TrainerOptions(), pipeline=PipelineOptions(2, staleness))
        turns = Turns()
        payload = {"epoch": 0, "batch_size": BATCH, "shuffle_seed": 3, "learning_rate": None}
        queue = Queue(items, turns)
        phase = self.pool.submit(self.coordinator.run_phase, Phase("train", payload, queue), timeout=PATIENCE)

        def work(worker: int) -> None:
            client, store = self._clients[worker], self._stores[worker]
            store.turns = turns
            context = WorkerContext(
                1 + worker, worker, 2, "async", client, store, b"", StepGate(), Pace(), lambda capture: None
            )
            task = client.next_phase()
            assert task is not None
            Worker(job, self._trainers[worker], context).run(task)

        for worker in [self.pool.submit(work, worker) for worker in (FAST, SLOW)]:
            worker.result(PATIENCE)
        phase.result(PATIENCE)
        return turns

    def counts(self, rows: int) -> np.ndarray:
        keys = np.arange(rows)
        request = PullRequest({"rows": UniqueKeys(keys, np.ones_like(keys))}, train=False, dense=False)
        return np.rint(self.store.pull(request).rows["rows"][:, 0]).astype(int)

    def close(self) -> None:
        for client in (self._server, *self._clients):
            client.exited(0)
            client.close()
        self.coordinator.stop(timeout=10)
        self.pool.shutdown()
        self.store.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(("lease", "batches", "row_group"), [(1, 60, 240), (3, 66, 264), (5, 120, 49)])
def test_a_slow_worker_has_no_more_than_one_lease_when_the_other_has_nothing(
    pair: Pair, tmp_path: Path, staleness: int, lease: int, batches: int, row_group: int
) -> None:
    rows = batches * BATCH
    number = np.arange(rows)
    table = pa.table({"row": number, "one": np.ones(rows, np.float32), "y": number.astype(np.float32)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=row_group)
    items = ParquetDataset.scan(str(tmp_path)).chunked(lease * BATCH).to_items()
    before = pair.counts(rows)
    turns = pair.train(items, staleness)
    np.testing.assert_array_equal(pair.counts(rows) - before, 1)
    fast, slow = turns.pushed
    # Leases that are no multiple of a batch let an epoch end with a short one for each worker and each taking over.
    assert fast + slow >= batches
    # A batch may have its first rows of the lease before.
    assert max(turns.while_fast_was_idle) <= lease + bool(row_group % (lease * BATCH))
    assert slow <= (fast + slow) / SLOWER + lease
