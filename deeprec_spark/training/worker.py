"""The main of a worker node: builds the model, then works through the phases that the driver sets."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from deeprec_spark.data import Batch, BatchReader, Groups, ReaderOptions
from deeprec_spark.data.arrays import pack_arrays, unpack_arrays
from deeprec_spark.data.columns import projected
from deeprec_spark.data.file_cache import CacheOptions, FileCache
from deeprec_spark.features.spec import FeatureKind, FeatureSpec
from deeprec_spark.quiet import import_tensorflow
from deeprec_spark.runtime import processors
from deeprec_spark.runtime.context import WorkerContext
from deeprec_spark.runtime.gate import StepGate
from deeprec_spark.runtime.pace import BackupPace, Pace
from deeprec_spark.runtime.worker_client import PhaseTask, WorkerClient
from deeprec_spark.tracing.stages import StageClock
from deeprec_spark.tracing.staleness import Staleness
from deeprec_spark.training import function_options
from deeprec_spark.training.leases import LeasedBatches, LeasedStep
from deeprec_spark.training.options import TrainerOptions
from deeprec_spark.training.pipeline import Begin, PipelineOptions, StepPipeline

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

    `seed` sets Keras's random state before `model_creator(config)` runs, so all workers build the same model.
    """

    model_creator: Callable[[dict[str, Any]], keras.Model]
    config: dict[str, Any]
    spec: FeatureSpec
    trainer: TrainerOptions
    sample_weight: str | None = None
    seed: int = 0
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    cache: CacheOptions | None = None

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
    if isinstance(context.pace, BackupPace) and job.pipeline.staleness:
        raise ValueError(
            "With backup workers a batch is pulled once its step is the current one: set "
            f"PipelineOptions.max_staleness=0. Received: {job.pipeline}"
        )
    chosen = processors.current()
    threads = threads_of_an_operation(chosen, job, context.num_workers)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(chosen.threads)
    keras.utils.set_random_seed(job.seed)
    model = job.model_creator(job.config)
    trainer = Trainer(model, context.store, job.trainer)
    trainer.initialize(sample_batch(job.spec))
    # Dropout must differ between the ranks, though the initial weights must not.
    keras.utils.set_random_seed(job.seed + 1 + context.worker_index)
    trainer.reseed(context.worker_index)
    worker = Worker(job, trainer, context)
    with function_options.inline() if chosen.policy == "inline" else nullcontext():
        while (task := context.client.next_phase()) is not None:
            worker.run(task)


def threads_of_an_operation(chosen: processors.Processors, job: WorkerJob, num_workers: int) -> int:
    """TensorFlow's threads within an operation; several operations run at once besides, on all threads.

    A step that has the cores to itself gets all threads. Where other workers, or the worker's other step, may compute
    at the same time, an operation that is split waits for parts whose thread has no core: there are as many as the node
    has cores of its own. Threads are made before the model is, so this goes by the options alone.
    """
    dense = job.trainer.dense_step
    side_by_side = job.pipeline.staleness > 0 and job.pipeline.parallel_steps > 1
    one_at_a_time = not side_by_side or dense.xla or dense.micro_batch is not None
    return chosen.threads if num_workers == 1 and one_at_a_time else chosen.part


