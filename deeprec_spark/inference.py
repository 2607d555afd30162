"""Predict and evaluate on Spark with a checkpoint: each Python worker maps the tables, none holds them all.

Ids without a row read their table's default (see `checkpoint.snapshot`), as in the exported model.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deeprec_spark import checkpoint
from deeprec_spark.checkpoint.errors import CheckpointMismatchError
from deeprec_spark.checkpoint.snapshot import SnapshotStore
from deeprec_spark.data import BatchReader, ParquetDataset, ReaderOptions, RowRange
from deeprec_spark.data.arrays import pack_arrays, unpack_arrays
from deeprec_spark.data.columns import decode
from deeprec_spark.embedding.filesystem import redacted
from deeprec_spark.export.names import prediction_names
from deeprec_spark.features.arrow import prepare_column
from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.quiet import import_tensorflow
from deeprec_spark.training.options import TrainerOptions

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from deeprec_spark.training.trainer import Trainer

logger = logging.getLogger(__name__)

# A task of `evaluate` should be worth the start of a Python worker with TensorFlow.
_EVALUATE_ROWS = 16_384


@dataclass(frozen=True)
class InferenceModel:
    """All that a Spark task needs to predict: where the checkpoint is and how its Keras model is made.

    Args:
        path: Checkpoint directory, or a model directory, whose newest checkpoint is taken; executors must reach it.
        model_creator: `config` to the compiled Keras model, as given to the Estimator; it travels in Spark's closure.
            None: the model is made of the config in the checkpoint, for models that Keras can serialise.
        config: What `model_creator` gets.
        spec: How columns are prepared; None takes the checkpoint's.
        trainer: The options of the training.
        cache_dir: Where an executor keeps sorted tables; None is its temporary directory.

    Example:
        >>> scored = predict(df, InferenceModel("/models/ctr", model_creator=creator))
    """

    path: str
    model_creator: Callable[[dict[str, Any]], keras.Model] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    spec: FeatureSpec | None = None
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    cache_dir: str | None = None


class EvaluationData(Protocol):
    """Prepared Parquet rows with their spec, as `staging.StagedData`."""

    @property
    def dataset(self) -> ParquetDataset:
        """The rows."""

    @property
    def spec(self) -> FeatureSpec:
        """Their columns."""

    @property
    def sample_weight(self) -> str | None:
        """The weight column, if any."""


def predict(
    frame: DataFrame, model: InferenceModel, *, batch_size: int = 1024, prepared: bool | None = None
) -> DataFrame:
    """All columns of a DataFrame and the model's predictions, lazily.

    `prediction` is float for an output `[batch, 1]`, a list of floats for a wider one; a model with several
    outputs adds `prediction_<output>` for each. Rows keep their order and partitions; nulls take the spec's
    defaults. Data that were prepared in groups come back flat: one row and one prediction for each sample.

    Args:
        frame: Raw columns as the FeatureSpec names them; others pass through.
        model: See InferenceModel.
        batch_size: At most so many rows are predicted at once.
        prepared: Whether the columns are prepared already (ids hashed, numbers transformed), as training reads them;
            None: see by the mark that `prepare_dataframe` leaves.

    Raises:
        CheckpointNotFoundError, CheckpointMismatchError: No checkpoint, or another model's.
        ValueError: A column is missing, has a wrong type, or already bears the name of a prediction.
    """
    from pyspark.sql.types import StructField, StructType

    from deeprec_spark.features.groups import ungroup_rows
    from deeprec_spark.features.prepare import is_prepared, quoted, raw_columns

    _check_batch_size(batch_size)
    job = _Job.of(model, batch_size)
    frame = ungroup_rows(frame)
    if prepared is None:
        prepared = is_prepared(frame, job.spec)
    outputs = job.outputs()
    names = frame.columns
    taken = [name for name, _ in outputs if name in names]
    if taken:
        raise ValueError(f"The data has columns of the predictions' names: rename them. Received: {taken}")
    if len(set(names)) != len(names):
        raise ValueError(f"Column names must be unique. Received: columns {names}")
    schema = StructType([*frame.schema.fields, *(StructField(name, kind) for name, kind in outputs)])
    # The features ride along a second time: cast to the types that they are prepared from, the user's stay.
    if prepared:
        missing = [name for name in job.spec.feature_names if name not in names]
        if missing:
            raise ValueError(f"The data has no column {missing}. Received: columns {names}")
        features = [quoted(name) for name in job.spec.feature_names]
    else:
        features = raw_columns(frame, job.spec)
    # Numbered, because mapInArrow takes no column whose name has a dot.
    numbered = [column.alias(str(index)) for index, column in enumerate([*map(quoted, names), *features])]
    both = frame.select(*numbered)
    return both.mapInArrow(_PredictTask(job, names, prepared), schema)


def evaluate(
    spark: SparkSession, model: InferenceModel, data: EvaluationData, *, batch_size: int = 1024
) -> dict[str, float]:
    """The loss and metrics on prepared rows, summed exactly over all tasks; only their states come to the driver.

    An AUC over labels of one class is NaN, with a warning in the log.

    Args:
        spark: The session.
        model: See InferenceModel.
        data: Row ranges of prepared Parquet, their spec and weight column.
        batch_size: Rows of a batch.

    Raises:
        CheckpointNotFoundError, CheckpointMismatchError: No checkpoint, or another model's.
        ValueError: No rows.
    """
    _check_batch_size(batch_size)
    rows = data.dataset.num_rows
    if not rows:
        raise ValueError("The data set to evaluate has no rows. Received: 0 rows")
    job = _Job.of(model, batch_size, data.spec)
    trainer = job.driver_trainer()
    tasks = max(1, min(_parallelism(spark), -(-rows // _EVALUATE_ROWS)))
    parts = [part.to_items() for part in data.dataset.split_evenly(tasks)]
    task = _EvaluateTask(job, parts, data.sample_weight)
    collected = spark.range(tasks, numPartitions=tasks).mapInArrow(task, "part long, states binary").collect()
    states = [unpack_arrays(row["states"]) for row in sorted(collected, key=lambda row: int(row["part"]))]
    trainer.merge_metric_states(states)
    return trainer.metric_results()


@dataclass(frozen=True)
class _Job:
    """What travels to the tasks. `key` tells models apart in the cache of a Python worker."""

    model: InferenceModel
    path: str
    fingerprint: str
    spec: FeatureSpec
    batch_size: int
    key: str

    @classmethod
    def of(cls, model: InferenceModel, batch_size: int, spec: FeatureSpec | None = None) -> _Job:
        path = checkpoint.find(model.path)
        manifest = checkpoint.load(path, verify=False)
        spec = spec or model.spec or manifest.feature_spec
        if spec is None:
            raise ValueError(
                f"The checkpoint has no FeatureSpec: give one. Received: spec=None, path={redacted(path)!r}"
            )
        if model.model_creator is None and manifest.model.config is None:
            raise ValueError(
                "The checkpoint cannot say how its Keras model is made (it has no get_config): give model_creator. "
                f"Received: model_creator=None, model={manifest.model.name!r}"
            )
        content = cloudpickle.dumps((model, spec, manifest.fingerprint))
        key = hashlib.sha256(content).hexdigest()
        return cls(model, path, manifest.fingerprint, spec, batch_size, key)

    def driver_trainer(self) -> Trainer:
        """A trainer on the driver: it merges metrics and names outputs, and reads no table.

        Raises:
            CheckpointMismatchError: The model is not the checkpoint's.
        """
        from deeprec_spark.checkpoint.manifest import weight_records
        from deeprec_spark.embedding.local_store import LocalStore
        from deeprec_spark.layers.tables import table_specs

        manifest = checkpoint.load(self.path, verify=False)
        trainer = _make_trainer(self, manifest, LocalStore())
        manifest.check_model(table_specs(trainer.model), weight_records(trainer.model))
        return trainer

    def outputs(self) -> list[tuple[str, DataType]]:
        """Name and Spark type of each prediction column."""
        from pyspark.sql.types import ArrayType, FloatType

        from deeprec_spark.training.worker import sample_batch

        found = self.driver_trainer().predict_step(sample_batch(self.spec))
        kinds: list[DataType] = [
            FloatType() if _is_scalar(array) else ArrayType(FloatType(), containsNull=False)
            for array in found.values()
        ]
        return list(zip(prediction_names(list(found)), kinds, strict=True))


class _PredictTask:
    """The executor's side of `predict`: the user's columns and the features in, the former and predictions out."""

    def __init__(self, job: _Job, names: Sequence[str], prepared: bool) -> None:
        self._job = job
        self._names = list(names)
        self._prepared = prepared

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not batch.num_rows:
                continue
            predictions = self._predict(batch)
            columns = batch.columns[: len(self._names)]
            yield pa.RecordBatch.from_arrays(
                [*columns, *predictions.values()], names=[*self._names, *predictions]
            )

    def _predict(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        job = self._job
        trainer = _cached_trainer(job)
        columns = batch.columns[len(self._names) :]
        if not self._prepared:
            columns = [
                prepare_column(raw, feature) for raw, feature in zip(columns, job.spec.features, strict=True)
            ]
        rows = decode(pa.table(columns, names=job.spec.feature_names), job.spec, labels=False)
        parts = [
            trainer.predict_step(rows.slice(start, min(start + job.batch_size, rows.size)))
            for start in range(0, rows.size, job.batch_size)
        ]
        names = list(parts[0])
        arrays = [_as_column(np.concatenate([part[name] for part in parts])) for name in names]
        return dict(zip(prediction_names(names), arrays, strict=True))


class _EvaluateTask:
    """The executor's side of `evaluate`: row ranges in, the states of the metrics out."""

    def __init__(
        self, job: _Job, parts: Sequence[Sequence[Mapping[str, Any]]], sample_weight: str | None
    ) -> None:
        self._job = job
        self._parts = parts
        self._sample_weight = sample_weight

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for numbers in batches:
            for part in numbers.column(0).to_pylist():
                states = self._evaluate(part)
                yield pa.RecordBatch.from_pydict(
                    {"part": pa.array([part], pa.int64()), "states": pa.array([states], pa.binary())}
                )

    def _evaluate(self, part: int) -> bytes:
        job = self._job
        trainer = _cached_trainer(job)
        trainer.reset_metrics()
        options = ReaderOptions(batch_size=job.batch_size, sample_weight=self._sample_weight)
        ranges = (RowRange.from_dict(item) for item in self._parts[part])
        for batch, _ in BatchReader(job.spec, options).batches(ranges):
            trainer.evaluate_step(batch)
        return pack_arrays(trainer.metric_states())


