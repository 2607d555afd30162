"""The Orca-style Estimator: a Keras model with sparse embeddings, trained on Spark executors."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from deeprec_spark import checkpoint, inference, orca
from deeprec_spark.checkpoint.manifest import ModelRecord
from deeprec_spark.cluster import TrainingCluster
from deeprec_spark.embedding.filesystem import is_local, join, redacted, resolve
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.store import PullRequest
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.estimator_options import EstimatorOptions
from deeprec_spark.export.saved_model import export_saved_model
from deeprec_spark.features.labels import LabelKinds
from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.fitting import FitLoop, FitOptions, FitStatistics
from deeprec_spark.layers import tables
from deeprec_spark.recovery import RestartOptions
from deeprec_spark.runtime.options import DeadlineOptions, Mode, Placement
from deeprec_spark.runtime.processors import ExecutorPolicy
from deeprec_spark.runtime.semi_sync import SemiSyncOptions
from deeprec_spark.runtime.slots import check_slots
from deeprec_spark.runtime.store_messages import WireType
from deeprec_spark.runtime.transport import TlsOptions
from deeprec_spark.saving import CheckpointOptions
from deeprec_spark.session import current_session
from deeprec_spark.staging import DataColumns, StagedData, Staging, as_dataframe
from deeprec_spark.tracing import FitObserver, FitReport, TracingOptions
from deeprec_spark.training import optimizers
from deeprec_spark.training.driver_model import DriverModel, label_kinds
from deeprec_spark.training.options import DenseStepOptions, TrainerOptions
from deeprec_spark.training.pipeline import PipelineOptions
from deeprec_spark.training.worker import WorkerJob

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

ModelCreator = Callable[[dict[str, Any]], "keras.Model"]


class Estimator:
    """Makes estimators; the name and the call are Orca's."""

    @staticmethod
    def from_keras(
        *,
        model_creator: ModelCreator,
        config: dict[str, Any] | None = None,
        num_ps: int = 0,
        num_workers: int | None = None,
        workers_per_node: int = 1,
        mode: Mode = "async",
        placement: Placement = "separate",
        semi_sync: SemiSyncOptions | None = None,
        sparse_optimizer: Optimizer | None = None,
        model_dir: str | None = None,
        feature_spec: FeatureSpec | None = None,
        seed: int = 0,
        warm_start: WarmStart | None = None,
        checkpoints: CheckpointOptions | None = None,
        restarts: RestartOptions | None = None,
        tracing: TracingOptions | None = None,
        shuffle_rows: int = 0,
        cache_dir: str | None = None,
        cache_mb: int = 10_240,
        log_to_driver: bool = True,
        tls: TlsOptions | None = None,
        max_message_mb: int = 1024,
        pipeline: PipelineOptions | None = None,
        wire_dtype: WireType = "float32",
        deadlines: DeadlineOptions | None = None,
        dense_step: DenseStepOptions | None = None,
        executor_policy: ExecutorPolicy = "default",
        backend: Literal["spark"] = "spark",
        spark: SparkSession | None = None,
    ) -> KerasEstimator:
        """An Estimator for a compiled Keras model.

        Args:
            model_creator: `config` to a compiled Keras model; runs on the driver and on every worker.
            config: what `model_creator` and data creators get.
            backend: "spark", the one there is.
            spark: the session to train on; None takes the active one or makes one.
            All others: see EstimatorOptions.

        Raises:
            ValueError: an option is wrong, or another backend is asked for.

        Example:
            >>> estimator = Estimator.from_keras(model_creator=creator, num_ps=1)  # doctest: +SKIP
            >>> estimator.fit(df, epochs=2, batch_size=512, label_cols=["click"])  # doctest: +SKIP
        """
        if backend != "spark":
            raise ValueError(f"backend must be 'spark'. Received: backend={backend!r}")
        options = EstimatorOptions(
            num_ps=num_ps,
            num_workers=num_workers,
            workers_per_node=workers_per_node,
            mode=mode,
            placement=placement,
            semi_sync=semi_sync,
            sparse_optimizer=sparse_optimizer,
            model_dir=model_dir,
            feature_spec=feature_spec,
            seed=seed,
            warm_start=warm_start,
            checkpoints=checkpoints or CheckpointOptions(),
            restarts=restarts or RestartOptions(),
            tracing=tracing,
            shuffle_rows=shuffle_rows,
            cache_dir=cache_dir,
            cache_mb=cache_mb,
            log_to_driver=log_to_driver,
            tls=tls,
            max_message_mb=max_message_mb,
            pipeline=pipeline,
            wire_dtype=wire_dtype,
            deadlines=deadlines or DeadlineOptions(),
            dense_step=dense_step or DenseStepOptions(),
            executor_policy=executor_policy,
        )
        return KerasEstimator(model_creator, config or {}, options, spark or current_session())