class Worker:
    """Carries out phases: train, evaluate, dense."""

    def __init__(self, job: WorkerJob, trainer: Trainer, context: WorkerContext) -> None:
        self._job = job
        self._trainer = trainer
        self._context = context
        self._client: WorkerClient = context.client
        self._handlers: dict[str, Callable[[PhaseTask], tuple[dict[str, Any], bytes]]] = {
            "train": self._train,
            "evaluate": self._evaluate,
            "dense": self._dense,
        }
        self._gate = context.gate
        self._spec = projected(job.spec, trainer.input_columns)
        self._cache = None if job.cache is None else FileCache(job.cache)
        self._training: tuple[int, _Meter] | None = None
        context.on_cut(self._state)

    def run(self, task: PhaseTask) -> None:
        """Carry out one phase and hand its result to the driver."""
        data, blob = self._handlers[task.kind](task)
        self._client.finish(data, blob)

    def _train(self, task: PhaseTask) -> tuple[dict[str, Any], bytes]:
        payload = task.payload
        trainer = self._trainer
        trainer.reset_metrics()
        trainer.staleness = Staleness()
        resumed = ResumedWorker.of(payload.get("resume"), self._context.worker_index)
        if resumed.metrics:
            trainer.load_metric_states(resumed.metrics)
        if resumed.random:
            trainer.load_random_state(resumed.random)
        if payload["learning_rate"] is not None:
            trainer.set_learning_rate(payload["learning_rate"])
        options = ReaderOptions(
            batch_size=payload["batch_size"],
            sample_weight=self._job.sample_weight,
            shuffle_seed=payload["shuffle_seed"],
            epoch=payload["epoch"],
        )
        meter = _Meter(self._client, trainer, StageClock(self._context.spans))
        self._training = (task.number, meter)
        self._context.pace.enter()
        self._gate.enter(task.number, resumed.steps)
        try:
            self._train_steps(task, options, meter, resumed.steps)
        finally:
            self._gate.leave()
        semi_sync = self._context.pace.leave()
        meter.report()
        states = trainer.metric_states()
        data = {**meter.result(), "metrics": len(states), "semi_sync": semi_sync.to_dict()}
        if self._cache is not None:
            data["cache"] = dict(self._cache.counts())
        return data, pack_arrays([*states, *trainer.random_state()])

    def _train_steps(self, task: PhaseTask, options: ReaderOptions, meter: _Meter, done: int) -> None:
        """All steps of an epoch, from step `done` on, or fewer where the driver ends it."""
        gate, pace, trainer = self._gate, self._context.pace, self._trainer
        leases = self._leases(task, options, pace, meter.clock, skip=done * options.batch_size)
        steps_gate = _PipelineGate(gate, pace, meter, leases)
        pipeline = StepPipeline(trainer, self._job.pipeline, steps_gate, meter.clock)
        while not steps_gate.stopped and (batches := leases.next_round()) is not None:
            for step in pipeline.train(batches):
                meter.stale_pulls = pipeline.stale_pulls
                meter.report_if_due()
                leases.complete(step)
                for item in step.finished:
                    gate.forget(item.index)
        # Ranks of a synchronous job take the same number of steps; one that is out of rows takes part with none.
        for _ in range(done + meter.steps, task.payload.get("steps") or 0):
            with meter.clock.stage("wait"):
                if not gate.begin():
                    return
            if pace.behind:
                pace.skip()
            else:
                # All that it takes is others' part of the step, which is no time of this worker's own.
                with meter.clock.stage("push"):
                    trainer.train_empty()
                pace.ended()
            meter.count(pace.used(0))
            gate.end()
            meter.report_if_due()

    def _state(self, phase: int) -> tuple[Mapping[str, Any], bytes]:
        """What a save keeps of this worker; called between two steps, from the control thread."""
        random = self._trainer.random_state()
        if self._training is None or self._training[0] != phase:
            return {"begun": False, "samples": 0, "metrics": 0}, pack_arrays(random)
        states = self._trainer.metric_states()
        samples = self._training[1].samples
        return {"begun": True, "samples": samples, "metrics": len(states)}, pack_arrays([*states, *random])

    def _evaluate(self, task: PhaseTask) -> tuple[dict[str, Any], bytes]:
        trainer = self._trainer
        trainer.reset_metrics()
        trainer.refresh()
        options = ReaderOptions(batch_size=task.payload["batch_size"], sample_weight=self._job.sample_weight)
        meter = _Meter(self._client, trainer)
        leases = self._leases(task, options, Pace(), meter.clock)
        while (batches := leases.next_round()) is not None:
            with closing(batches):
                for batch, step in batches:
                    if not leases.begin(step):
                        break
                    trainer.evaluate_step(batch)
                    meter.count(batch.size)
                    meter.report_if_due()
                    leases.complete(step)
        return meter.result(), pack_arrays(trainer.metric_states())

    def _dense(self, task: PhaseTask) -> tuple[dict[str, Any], bytes]:
        self._trainer.refresh()
        data = {"step": self._trainer.step, "statistics": self._context.store.statistics()}
        return data, pack_arrays(self._trainer.dense_vector())

    def _leases(
        self, task: PhaseTask, options: ReaderOptions, pace: Pace, clock: StageClock, skip: int = 0
    ) -> LeasedBatches:
        reader = BatchReader(self._spec, options, self._cache)
        return LeasedBatches(self._client, reader, task, pace, clock, skip)