# One model for each Python worker: Spark reuses workers, and a second model would double their memory.
_cached: tuple[str, Trainer] | None = None


def _cached_trainer(job: _Job) -> Trainer:
    global _cached
    if _cached is None or _cached[0] != job.key:
        _cached = None
        _configure_tensorflow()
        store = SnapshotStore(job.path, job.model.cache_dir)
        if store.manifest.fingerprint != job.fingerprint:
            raise CheckpointMismatchError(
                "The checkpoint was written anew since predict was called: call it again. "
                f"Received: path={redacted(job.path)!r}, fingerprint {store.manifest.fingerprint}, "
                f"expected {job.fingerprint}"
            )
        _cached = (job.key, _make_trainer(job, store.manifest, store))
    return _cached[1]


def _make_trainer(job: _Job, manifest: checkpoint.Manifest, store: Any) -> Trainer:
    import keras

    from deeprec_spark import layers, models  # noqa: F401 - registers their Keras classes
    from deeprec_spark.training.trainer import Trainer
    from deeprec_spark.training.worker import sample_batch

    if job.model.model_creator is not None:
        model = job.model.model_creator(dict(job.model.config))
    else:
        model = keras.saving.deserialize_keras_object(manifest.model.config)
    # Seeding and deterministic ops are process-wide settings of training.
    trainer = Trainer(model, store, replace(job.model.trainer, deterministic=False))
    trainer.initialize(sample_batch(job.spec))
    return trainer


def _configure_tensorflow() -> None:
    """As many threads as Spark gives the task; a worker that has run TensorFlow already keeps what it has."""
    import_tensorflow()
    import tensorflow as tf

    threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        logger.debug("TensorFlow runs already: its threads stay as they are")


def _is_scalar(array: npt.NDArray[Any]) -> bool:
    return array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)


def _as_column(array: npt.NDArray[Any]) -> pa.Array:
    """float32 `[n]` or `[n, 1]` as numbers, wider outputs as lists."""
    array = np.ascontiguousarray(array, np.float32)
    if _is_scalar(array):
        return pa.array(array.reshape(-1))
    flat = array.reshape(len(array), -1)
    offsets = np.arange(len(flat) + 1, dtype=np.int32) * flat.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.reshape(-1)))


def _parallelism(spark: Any) -> int:
    """Tasks that run at once; Spark Connect does not say, there the shuffle setting stands for it."""
    from pyspark.sql import SparkSession

    if isinstance(spark, SparkSession):
        return int(spark.sparkContext.defaultParallelism)
    return int(spark.conf.get("spark.sql.shuffle.partitions", "1"))


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1. Received: batch_size={batch_size}")
