"""The main of a worker node: builds the model, then works through the phases that the driver sets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from deeprec_spark.data import Batch, BatchReader, ReaderOptions, RowRange
from deeprec_spark.data.arrays import pack_arrays
from deeprec_spark.features.spec import FeatureKind, FeatureSpec
from deeprec_spark.quiet import import_tensorflow
from deeprec_spark.runtime.context import WorkerContext
from deeprec_spark.runtime.worker_client import LeasedItem, PhaseTask, WorkerClient
from deeprec_spark.training.options import TrainerOptions

if TYPE_CHECKING:
    import keras

    from deeprec_spark.training.trainer import Trainer

logger = logging.getLogger(__name__)

ENTRY = "deeprec_spark.training.worker:main"
"""What the runtime starts on a worker node."""

PROGRESS_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerJob:
    """What every worker of a job knows before its first phase. It travels inside Spark's own task closure.

    `seed` sets Keras's random state before `model_creator(config)` runs, so all workers build the same model;
    0 threads leave TensorFlow's choice.
    """

    model_creator: Callable[[dict[str, Any]], keras.Model]
    config: dict[str, Any]
    spec: FeatureSpec
    trainer: TrainerOptions
    sample_weight: str | None = None
    seed: int = 0
    intra_op_threads: int = 0
    inter_op_threads: int = 0

    def to_bytes(self) -> bytes:
        """The job by cloudpickle: model creators are functions of the user's own module or notebook."""
        payload: bytes = cloudpickle.dumps(self)
        return payload


