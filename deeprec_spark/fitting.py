"""The driver's side of a fit: epochs as phases of a cluster of nodes, callbacks, validation, checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deeprec_spark import checkpoint
from deeprec_spark.cluster import TrainingCluster
from deeprec_spark.data import ParquetDataset
from deeprec_spark.data.arrays import unpack_arrays
from deeprec_spark.data.filesystem import resolve
from deeprec_spark.embedding.store import CheckpointFile
from deeprec_spark.progress import ProgressDisplay
from deeprec_spark.runtime.phases import Phase, PhaseResult, Progress
from deeprec_spark.staging import StagedData
from deeprec_spark.training.callbacks import CallbackHost
from deeprec_spark.training.driver_model import DriverModel

if TYPE_CHECKING:
    import keras

logger = logging.getLogger(__name__)

BEST_FOLDER = "best"
"""Below model_dir: the checkpoint of the best epoch, while a fit that may go back to it runs."""

MAX_LEASE_ROWS = 65_536
# Leases are small beside a worker's share, so that the slowest delays the epoch by little.
LEASES_PER_WORKER = 16


@dataclass(frozen=True)
class FitOptions:
    """One call of `fit`. `batch_size` is the global batch in sync mode, each worker's own in async mode."""

    epochs: int = 1
    batch_size: int = 32
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_freq: int = 1
    validation_steps: int | None = None
    shuffle: bool = True
    seed: int = 0
    verbose: int = 1
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "validation_freq", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1. Received: {name}={getattr(self, name)}")
        for name in ("steps_per_epoch", "validation_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be None or at least 1. Received: {name}={value}")
        if not 0 <= self.initial_epoch < self.epochs:
            raise ValueError(
                f"initial_epoch must lie in [0, epochs). Received: initial_epoch={self.initial_epoch}, "
                f"epochs={self.epochs}"
            )


