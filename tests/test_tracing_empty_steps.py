"""Steps that a synchronous worker takes part in without rows are others' time, not its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deeprec_spark.data import ParquetDataset
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.runtime.context import WorkerContext
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions
from deeprec_spark.runtime.gate import StepGate
from deeprec_spark.runtime.pace import Pace
from deeprec_spark.runtime.phases import Phase
from deeprec_spark.runtime.worker_client import WorkerClient
from deeprec_spark.tracing.spans import SpanRing, TraceBounds
from deeprec_spark.training.options import TrainerOptions
from deeprec_spark.training.trainer import Trainer
from deeprec_spark.training.worker import Worker, WorkerJob, sample_batch
from tests.counting import SPEC, counting

ROWS, BATCH, STEPS = 8, 4, 6


def test_a_step_without_rows_is_a_push(tmp_path: Path) -> None:
    number = np.arange(ROWS)
    table = pa.table({"row": number, "one": np.ones(ROWS, np.float32), "y": number.astype(np.float32)})
    pq.write_table(table, tmp_path / "rows.parquet")
    items = ParquetDataset.scan(str(tmp_path / "rows.parquet")).to_items()
    spans = SpanRing(TraceBounds(1000))
    job = WorkerJob(counting, {}, SPEC, TrainerOptions(sparse_optimizer=SGD(1.0)))
    trainer = Trainer(counting({}), LocalStore(), job.trainer)
    trainer.initialize(sample_batch(SPEC))
    payload = {
        "epoch": 0, "batch_size": BATCH, "shuffle_seed": None, "learning_rate": None, "resume": None, "steps": STEPS,
    }  # fmt: skip
    with Coordinator(CoordinatorOptions(0, 1, "sync")) as coordinator, ThreadPoolExecutor(1) as pool:
        client = WorkerClient(coordinator.address, token=coordinator.token, rank=0)
        try:
            client.claim("first", "host-a", timeout=0)
            client.announce(None)
            worker = Worker(
                job,
                trainer,
                WorkerContext(
                    0,
                    0,
                    1,
                    "sync",
                    client,
                    trainer.store,
                    b"",
                    StepGate(),
                    Pace(),
                    lambda capture: None,
                    spans,
                ),
            )
            running = pool.submit(
                coordinator.run_phase, Phase("train", payload, assignment=[items]), timeout=60.0
            )
            task = client.next_phase()
            assert task is not None
            worker.run(task)
            [result] = running.result(60)
            assert (result.data["steps"], result.data["samples"]) == (STEPS, ROWS)
            client.exited(0)
        finally:
            client.close()
            trainer.store.close()
    stages = [span.name for span in spans.drain()]
    assert {stage: stages.count(stage) for stage in ("pull", "compute", "push")} == {
        "pull": 2, "compute": 2, "push": STEPS,
    }  # fmt: skip