class KerasEstimator(orca.estimator_base()):  # type: ignore[misc]  # its base depends on whether BigDL is there
    """Trains, evaluates, predicts and exports one model. Make it with `Estimator.from_keras`."""

    def __init__(
        self,
        model_creator: ModelCreator,
        config: dict[str, Any],
        options: EstimatorOptions,
        spark: SparkSession,
    ) -> None:
        # Orca's own __init__ belongs to its training path: it opens a log server and looks for a barrier cluster.
        self.model_creator = model_creator
        self.config = config
        self.options = options
        self.model_dir = (
            _absolute(options.model_dir) if options.model_dir else tempfile.mkdtemp(prefix="deeprec-spark-")
        )
        self.statistics: FitStatistics | None = None
        self._spark = spark
        self._cluster_options = options.cluster(spark)
        self._checkpoint: str | None = None
        self._observer: FitObserver | None = None

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        batch_size: int = 32,
        verbose: int = 1,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        validation_data: Any = None,
        class_weight: dict[int, float] | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_freq: int = 1,
        data_config: dict[str, Any] | None = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        sample_weight_col: str | None = None,
        shuffle: bool = True,
    ) -> dict[str, list[float]]:
        """Train, and leave a checkpoint in `model_dir`; a later `fit` goes on from it.

        Args:
            data: Spark DataFrame, FeatureTable, SparkXShards, path of Parquet data, or a function
                `(config, batch_size)` that returns batches.
            epochs: number of the last epoch.
            batch_size: rows of a step: of all workers together in sync mode, of each worker in async mode.
            verbose: 0 silent, 1 progress, 2 one line an epoch.
            callbacks: Keras callbacks; they run on the driver, with batches at each progress report.
            validation_data: evaluated every `validation_freq` epochs; any kind that `data` may be.
            class_weight: weight of the loss by label value.
            steps_per_epoch, validation_steps: cut an epoch short; None reads all rows.
            data_config: overrides entries of `config` for data creators.
            feature_cols, label_cols, sample_weight_col: the roles of the columns.
            shuffle: read in another order each epoch, seeded.

        Returns:
            History: for each metric the numbers of the epochs.

        Raises:
            ValueError: no rows, columns that do not fit, a model without SparseEmbedding, or a checkpoint of
                another model.
            SlotsError: Spark has fewer task slots than the nodes that were asked for.
            NodeError: a node failed; its traceback is in the message.
        """
        fit_options = FitOptions(
            epochs=epochs,
            batch_size=batch_size,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_freq=validation_freq,
            validation_steps=validation_steps,
            shuffle=shuffle,
            shuffle_rows=self.options.shuffle_rows,
            seed=self.options.seed,
            verbose=verbose,
        )
        columns = DataColumns(feature_cols, label_cols, sample_weight_col)
        model = self.model_creator(self.config)
        # What is wrong without looking at the data is said before the data are written.
        self._check_model(model)
        check_slots(self._spark, self._cluster_options.num_ps, self._cluster_options.num_workers)
        with self._staging(label_kinds(model)) as staging:
            train = staging.stage(
                data,
                columns,
                spec=self.options.feature_spec,
                config={**self.config, **(data_config or {})},
                batch_size=batch_size,
                max_batches=steps_per_epoch,
            )
            if not train.spec.labels:
                raise ValueError(
                    "There is nothing to learn: name the labels by label_cols. "
                    f"Received: label_cols={label_cols}, features {train.spec.feature_names}"
                )
            validation = None
            if validation_data is not None:
                validation = staging.stage(
                    validation_data,
                    columns,
                    spec=train.spec,
                    config={**self.config, **(data_config or {})},
                    batch_size=batch_size,
                    max_batches=validation_steps,
                )
            return self._fit(model, train, validation, fit_options, callbacks or [], class_weight)

    def evaluate(
        self,
        data: Any,
        batch_size: int = 1024,
        num_steps: int | None = None,
        verbose: int = 1,
        data_config: dict[str, Any] | None = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        sample_weight_col: str | None = None,
    ) -> dict[str, float]:
        """The metrics of the last checkpoint on `data`, summed exactly over all Spark tasks.

        Arguments are those of `fit`; `num_steps` stops after that many batches.

        Raises:
            ValueError: no rows, no checkpoint, or columns that do not fit.
        """
        directory = self._trained()
        manifest = checkpoint.load(directory, verify=False)
        columns = DataColumns(feature_cols, label_cols, sample_weight_col)
        with self._staging() as staging:
            staged = staging.stage(
                data,
                columns,
                spec=self.options.feature_spec or manifest.feature_spec,
                config={**self.config, **(data_config or {})},
                batch_size=batch_size,
                max_batches=num_steps,
            )
            dataset = staged.dataset if num_steps is None else staged.dataset.limited(num_steps * batch_size)
            results = inference.evaluate(
                self._spark,
                self._inference_model(directory, staged.spec),
                replace(staged, dataset=dataset),
                batch_size=batch_size,
            )
        if verbose:
            logger.info("evaluate: %d rows, %s", dataset.num_rows, results)
        return results

    def predict(
        self, data: Any, batch_size: int = 1024, feature_cols: Sequence[str] | None = None
    ) -> DataFrame:
        """A lazy DataFrame: the columns of `data` and `prediction` (one column for each output).

        Args:
            data: DataFrame, FeatureTable, SparkXShards or path of Parquet data.
            batch_size: rows that a task predicts at once.
            feature_cols: the model's columns; None takes those it was trained with.

        Raises:
            ValueError: no checkpoint, or columns that do not fit.
        """
        directory = self._trained()
        spec = self.options.feature_spec or checkpoint.load(directory, verify=False).feature_spec
        frame = self._dataframe(data, DataColumns(feature_cols))
        model = self._inference_model(directory, spec)
        unknown = [name for name in feature_cols or () if spec is None or name not in spec.feature_names]
        if unknown:
            known = [] if spec is None else spec.feature_names
            raise ValueError(
                f"feature_cols must be those of the training: {known}. Received: unknown {unknown}"
            )
        return inference.predict(frame, model, batch_size=batch_size)

    def report(self) -> FitReport:
        """Where the time of the last `fit` went: stages by worker, load by server and table; also of one that failed.

        Raises:
            ValueError: this estimator has not been fitted.
        """
        if self._observer is None:
            raise ValueError("There is nothing to report yet: call fit first. Received: no fit")
        return self._observer.report()

    def get_model(self) -> keras.Model:
        """The Keras model with the trained weights; its SparseEmbedding layers read the last checkpoint."""
        directory = self._trained()
        manifest = checkpoint.load(directory, verify=False)
        if manifest.feature_spec is None:
            raise ValueError(
                f"The checkpoint has no FeatureSpec to build the model on. Received: {redacted(directory)}"
            )
        driver = DriverModel(self.model_creator(self.config), manifest.feature_spec, self._trainer_options())
        manifest.check_model(driver.table_specs)
        store = checkpoint.SnapshotStore(directory)
        reply = store.pull(PullRequest({}, train=False, dense=True))
        if reply.dense is not None and reply.state is not None:
            driver.load_dense(reply.dense, reply.state)
        tables.bind(driver.model, store)
        return driver.model

    def export(self, path: str, overwrite: bool = True) -> str:
        """Write the last checkpoint as a SavedModel of stock TensorFlow ops, embeddings inside; returns `path`.

        Signatures: `serving_default` takes raw values as the FeatureSpec describes them, `prepared` takes prepared
        columns.
        """
        directory = self._trained()
        model = self.get_model()
        manifest = checkpoint.load(directory, verify=False)
        export_saved_model(
            model, checkpoint.SnapshotStore(directory), path, spec=manifest.feature_spec, overwrite=overwrite
        )
        logger.info("SavedModel: %s", redacted(path))
        return path

    def save(self, filepath: str, overwrite: bool = True) -> str:
        """Copy the last checkpoint to `filepath`: tables, dense weights, optimizer state, model config, spec."""
        checkpoint.copy(self._trained(), filepath, overwrite=overwrite)
        return filepath

    def load(self, filepath: str) -> None:
        """Go on from what `save` wrote: the next fit, evaluate or predict uses it.

        Raises:
            CheckpointNotFoundError: nothing is there.
            CheckpointCorruptError: a file is damaged.
        """
        self._checkpoint = checkpoint.chain(filepath)[-1]

    def save_weights(self, filepath: str, overwrite: bool = True) -> str:
        """The same as `save`: the weights of this model are its tables and its dense weights."""
        return self.save(filepath, overwrite)

    def load_weights(self, filepath: str) -> None:
        """The same as `load`."""
        self.load(filepath)

    def shutdown(self) -> None:
        """Forget the state; nodes live only inside `fit`, so there is none to stop."""
        self._checkpoint = None

    def _staging(self, kinds: LabelKinds | None = None) -> Staging:
        return Staging(
            self._spark, self.model_dir, num_shards=self._cluster_options.num_workers, label_kinds=kinds
        )

    def _check_model(self, model: keras.Model) -> None:
        """See that the model has tables, and those of the checkpoint to go on from; warn of how it clips."""
        dense_optimizer = optimizers.from_keras(model.optimizer)
        optimizers.warn_of_clipping(model.optimizer, self._cluster_options.sync_workers)
        specs = tables.table_specs(model, self.options.sparse_optimizer or dense_optimizer)
        start = self._start()
        warm = self.options.warm_start
        if start is not None:
            manifest = checkpoint.load(start, verify=False)
            manifest.check_model(specs)
            manifest.check_options(
                specs, dense_optimizer, changed_options=self.options.checkpoints.changed_options
            )
        elif warm is not None:
            checkpoint.load(warm.path, verify=False).check_warm_start(specs, warm)

    def _fit(
        self,
        model: keras.Model,
        train: StagedData,
        validation: StagedData | None,
        options: FitOptions,
        callbacks: Sequence[keras.callbacks.Callback],
        class_weight: dict[int, float] | None,
    ) -> dict[str, list[float]]:
        trainer_options = self._trainer_options(class_weight)
        driver = DriverModel(model, train.spec, trainer_options)
        start = self._start()
        if start is not None:
            manifest = checkpoint.load(start, verify=False)
            manifest.check_model(driver.table_specs, ModelRecord.of(driver.model).weights)
        job = WorkerJob(
            model_creator=self.model_creator,
            config=self.config,
            spec=train.spec,
            trainer=trainer_options,
            sample_weight=train.sample_weight,
            seed=self.options.seed,
            cache=self.options.cache,
            pipeline=self.options.pipeline_options,
        )
        loop = FitLoop(
            driver,
            train,
            validation,
            options,
            callbacks,
            cluster=self._cluster_options,
            model_dir=self.model_dir,
            checkpoints=self.options.checkpoints,
            restarts=self.options.restarts,
            tracing=self.options.tracing,
            start=start,
            warm_start=self.options.warm_start,
        )
        self.statistics = loop.statistics
        self.statistics.max_staleness = job.pipeline.staleness
        self._observer = loop.observer
        try:
            history = loop.run(lambda: TrainingCluster(self._spark, self._cluster_options, job))
        finally:
            # After a failure the next fit goes on from what was saved last.
            self._checkpoint = loop.last_checkpoint
        if self.options.semi_sync is not None:
            logger.info("Semi-sync: %s", loop.statistics.semi_sync.describe(self.options.semi_sync))
        return history

    def _start(self) -> str | None:
        """The checkpoint that the next fit begins with; the last whole one where that is asked for."""
        if not self.options.checkpoints.fallback:
            return self._checkpoint or checkpoint.latest(self.model_dir)
        if self._checkpoint is None:
            found = checkpoint.scan(self.model_dir)
            if not found.entries and not found.damaged:
                return None
        return checkpoint.chain(self._checkpoint or self.model_dir, fallback=True)[-1]

    def _trained(self) -> str:
        """The directory of the checkpoint that evaluate, predict, export and save use."""
        directory = self._checkpoint or self._start()
        if directory is None:
            raise checkpoint.CheckpointNotFoundError(
                "There is no trained model yet: call fit or load first, or give the model_dir of an earlier fit. "
                f"Received: model_dir={redacted(self.model_dir)!r}"
            )
        return directory

    def _trainer_options(self, class_weight: dict[int, float] | None = None) -> TrainerOptions:
        return TrainerOptions(
            sparse_optimizer=self.options.sparse_optimizer,
            class_weight=class_weight,
            deterministic=self.options.mode == "sync",
            seed=self.options.seed,
            dense_step=self.options.dense_step,
        )

    def _inference_model(self, directory: str, spec: FeatureSpec | None) -> inference.InferenceModel:
        return inference.InferenceModel(
            directory, self.model_creator, self.config, spec=spec, trainer=self._trainer_options()
        )

    def _dataframe(self, data: Any, columns: DataColumns) -> DataFrame:
        if isinstance(data, str):
            return self._spark.read.parquet(data)
        frame = as_dataframe(self._spark, data, columns)
        if frame is None:
            raise TypeError(
                "data must be a DataFrame, a FeatureTable, SparkXShards or the path of Parquet data. "
                f"Received: {type(data).__name__}"
            )
        return frame


def _absolute(model_dir: str) -> str:
    """A model_dir that means the same on every host: a plain absolute path, or a URI that can be opened."""
    path: str = resolve(model_dir)[1]
    return path if is_local(model_dir) else join(model_dir)