@dataclass
class FitStatistics:
    """What a fit did: rows, steps of the model (updates), and the seconds that its training phases took."""

    rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Trained rows a second, all workers together."""
        return self.rows / self.seconds if self.seconds else 0.0


class FitLoop:
    """Runs the epochs of one fit on a started cluster."""

    def __init__(
        self,
        cluster: TrainingCluster,
        driver: DriverModel,
        train: StagedData,
        validation: StagedData | None,
        options: FitOptions,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        model_dir: str,
        done_epochs: int = 0,
    ) -> None:
        self._cluster = cluster
        self._model_dir = model_dir.rstrip("/")
        self._best: str | None = None
        # Epochs of earlier fits count on, so that a second fit reads the rows in another order.
        self._done_epochs = done_epochs
        self._driver = driver
        self._train = train
        self._validation = validation
        self._options = options
        self._host = CallbackHost(
            driver.model,
            callbacks,
            epochs=options.epochs,
            steps=self._steps_per_epoch(),
            pull_weights=self._pull_dense,
            save_best=self._save_best,
            restore_best=self._restore_best,
        )
        self.statistics = FitStatistics()

    def run(self) -> dict[str, list[float]]:
        """All epochs; returns Keras's history: a list of one number an epoch for each metric."""
        options = self._options
        self._cluster.wait_ready()
        self._host.train_begin()
        with ProgressDisplay(options.verbose, options.epochs) as display:
            for epoch in range(options.initial_epoch, options.epochs):
                self._host.epoch_begin(epoch)
                logs = self._train_epoch(epoch, display)
                if self._validation is not None and (epoch + 1) % options.validation_freq == 0:
                    logs |= {f"val_{name}": value for name, value in self._validate(display).items()}
                display.end(logs)
                self._done_epochs += 1
                if self._host.epoch_end(epoch, logs):
                    logger.info("Training stops after epoch %d: a callback asked for it", epoch + 1)
                    break
        self._host.train_end()
        return self._host.history

    def restore(self, directory: str) -> None:
        """Give the nodes the state of a checkpoint."""
        self._cluster.run(Phase("restore", {"directory": directory}, ranks=[self._chief]))
        self._pull_dense()

    def save(self, directory: str) -> list[CheckpointFile]:
        """Have the nodes write their parameters below `directory`, without committing a checkpoint."""
        [result] = self._cluster.run(Phase("save", {"directory": directory}, ranks=[self._chief]))
        return [CheckpointFile(**file) for file in result.data["files"]]

    def finish(self) -> str:
        """Commit a checkpoint of the state that the nodes hold; returns its directory."""
        directory = self._checkpoint(self._model_dir, self._options.keep_checkpoints)
        if self._best is not None:
            filesystem, path = resolve(f"{self._model_dir}/{BEST_FOLDER}")
            filesystem.delete_dir(path)
        return directory

    def _checkpoint(self, model_dir: str, keep: int) -> str:
        step = self._pull_dense()
        directory = checkpoint.save_checkpoint(
            self.save,
            model_dir,
            model=self._driver.model,
            tables=self._driver.table_specs,
            step=step,
            epoch=self._done_epochs,
            optimizer=self._driver.dense_optimizer,
            feature_spec=self._train.spec,
            keep_max=keep,
        )
        logger.info("Checkpoint of step %d: %s", step, directory)
        return directory

    def _save_best(self) -> None:
        self._best = self._checkpoint(f"{self._model_dir}/{BEST_FOLDER}", keep=1)

    def _restore_best(self) -> None:
        assert self._best is not None  # the host restores only what it had saved
        logger.info("Going back to the best epoch: %s", self._best)
        self.restore(self._best)

    @property
    def _chief(self) -> int:
        """The rank that saves and reads for all: the first worker; ranks below it are servers."""
        return self._cluster.options.num_ps

    def _train_epoch(self, epoch: int, display: ProgressDisplay) -> dict[str, float]:
        options = self._options
        dataset = self._epoch_rows()
        payload: dict[str, Any] = {
            "epoch": self._done_epochs,
            "batch_size": self._worker_batch_size,
            "shuffle_seed": options.seed if options.shuffle else None,
            "learning_rate": self._host.learning_rate,
        }
        if self._cluster.options.mode == "sync":
            share = math.ceil(dataset.num_rows / self._cluster.options.num_workers)
            payload["steps"] = math.ceil(share / self._worker_batch_size)
        phase = self._phase("train", payload, dataset)
        display.begin(f"epoch {epoch + 1}/{options.epochs}", dataset.num_rows)

        def on_progress(reports: Sequence[Progress]) -> None:
            samples, steps, logs = summarize(reports)
            display.update(samples, logs)
            self._host.progress(steps, logs)

        results = self._cluster.run(phase, on_progress)
        self.statistics.rows += sum(result.data["samples"] for result in results)
        # Synchronous workers take each step together.
        count = max if self._cluster.options.mode == "sync" else sum
        self.statistics.steps += count(result.data["steps"] for result in results)
        self.statistics.seconds += max(result.data["seconds"] for result in results)
        return self._merge_metrics(results)

    def _validate(self, display: ProgressDisplay) -> dict[str, float]:
        assert self._validation is not None  # the caller asked for validation
        dataset = self._validation.dataset
        if self._options.validation_steps is not None:
            dataset = dataset.limited(self._options.validation_steps * self._options.batch_size)
        payload = {"batch_size": self._worker_batch_size}
        return self._merge_metrics(self._cluster.run(self._phase("evaluate", payload, dataset)))

    def _phase(self, kind: str, payload: dict[str, Any], dataset: ParquetDataset) -> Phase:
        """Rows for all workers: leased as they go, or dealt out beforehand where runs must repeat bit for bit."""
        if self._cluster.options.mode == "async":
            return Phase(kind, payload, items=self._leases(dataset).to_items())
        parts = dataset.split_evenly(self._cluster.options.num_workers)
        return Phase(kind, payload, assignment=[self._leases(part).to_items() for part in parts])

    def _merge_metrics(self, results: Sequence[PhaseResult]) -> dict[str, float]:
        return self._driver.metric_results([unpack_arrays(result.blob) for result in results])

    def _pull_dense(self) -> int:
        """Bring the dense weights to the driver's model; returns the step they are of."""
        [result] = self._cluster.run(Phase("dense", {}, ranks=[self._chief]))
        dense, state = unpack_arrays(result.blob)
        self._driver.load_dense(dense, state)
        self.statistics.tables = result.data["statistics"]
        return int(result.data["step"])

    def _epoch_rows(self) -> ParquetDataset:
        dataset = self._train.dataset
        if self._options.shuffle:
            # Ranges are cut before they are shuffled: a lone row group shuffles too.
            dataset = self._leases(dataset).shuffled(self._options.seed, self._done_epochs)
        if self._options.steps_per_epoch is not None:
            dataset = dataset.limited(self._options.steps_per_epoch * self._options.batch_size)
        return dataset

    def _leases(self, dataset: ParquetDataset) -> ParquetDataset:
        share = dataset.num_rows // (self._cluster.options.num_workers * LEASES_PER_WORKER)
        batch = self._worker_batch_size
        rows = min(max(share, batch), MAX_LEASE_ROWS)
        return dataset.chunked(max(rows // batch, 1) * batch)

    def _steps_per_epoch(self) -> int:
        rows = self._epoch_rows().num_rows
        return math.ceil(rows / self._options.batch_size)

    @property
    def _worker_batch_size(self) -> int:
        options = self._cluster.options
        if options.mode == "async":
            return self._options.batch_size
        if self._options.batch_size < options.num_workers:
            raise ValueError(
                "In sync mode batch_size is the global batch, so it must be at least the number of workers. "
                f"Received: batch_size={self._options.batch_size}, num_workers={options.num_workers}"
            )
        return self._options.batch_size // options.num_workers


def summarize(reports: Sequence[Progress]) -> tuple[int, int, dict[str, float]]:
    """Samples, steps and sample-weighted metrics of the workers' latest reports, for display.

    The exact metrics of an epoch are made of the workers' metric states, not of these.
    """
    samples = sum(report.data["samples"] for report in reports)
    steps = sum(report.data["steps"] for report in reports)
    names = {name for report in reports for name in report.data["logs"]}
    logs = {
        name: sum(report.data["samples"] * report.data["logs"].get(name, 0.0) for report in reports)
        / max(samples, 1)
        for name in sorted(names)
    }
    return samples, steps, logs