class _PipelineGate:
    """The worker's gate, its pace, its leases and its meter, as a pipeline of steps asks them.

    A step is counted before the gate hears of its end, which may be all that a save waits for: what a cut tells of a
    worker is of the same moment as its tables.
    """

    def __init__(self, gate: StepGate, pace: Pace, meter: _Meter, leases: LeasedBatches) -> None:
        self._gate = gate
        self._pace = pace
        self._meter = meter
        self._leases = leases
        # Rows of the steps that have begun, and of those that have ended: each is counted in one thread.
        self._rows_begun = self._rows_ended = 0
        self.stopped = False
        """Whether the driver has ended the phase."""

    def begin(self, tag: LeasedStep, *, wait: bool) -> Begin:
        """See `pipeline.Gate`."""
        # Its turn first: a step that has begun must not wait for others, whom a save may hold, and while it waits
        # others may take its rows over.
        if not self._pace.may_begin(wait=wait):
            return Begin.HELD
        granted = self._leases.begin(tag, self._rows_begun - self._rows_ended)
        if not granted:
            return Begin.HELD if granted is None else Begin.STOP
        answer = self._gate.begin(tag.rows, wait=wait)
        if not answer:
            self.stopped = answer is not None
            return Begin.HELD if answer is None else Begin.STOP
        if self._pace.behind:
            self._pace.skip()
            self._meter.count(self._pace.used(tag.batch.size))
            self._gate.end()
            return Begin.SKIP
        self._pace.begun()
        self._rows_begun += tag.batch.rows
        return Begin.GO

    def end(self, tag: LeasedStep) -> None:
        """See `pipeline.Gate`."""
        self._rows_ended += tag.batch.rows
        self._pace.ended()
        self._meter.count(self._pace.used(tag.batch.size))
        self._gate.end()

    def wait_for(self, batch: Future[Any]) -> bool:
        """See `pipeline.Gate`."""
        return self._gate.wait_for(batch)


@dataclass(frozen=True)
class ResumedWorker:
    """Where a worker goes on in an epoch that was begun before: its steps, metric states and random state."""

    steps: int = 0
    metrics: Sequence[npt.NDArray[Any]] = ()
    random: Sequence[npt.NDArray[Any]] = ()

    @classmethod
    def of(cls, resume: Mapping[str, Any] | None, worker_index: int) -> ResumedWorker:
        """This worker's part of a train phase's `resume`; nothing where it has none."""
        if resume is None:
            return cls()
        workers = resume["workers"]
        if worker_index >= len(workers):
            return cls(resume["steps"])
        state = workers[worker_index]
        arrays = unpack_arrays(base64.b64decode(state["arrays"]))
        count = state["metrics"]
        return cls(resume["steps"], arrays[:count], arrays[count:])


class _Meter:
    """Counts steps, samples and the seconds of stages, and reports them about once a second.

    One thread counts, which may be another than the one that reports.
    """

    def __init__(self, client: WorkerClient, trainer: Trainer, clock: StageClock | None = None) -> None:
        self._client = client
        self._trainer = trainer
        self.clock = clock or StageClock()
        self._started = time.monotonic()
        self._next_report = self._started + PROGRESS_SECONDS
        self.steps = 0
        self.samples = 0
        self.stale_pulls = 0

    def count(self, samples: int) -> None:
        """A step has ended that has updated the model by so many samples."""
        self.steps += 1
        self.samples += samples

    def report_if_due(self) -> None:
        if time.monotonic() >= self._next_report:
            self.report()

    def report(self) -> None:
        self._client.progress({**self._counts(), "logs": self._trainer.metric_results()})
        self._next_report = time.monotonic() + PROGRESS_SECONDS

    def result(self) -> dict[str, Any]:
        return {**self._counts(), "step": self._trainer.step}

    def _counts(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "samples": self.samples,
            "stale_pulls": self.stale_pulls,
            "staleness": self._trainer.staleness.to_dict(),
            "seconds": time.monotonic() - self._started,
            "stages": dict(self.clock.seconds),
            "incarnation": self._client.incarnation,
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
    grouping = spec.grouping
    if grouping is None:
        return Batch(features, labels)
    groups = Groups(frozenset(grouping.features), np.ones(size, np.int64))
    return Batch(features, labels, groups=groups, group_index=grouping.index)
