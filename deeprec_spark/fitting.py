"""The driver's side of a fit: epochs as phases of a cluster of nodes, callbacks, validation, checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from deeprec_spark import checkpoint
from deeprec_spark.checkpoint.directory import model_dir_of
from deeprec_spark.cluster import ClusterOptions, TrainingCluster
from deeprec_spark.data.arrays import unpack_arrays
from deeprec_spark.embedding.filesystem import delete_directory, join, redacted, resolve
from deeprec_spark.embedding.store import CheckpointFile
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.epochs import EpochPlan, RunningEpoch, summarize
from deeprec_spark.fit_options import FitOptions, FitStatistics
from deeprec_spark.position import EpochPosition, FitIdentity, FitPosition, WorkerArrays
from deeprec_spark.progress import ProgressDisplay
from deeprec_spark.recovery import RestartOptions, going_back, with_restarts
from deeprec_spark.runtime.cut import Cut
from deeprec_spark.runtime.errors import TerminatedError
from deeprec_spark.runtime.phases import Phase, Progress
from deeprec_spark.saving import CheckpointOptions, Draft, Saver, SaveRecord, Termination
from deeprec_spark.staging import StagedData
from deeprec_spark.tracing import FitObserver, FitRecorder, TracingOptions
from deeprec_spark.tracing.report import split_line
from deeprec_spark.training.callbacks import CallbackHost
from deeprec_spark.training.driver_model import DriverModel

if TYPE_CHECKING:
    import keras

logger = logging.getLogger(__name__)

BEST_FOLDER = "best"
"""Below model_dir: the checkpoint of the best epoch, while a fit that may go back to it runs."""


class FitLoop:
    """Runs the epochs of one fit, on one cluster after another where nodes fail.

    Args:
        driver: the model on the driver.
        train, validation: the staged rows.
        options, callbacks: of the fit.
        cluster: how many nodes, and their mode.
        model_dir: where checkpoints go.
        checkpoints, restarts: when to save, and how often to start again.
        tracing: what to write beside the log.
        start: the checkpoint to begin with; None begins with a new model.
        warm_start: what a new model takes over from another checkpoint.
    """

    def __init__(
        self,
        driver: DriverModel,
        train: StagedData,
        validation: StagedData | None,
        options: FitOptions,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        cluster: ClusterOptions,
        model_dir: str,
        checkpoints: CheckpointOptions | None = None,
        restarts: RestartOptions | None = None,
        tracing: TracingOptions | None = None,
        start: str | None = None,
        warm_start: WarmStart | None = None,
    ) -> None:
        self._driver = driver
        self._train = train
        self._validation = validation
        self._options = options
        self._cluster_options = cluster
        self._model_dir = join(model_dir)
        self._checkpoints = checkpoints or CheckpointOptions()
        self._restarts = restarts or RestartOptions()
        self._tracing = tracing
        self._start = start
        self._warm_start = warm_start
        self._plan = EpochPlan(
            train.dataset, cluster, options.batch_size, options.steps_per_epoch, options.shuffle, options.seed,
            options.shuffle_rows,
        )  # fmt: skip
        self._position = self._first = self._first_position()
        self._host = CallbackHost(
            driver.model,
            callbacks,
            epochs=options.epochs,
            steps=self._plan.num_steps,
            pull_weights=self._pull_dense,
            save_best=self._save_best,
            restore_best=self._restore_best,
        )
        self._display = ProgressDisplay(options.verbose, options.epochs)
        self._termination = Termination()
        self._last: SaveRecord | None = None
        self._best: str | None = None
        self._begun = self._ended = self._ready = False
        self._running_epoch: int | None = None
        self._epoch = RunningEpoch()
        self._step = 0
        self.statistics = FitStatistics()
        self.observer = FitObserver(
            cluster.mode, cluster.num_ps, {spec.name: spec.embedding_dim for spec in driver.table_specs}
        )

    @property
    def last_checkpoint(self) -> str | None:
        """The newest checkpoint of this fit, else the one that it began with."""
        return self._start if self._last is None else self._last.directory

    def run(self, start_cluster: Callable[[], TrainingCluster]) -> dict[str, list[float]]:
        """Train all epochs that are left, and leave a checkpoint.

        Returns:
            Keras's history: a list of one number an epoch for each metric (a list of them, where it has several).

        Raises:
            NodeError: a node failed for a reason that would come again, or too often (`max_restarts`).
            TerminatedError: SIGTERM has come; what was trained is saved.
        """
        cluster, log = self._cluster_options, self._options.verbose > 0
        self._recorder = FitRecorder(
            self.observer, self._tracing, self._model_dir, cluster.num_ps, cluster.num_workers, log=log
        )
        with self._recorder, self._display, self._termination.watch(self._checkpoints.on_sigterm):
            with_restarts(
                lambda: self._attempt(start_cluster),
                self._restarts,
                on_restart=self._on_restart,
                interrupt=self._termination.asked,
                saves=lambda: len(self.statistics.saves),
            )
        return self._host.history

    # --- one attempt: a cluster from its start to the last epoch ---

    def _attempt(self, start_cluster: Callable[[], TrainingCluster]) -> None:
        self._ready = False
        # Phases of the new nodes are numbered anew.
        self._epoch = RunningEpoch()
        # What cannot be restored is said before anything is started.
        with going_back(restart=self.statistics.restarts > 0):
            chain = self._chain()
        with start_cluster() as cluster:
            self._cluster = cluster
            cluster.wait_ready(self._stop_if_asked)
            self._recorder.nodes_started(cluster.observe)
            self._saver = Saver(
                cluster.cutter,
                self._checkpoints,
                describe=self._describe,
                commit=lambda draft: self._commit(draft, self._model_dir, self._checkpoints.keep_max),
                on_saved=self._on_saved,
            )
            try:
                with going_back(restart=self.statistics.restarts > 0):
                    self._go_back(chain)
                self._ready = True
                self._begin_callbacks()
                self._train_epochs()
                if not self._ended:
                    self._ended = True
                    self._host.train_end()
                self._finish()
            finally:
                # A save whose files are written may still commit: the next attempt shall see it whole or not at all.
                self._saver.settle()

    def _chain(self) -> list[str]:
        """The directories to restore from, whole; none for a new model."""
        if self.last_checkpoint is None:
            return []
        fallback = self._checkpoints.fallback or self.statistics.restarts > 0
        return checkpoint.chain(self.last_checkpoint, fallback=fallback)

    def _go_back(self, chain: Sequence[str]) -> None:
        """Bring the new nodes to a checkpoint, and the position with them."""
        position: FitPosition | None = self._first
        if chain:
            manifest = checkpoint.load(chain[-1], verify=False)
            logger.info("Going on from step %d: %s", manifest.step, redacted(chain[-1]))
            self._restore(chain, manifest.save_id)
            if manifest.save_id is not None and model_dir_of(chain[-1]) == self._model_dir:
                self._saver.build_on(chain[-1], manifest.save_id)
            if chain[-1] != self._start:
                position = FitPosition.from_dict(manifest.position)
                if position is None or position.finished or self._identity.differences(position.fit):
                    # What is left is older than this fit, which begins anew.
                    position = self._first_position(resume=False)
            self._step = manifest.step
        else:
            self._step = 0
            if self._warm_start is not None:
                logger.info("Beginning with weights of %s", redacted(self._warm_start.path))
                self._restore(checkpoint.chain(self._warm_start.path), None, self._warm_start)
        assert position is not None  # both branches set one
        self._resuming = position.within is not None
        self._position = position
        if position is self._first and not self._resuming:
            self._position = replace(position, step=self._step)
        self._saver.start_at(self._step)

    def _begin_callbacks(self) -> None:
        position, options = self._position, self._options
        if not self._begun:
            self._begun = True
            self._host.train_begin()
            if position.learning_rate is None:
                # What a callback sets at the beginning holds after going back there, too.
                rate = self._host.learning_rate
                position = self._position = replace(position, learning_rate=rate)
                self._first = replace(self._first, learning_rate=rate)
        self._host.go_on(
            position.history, range(options.initial_epoch, position.epoch), position.learning_rate
        )

    def _train_epochs(self) -> None:
        options = self._options
        while self._position.epoch < options.epochs and not self._ended:
            epoch = self._position.epoch
            if self._running_epoch != epoch:
                self._running_epoch = epoch
                self._host.epoch_begin(epoch)
            within = self._position.within
            logs = self._train_epoch() if within is None or within.logs is None else dict(within.logs)
            if self._validation is not None and (epoch + 1) % options.validation_freq == 0:
                logs |= self._validate(self._validation, epoch)
            # Callbacks may save this state, so the position moves on before them.
            self._move_on()
            stop = self._host.epoch_end(epoch, logs)
            self._position = replace(
                self._position, history=self._host.history, learning_rate=self._host.learning_rate
            )
            if stop:
                logger.info("Training stops after epoch %d: a callback asked for it", epoch + 1)
                return
            self._tick()

    def _move_on(self) -> None:
        position = self._position
        within = position.within or EpochPosition()
        self._running_epoch = None
        self._position = replace(
            position,
            epoch=position.epoch + 1,
            done_epochs=position.done_epochs + 1,
            rows=position.rows + within.samples,
            within=EpochPosition(workers=within.workers),
        )

    # --- an epoch ---

    def _train_epoch(self) -> dict[str, float]:
        options, position, plan = self._options, self._position, self._plan
        before = position.within or EpochPosition()
        running = self._epoch = RunningEpoch(before, self._step, self._cluster.next_phase)
        dataset = plan.rows(position.done_epochs)
        payload: dict[str, Any] = {
            "epoch": position.done_epochs,
            "batch_size": plan.worker_batch_size,
            "shuffle_seed": options.seed if options.shuffle else None,
            "learning_rate": self._host.learning_rate,
            "resume": before.resume() if self._resuming else None,
        }
        if self._cluster_options.mode == "sync":
            payload["steps"] = plan.worker_steps
        self._display.begin(self._label(position.epoch), dataset.num_samples, before.samples)
        running.active = True
        self._recorder.epoch_begin()
        try:
            results = self._cluster.run(
                plan.phase("train", payload, dataset, before.queue), self._on_progress, self._tick
            )
        finally:
            running.active = False
        self._resuming = False
        self._step = max([self._step, *(int(result.data["step"]) for result in results)])
        self._recorder.epoch_end(position.epoch, self._step, results)
        trained = before.samples + sum(result.data["samples"] for result in results)
        # What a lost worker counted is lost with it, but an epoch that was not stopped has all its rows.
        counted = running.stopped or self._cluster_options.drops_samples or dataset.samples_per_row != 1.0
        samples = trained if counted else dataset.num_rows
        workers = running.after(results, self._cluster_options)
        logs = self._metrics_of(
            [part for part in (before.metrics, *(worker.metrics for worker in workers)) if len(part)]
        )
        self._display.end(samples, logs, split_line(self.observer.running))
        self._position = replace(
            position,
            learning_rate=self._host.learning_rate,
            within=EpochPosition(
                workers=[WorkerArrays(random=worker.random) for worker in workers], samples=samples, logs=logs
            ),
        )
        self.statistics.rows = position.rows + samples
        self.statistics.steps = self._step - position.step
        self.statistics.count(results)
        return dict(logs)

    def _on_progress(self, reports: Sequence[Progress]) -> None:
        running = self._epoch
        samples, steps, logs = summarize(reports)
        if self._cluster_options.mode == "sync":
            # Synchronous workers take each step together.
            steps = max((report.data["steps"] for report in reports), default=0)
        self._step = max(self._step, running.first_step + steps)
        self.observer.workers(reports)
        self._display.update(running.before.samples + samples, logs, split_line(self.observer.running))
        if self._host.progress(running.before.updates + steps, logs) and not running.stopped:
            logger.info("Training stops at step %d: a callback asked for it", self._step)
            running.stopped = True
            self._saver.wait()
            self._cluster.cutter.stop_phase()

    def _label(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._options.epochs}"

    def _validate(self, validation: StagedData, epoch: int) -> dict[str, float]:
        started = time.monotonic()
        dataset = validation.dataset
        if self._options.validation_steps is not None:
            dataset = dataset.limited(self._options.validation_steps * self._options.batch_size)
        payload = {"batch_size": self._plan.worker_batch_size}
        # A lost worker's metrics are lost with it, so its rows are evaluated again.
        phase = self._plan.phase("evaluate", payload, dataset, redo_lost=True)
        results = self._cluster.run(phase, on_tick=self._tick)
        metrics = self._metrics_of([unpack_arrays(result.blob) for result in results])
        logs = {f"val_{name}": value for name, value in metrics.items()}
        self._display.validated(self._label(epoch), time.monotonic() - started, logs)
        return logs

    def _metrics_of(self, parts: Sequence[Sequence[Any]]) -> dict[str, float]:
        return self._driver.metric_results(parts)

    def _pull_dense(self) -> int:
        """Bring the dense weights to the driver's model; returns the step they are of."""
        [result] = self._cluster.run(Phase("dense", {}, ranks=[self._cluster.first_worker()]))
        dense, state = unpack_arrays(result.blob)
        self._driver.load_dense(dense, state)
        self.statistics.tables = result.data["statistics"]
        return int(result.data["step"])

    # --- where this fit is ---

    @property
    def _identity(self) -> FitIdentity:
        options = self._options
        return FitIdentity(
            self._cluster_options.mode,
            options.epochs,
            options.initial_epoch,
            options.batch_size,
            options.steps_per_epoch,
            options.shuffle,
            options.seed,
            self._plan.num_lease_workers,
            self._plan.fingerprint,
            options.shuffle_rows,
            self._train.description,
            self._plan.cutting,
            self._driver.class_weight,
            self._driver.objective,
        )

    def _first_position(self, resume: bool | None = None) -> FitPosition:
        """Where this fit begins: at its first epoch, or in the middle of the one that the start checkpoint is of."""
        options = self._options
        new = FitPosition(asdict(self._identity), options.initial_epoch, 0)
        if self._start is None:
            return new
        manifest = checkpoint.load(self._start, verify=False)
        new = replace(new, done_epochs=manifest.epoch, step=manifest.step)
        position = FitPosition.from_dict(manifest.position)
        if position is None or position.finished:
            return new
        differences = self._identity.differences(position.fit)
        if differences or not (self._checkpoints.resume if resume is None else resume):
            logger.warning(
                "The checkpoint was written in the middle of epoch %d of another fit, which is not gone on with: this "
                "one trains all its epochs on it (%s): %s",
                position.epoch + 1, "; ".join(differences) or "resume=False", self._start,
            )  # fmt: skip
            return new
        logger.info(
            "Going on with a fit that was cut short in epoch %d of %d", position.epoch + 1, options.epochs
        )
        if self._cluster_options.mode == "async":
            self._plan = replace(self._plan, lease_workers=int(position.fit["num_workers"]))
        return position

    def _describe(self, cut: Cut) -> dict[str, Any]:
        """The position at a cut, called by the saver's thread while workers are held and no phase begins or ends."""
        position, running = self._position, self._epoch
        if running.crossed(cut):
            within = running.at(cut, self._cluster_options)
            position = replace(position, learning_rate=self._host.learning_rate, within=within)
        return position.to_dict()

    # --- saving and going back ---

    def _tick(self) -> None:
        self._stop_if_asked()
        self._saver.tick(self._step)
        self._recorder.tick(self._step)

    def _stop_if_asked(self) -> None:
        if not self._termination.asked.is_set():
            return
        where = "nothing was trained yet"
        if self._ready and self._step > (0 if self._last is None else self._last.step):
            where = f"saved as {redacted(self._saver.save('incremental').directory)}"
        elif self._last is not None:
            where = f"saved as {redacted(self._last.directory)}"
        raise TerminatedError(
            f"SIGTERM: training has ended at step {self._step}, {where}. Submit the job again to go on from there."
        )

    def _commit(self, draft: Draft, model_dir: str, keep_max: int) -> str:
        training: dict[str, Any] = {
            "pause_seconds": round(draft.cut.pause, 6),
            "mode": self._cluster_options.mode,
            "num_ps": self._cluster_options.num_ps,
            "num_workers": self._cluster_options.num_workers,
            "placement": self._cluster_options.placement,
            "learning_rate": draft.position["learning_rate"],
        }

        def write(directory: str) -> list[CheckpointFile]:
            files = draft.write(directory)
            training["write_seconds"] = round(draft.write_seconds, 6)
            return files

        return checkpoint.save_checkpoint(
            write,
            model_dir,
            model=self._driver.model,
            tables=self._driver.table_specs,
            step=draft.cut.step,
            epoch=int(draft.position["done_epochs"]),
            optimizer=self._driver.dense_optimizer,
            feature_spec=self._train.spec,
            keep_max=keep_max,
            base=draft.base,
            save_id=draft.cut.save_id,
            position=dict(draft.position),
            training=training,
        )

    def _on_saved(self, record: SaveRecord) -> None:
        self._last = record
        self.statistics.saves.append(record)
        self._display.saved(record.step, record.pause, record.write)
        self._recorder.span("write checkpoint", record.write, len(self.statistics.saves))

    def _on_restart(self, error: Exception) -> None:
        self.statistics.restarts += 1
        self.observer.restarts += 1

    def _finish(self) -> None:
        """Commit a checkpoint of the state that the nodes hold; nothing is left to go on with."""
        self._pull_dense()
        self._position = replace(self._position, within=None, finished=True)
        self._saver.save()
        if self._best is not None:
            filesystem, path = resolve(join(self._model_dir, BEST_FOLDER))
            delete_directory(filesystem, path)

    def _save_best(self) -> None:
        folder = join(self._model_dir, BEST_FOLDER)
        self._best = self._saver.save("full", lambda draft: self._commit(draft, folder, 1)).directory

    def _restore_best(self) -> None:
        assert self._best is not None  # the host restores only what it had saved
        logger.info("Going back to the best epoch: %s", redacted(self._best))
        self._restore([self._best], None)

    def _restore(
        self, chain: Sequence[str], save_id: str | None, warm_start: WarmStart | None = None
    ) -> None:
        """Give the nodes the state of a checkpoint, once a worker has told them their tables."""
        self._pull_dense()
        self._cluster.cutter.restore(list(chain), save_id, warm_start)
        self._pull_dense()


__all__ = ["FitLoop", "FitOptions", "FitStatistics"]
