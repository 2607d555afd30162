"""The main of a worker node: builds the model, then works through the phases that the driver sets."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from deeprec_spark.data import Batch, BatchReader, Groups, ReaderOptions, Work
from deeprec_spark.data.arrays import pack_arrays, unpack_arrays
from deeprec_spark.data.columns import projected
from deeprec_spark.data.file_cache import CacheOptions, FileCache
from deeprec_spark.data.shuffle import Leased, leased_from_dict
from deeprec_spark.features.spec import FeatureKind, FeatureSpec
from deeprec_spark.quiet import import_tensorflow
from deeprec_spark.runtime import processors
from deeprec_spark.runtime.context import WorkerContext
from deeprec_spark.runtime.gate import StepGate
from deeprec_spark.runtime.pace import BackupPace, Pace
from deeprec_spark.runtime.worker_client import LeasedItem, PhaseTask, WorkerClient
from deeprec_spark.tracing.stages import StageClock
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

    `seed` sets Keras's random state before `model_creator(config)` runs, so all workers build the same model;
    0 threads leave the choice to the executor policy.
    """

    model_creator: Callable[[dict[str, Any]], keras.Model]
    config: dict[str, Any]
    spec: FeatureSpec
    trainer: TrainerOptions
    sample_weight: str | None = None
    seed: int = 0
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    cache: CacheOptions | None = None
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
    if isinstance(context.pace, BackupPace) and job.pipeline.max_staleness:
        raise ValueError(
            "With backup workers a batch is pulled once its step is the current one: set "
            f"PipelineOptions.max_staleness=0. Received: {job.pipeline}"
        )
    chosen = processors.current()
    tf.config.threading.set_intra_op_parallelism_threads(job.intra_op_threads or chosen.threads)
    tf.config.threading.set_inter_op_parallelism_threads(job.inter_op_threads or chosen.threads)
    keras.utils.set_random_seed(job.seed)
    model = job.model_creator(job.config)
    trainer = Trainer(model, context.store, job.trainer)
    trainer.initialize(sample_batch(job.spec))
    # Dropout must differ between the ranks, though the initial weights must not.
    keras.utils.set_random_seed(job.seed + 1 + context.worker_index)
    trainer.reseed(context.worker_index)
    worker = Worker(job, trainer, context)
    with _executor(chosen.policy):
        while (task := context.client.next_phase()) is not None:
            worker.run(task)


@contextmanager
def _executor(policy: processors.ExecutorPolicy) -> Iterator[None]:
    """Let TensorFlow run the operations of a step in this thread alone where the policy is inline."""
    if policy != "inline":
        yield
        return
    from tensorflow.python.eager import context  # no public way to choose a function's executor

    with context.function_executor_type("SINGLE_THREADED_EXECUTOR"):
        yield


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
        work = self._steps(task, options, pace, skip=done * options.batch_size)
        pipeline = StepPipeline(trainer, self._job.pipeline, _PipelineGate(gate, pace, meter), meter.clock)
        for step in pipeline.train(None if step is None else (step.batch, step) for step in work):
            meter.stale_pulls = pipeline.stale_pulls
            meter.report_if_due()
            self._complete(step)
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
        for step in self._steps(task, options, Pace()):
            if step is None:
                continue
            trainer.evaluate_step(step.batch)
            meter.count(step.batch.size)
            meter.report_if_due()
            self._complete(step)
        return meter.result(), pack_arrays(trainer.metric_states())

    def _dense(self, task: PhaseTask) -> tuple[dict[str, Any], bytes]:
        self._trainer.refresh()
        data = {"step": self._trainer.step, "statistics": self._context.store.statistics()}
        return data, pack_arrays(self._trainer.dense_vector())

    def _complete(self, step: _Step) -> None:
        """Give back the leases whose last row was in this step."""
        for item in step.finished:
            self._client.complete(item)

    def _steps(
        self, task: PhaseTask, options: ReaderOptions, pace: Pace, skip: int = 0
    ) -> Iterator[_Step | None]:
        """Batches of the phase's rows; the first `skip` assigned rows are left out.

        None before a wait for rows that others hold: they may wait for those of the batches before it.
        """
        reader = BatchReader(self._spec, options, self._cache)
        leased: dict[Leased, LeasedItem] = {}

        def work(first: LeasedItem) -> Iterator[Work]:
            # While rows are held, do not wait for other workers' leases: they might wait for these.
            nonlocal skip
            item: LeasedItem | None = first
            while item is not None:
                part = leased_from_dict(item.data)
                done = item.done if task.dynamic else min(skip, part.rows)
                skip -= 0 if task.dynamic else done
                if done < part.rows:
                    leased[part] = item
                    yield Work(part, done)
                item = self._client.lease(wait=False)

        def begin(part: Leased) -> bool:
            # Near the end an idle worker may have taken the range over.
            granted = self._client.begin(leased[part])
            if not granted:
                del leased[part]
            return granted

        while True:
            item = self._client.lease(wait=False)
            if item is None:
                # With nothing held, wait: what a lost worker held comes back to the queue.
                yield None
                pace.starving()
                item = self._client.lease()
            if item is None:
                return
            for step in reader.steps(work(item), begin):
                rows = {leased[part].index: count for part, count in step.rows.items()}
                pace.reading()
                yield _Step(step.batch, rows, [leased.pop(part) for part in step.finished])


@dataclass(frozen=True)
class _Step:
    """A batch, how many rows of which items are used with it, and the items that it finishes."""

    batch: Batch
    rows: Mapping[int, int]
    finished: Sequence[LeasedItem]


class _PipelineGate:
    """The worker's gate, its pace and its meter, as a pipeline of steps asks them.

    A step is counted before the gate hears of its end, which may be all that a save waits for: what a cut tells of a
    worker is of the same moment as its tables.
    """

    def __init__(self, gate: StepGate, pace: Pace, meter: _Meter) -> None:
        self._gate = gate
        self._pace = pace
        self._meter = meter

    def begin(self, tag: _Step, *, wait: bool) -> Begin:
        """See `pipeline.Gate`."""
        # Its turn first: a step that has begun must not wait for others, whom a save may hold.
        if not self._pace.may_begin(wait=wait):
            return Begin.HELD
        answer = self._gate.begin(tag.rows, wait=wait)
        if not answer:
            return Begin.HELD if answer is None else Begin.STOP
        if self._pace.behind:
            self._pace.skip()
            self._meter.count(self._pace.used(tag.batch.size))
            self._gate.end()
            return Begin.SKIP
        self._pace.begun()
        return Begin.GO

    def end(self, tag: _Step) -> None:
        """See `pipeline.Gate`."""
        self._pace.ended()
        self._meter.count(self._pace.used(tag.batch.size))
        self._gate.end()


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