def main(context: WorkerContext) -> None:
    """Run one worker until the driver has no more phases."""
    import_tensorflow()
    import keras
    import tensorflow as tf

    from deeprec_spark.training.trainer import Trainer

    job: WorkerJob = cloudpickle.loads(context.payload)
    tf.config.threading.set_intra_op_parallelism_threads(job.intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(job.inter_op_threads)
    keras.utils.set_random_seed(job.seed)
    model = job.model_creator(job.config)
    trainer = Trainer(model, context.store, job.trainer)
    trainer.initialize(sample_batch(job.spec))
    # Dropout must differ between the ranks, though the initial weights must not.
    keras.utils.set_random_seed(job.seed + 1 + context.worker_index)
    trainer.reseed(context.worker_index)
    worker = Worker(job, trainer, context)
    while (task := context.client.next_phase()) is not None:
        worker.run(task)


class Worker:
    """Carries out phases: train, evaluate, save, restore, dense."""

    def __init__(self, job: WorkerJob, trainer: Trainer, context: WorkerContext) -> None:
        self._job = job
        self._trainer = trainer
        self._context = context
        self._client: WorkerClient = context.client
        self._handlers: dict[str, Callable[[PhaseTask], tuple[dict[str, Any], bytes]]] = {
            "train": self._train,
            "evaluate": self._evaluate,
            "save": self._save,
            "restore": self._restore,
            "dense": self._dense,
        }

    def run(self, task: PhaseTask) -> None:
        """Carry out one phase and hand its result to the driver."""
        data, blob = self._handlers[task.kind](task)
        self._client.finish(data, blob)

    def _train(self, task: PhaseTask) -> tuple[dict[str, Any], bytes]:
        payload = task.payload
        trainer = self._trainer
        trainer.reset_metrics()
        if payload["learning_rate"] is not None:
            trainer.set_learning_rate(payload["learning_rate"])
        options = ReaderOptions(
            batch_size=payload["batch_size"],
            sample_weight=self._job.sample_weight,
            shuffle_seed=payload["shuffle_seed"],
            epoch=payload["epoch"],
        )
        meter = _Meter(self._client, trainer)
        for batch in self._batches(task, options):
            trainer.train_step(batch)
            meter.count(batch.size)
        # Ranks of a synchronous job take the same number of steps; one that is out of rows takes part with none.
        for _ in range(meter.steps, payload.get("steps") or 0):
            trainer.train_empty()
            meter.count(0)
        meter.report()
        return meter.result(), pack_arrays(trainer.metric_states())

    def _evaluate(self, task: PhaseTask) -> tuple[dict[str, Any], bytes]:
        trainer = self._trainer
        trainer.reset_metrics()
        options = ReaderOptions(batch_size=task.payload["batch_size"], sample_weight=self._job.sample_weight)
        meter = _Meter(self._client, trainer)
        for batch in self._batches(task, options):
            trainer.evaluate_step(batch)
            meter.count(batch.size)
        return meter.result(), pack_arrays(trainer.metric_states())

    def _save(self, task: PhaseTask) -> tuple[dict[str, Any], bytes]:
        files = self._context.store.save(task.payload["directory"])
        return {"files": [vars(file) for file in files]}, b""

    def _restore(self, task: PhaseTask) -> tuple[dict[str, Any], bytes]:
        self._context.store.restore(task.payload["directory"])
        return {}, b""

    def _dense(self, task: PhaseTask) -> tuple[dict[str, Any], bytes]:
        self._trainer.refresh()
        data = {"step": self._trainer.step, "statistics": self._context.store.statistics()}
        return data, pack_arrays(self._trainer.dense_vector())

    def _batches(self, task: PhaseTask, options: ReaderOptions) -> Iterator[Batch]:
        """Batches of the phase's rows; a lease is given back when its last row has been handed to a step."""
        reader = BatchReader(self._job.spec, options)
        leased: dict[RowRange, LeasedItem] = {}

        def ranges(first: LeasedItem) -> Iterator[RowRange]:
            # While rows are held, do not wait for other workers' leases: they might wait for these.
            item: LeasedItem | None = first
            while item is not None:
                part = RowRange.from_dict(item.data)
                leased[part] = item
                yield part
                item = self._client.lease(wait=False)

        # With nothing held, wait: what a lost worker held comes back to the queue.
        while (item := self._client.lease()) is not None:
            for batch, finished in reader.batches(ranges(item)):
                yield batch
                for part in finished:
                    self._client.complete(leased.pop(part))


class _Meter:
    """Counts steps and samples, and reports them about once a second."""

    def __init__(self, client: WorkerClient, trainer: Trainer) -> None:
        self._client = client
        self._trainer = trainer
        self._started = time.monotonic()
        self._next_report = self._started + PROGRESS_SECONDS
        self.steps = 0
        self.samples = 0

    def count(self, samples: int) -> None:
        self.steps += 1
        self.samples += samples
        if time.monotonic() >= self._next_report:
            self.report()

    def report(self) -> None:
        self._client.progress(
            {"steps": self.steps, "samples": self.samples, "logs": self._trainer.metric_results()}
        )
        self._next_report = time.monotonic() + PROGRESS_SECONDS

    def result(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "samples": self.samples,
            "seconds": time.monotonic() - self._started,
            "step": self._trainer.step,
        }


def sample_batch(spec: FeatureSpec, size: int = 2) -> Batch:
    """A batch of defaults that has the shapes and types of the spec: enough to build a model on.

    Example:
        >>> from deeprec_spark.features.spec import Feature
        >>> feature = Feature(name="h", kind="sequence", raw_type="int64", max_length=3)
        >>> sample_batch(FeatureSpec(features=[feature])).features["h"].shape
        (2, 3)
    """
    features: dict[str, npt.NDArray[Any]] = {}
    for feature in spec.features:
        if feature.kind is FeatureKind.DENSE:
            shape = (size,) if feature.width is None else (size, feature.width)
            features[feature.name] = np.zeros(shape, np.float32)
        elif feature.kind is FeatureKind.CATEGORICAL:
            features[feature.name] = np.zeros(size, np.int64)
        else:
            features[feature.name] = np.full((size, feature.max_length or 1), feature.padding_value, np.int64)
    labels = {
        label.name: np.zeros(size, np.int64 if label.kind == "multiclass" else np.float32)
        for label in spec.labels
    }
    return Batch(features, labels)
