"""An epoch as phases: which rows it reads, in what order, and how workers share them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deeprec_spark.cluster import ClusterOptions
from deeprec_spark.data import ParquetDataset
from deeprec_spark.data.arrays import unpack_arrays
from deeprec_spark.data.shuffle import SOURCES, buffers, pieces
from deeprec_spark.position import Arrays, EpochPosition, WorkerArrays, worker_arrays
from deeprec_spark.runtime.cut import Cut
from deeprec_spark.runtime.phases import Phase, PhaseResult, Progress
from deeprec_spark.runtime.work_queue import WorkQueue
from deeprec_spark.training import metrics

MAX_LEASE_ROWS = 65_536
# Leases are small beside a worker's share, so that the slowest delays the epoch by little.
LEASES_PER_WORKER = 16
BUFFERS_PER_WORKER = 4


@dataclass(frozen=True)
class EpochPlan:
    """How the rows of each epoch are read.

    Args:
        dataset: all rows.
        cluster: the nodes.
        batch_size: the global batch in sync mode, each worker's own in async mode.
        steps_per_epoch: cuts an epoch short.
        shuffle, seed: another order in each epoch.
        shuffle_rows: shuffle so many rows of several row groups together, instead of those of a lease.
        lease_workers: the number of workers for which leases are cut; None is that of the cluster. A fit that goes on
            with other workers keeps the leases of the one that it continues.
    """

    dataset: ParquetDataset
    cluster: ClusterOptions
    batch_size: int
    steps_per_epoch: int | None = None
    shuffle: bool = True
    seed: int = 0
    shuffle_rows: int = 0
    lease_workers: int | None = None

    def __post_init__(self) -> None:
        if self.cluster.mode == "sync" and self.batch_size < self.cluster.num_workers:
            raise ValueError(
                "In sync mode batch_size is the global batch, so it must be at least the number of workers. "
                f"Received: batch_size={self.batch_size}, num_workers={self.cluster.num_workers}"
            )

    @property
    def cutting(self) -> str:
        """The rules by which leases are cut: positions of a plan with others mean other rows."""
        return f"{LEASES_PER_WORKER}, {MAX_LEASE_ROWS}, {BUFFERS_PER_WORKER}, {SOURCES}"

    @property
    def worker_batch_size(self) -> int:
        """Rows of one worker's step."""
        return (
            self.batch_size if self.cluster.mode == "async" else self.batch_size // self.cluster.num_workers
        )

    @property
    def num_lease_workers(self) -> int:
        """The number of workers for which leases are cut."""
        return self.lease_workers or self.cluster.num_workers

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, in batches of `batch_size`."""
        return math.ceil(self.rows(0).num_rows / self.batch_size)

    @property
    def worker_steps(self) -> int:
        """Steps that each synchronous worker takes in an epoch."""
        share = math.ceil(self.rows(0).num_rows / self.cluster.num_workers)
        return math.ceil(share / self.worker_batch_size)

    @property
    def fingerprint(self) -> str:
        """A hash of which rows there are and how they lie, but not of where."""
        digest = hashlib.sha256(self.dataset.fingerprint.encode())
        for part in self.dataset.ranges:
            digest.update(f"{part.file},{part.row_group},{part.start},{part.rows};".encode())
        return digest.hexdigest()

    def rows(self, epoch: int) -> ParquetDataset:
        """The rows of an epoch in their order; `epoch` counts over all fits."""
        dataset = self.dataset
        if self.shuffle:
            # Ranges are cut before they are shuffled: a lone row group shuffles too.
            cut = pieces(dataset, self._buffer_rows) if self.shuffle_rows else self._leases(dataset)
            dataset = cut.shuffled(self.seed, epoch)
        if self.steps_per_epoch is not None:
            dataset = dataset.limited(self.steps_per_epoch * self.batch_size)
        return dataset

    def phase(
        self,
        kind: str,
        payload: Mapping[str, Any],
        dataset: ParquetDataset,
        done: Mapping[str, Any] | None = None,
        *,
        redo_lost: bool = False,
    ) -> Phase:
        """Rows for all workers: leased as they go, or dealt out beforehand where runs must repeat bit for bit.

        Arguments:
            done: what is done of the leases, as `WorkQueue.position` tells it.
            redo_lost: see Phase.
        """
        if self.cluster.mode == "async":
            queue = WorkQueue(self._items(kind, dataset))
            if done is not None:
                queue = WorkQueue.from_dict({**queue.to_dict(), **done})
            return Phase(kind, payload, items=queue, redo_lost=redo_lost)
        parts = dataset.split_evenly(self.cluster.num_workers)
        return Phase(kind, payload, assignment=[self._items(kind, part) for part in parts])

    def _items(self, kind: str, dataset: ParquetDataset) -> list[dict[str, Any]]:
        if kind == "train" and self.shuffle and self.shuffle_rows:
            return [buffer.to_dict() for buffer in buffers(dataset, self._buffer_rows)]
        return self._leases(dataset).to_items()

    @property
    def _buffer_rows(self) -> int:
        """Rows of a buffer; a worker has several leases in an epoch, so that asynchronous ones end together."""
        share = self.dataset.num_rows // self.num_lease_workers
        if self.cluster.mode == "async":
            share //= BUFFERS_PER_WORKER
        return min(self.shuffle_rows, max(share, self.worker_batch_size))

    def _leases(self, dataset: ParquetDataset) -> ParquetDataset:
        share = dataset.num_rows // (self.num_lease_workers * LEASES_PER_WORKER)
        batch = self.worker_batch_size
        rows = min(max(share, batch), MAX_LEASE_ROWS)
        return dataset.chunked(max(rows // batch, 1) * batch)


@dataclass
class RunningEpoch:
    """The epoch in the hands of the workers: where it began, its phase, and whether a callback has ended it."""

    before: EpochPosition = field(default_factory=EpochPosition)
    first_step: int = 0
    phase: int = 0
    active: bool = False
    stopped: bool = False

    def crossed(self, cut: Cut) -> bool:
        """Whether a cut goes through this epoch's phase; else it is of a time when nothing is trained.

        Raises:
            RuntimeError: it is of this epoch after its end, or of another phase during it, so its position is unknown.
        """
        if cut.phase and (cut.phase == self.phase) != self.active:
            raise RuntimeError(
                "A save was taken through a phase that is not the running one; it is given up. "
                f"Received: phase {cut.phase}, epoch of phase {self.phase}, active={self.active}"
            )
        return self.active and cut.phase == self.phase

    def at(self, cut: Cut, cluster: ClusterOptions) -> EpochPosition:
        """Where the epoch is at a cut through its phase."""
        before, workers = self.before, self._workers(cut, cluster)
        # A worker that was just started again has nothing to tell yet.
        samples = before.samples + sum(int(state.data.get("samples", 0)) for state in cut.workers.values())
        parts: list[Arrays] = [before.metrics]
        if cluster.mode == "async" and cluster.num_workers > 1:
            # Who takes which rows is open, so metrics go on as one sum.
            parts += [worker.metrics for worker in workers]
            workers = [WorkerArrays(random=worker.random) for worker in workers]
        return EpochPosition(
            steps=max(before.steps, cut.steps) if cluster.mode == "sync" else 0,
            queue=cut.queue,
            metrics=metrics.merge([part for part in parts if len(part)]),
            workers=workers,
            samples=samples,
            updates=before.updates + cut.step - self.first_step,
        )

    def after(self, results: Sequence[PhaseResult], cluster: ClusterOptions) -> list[WorkerArrays]:
        """The workers' states at the end of the epoch, in rank order; see `by_index`."""
        found = {result.rank - cluster.num_ps: worker_arrays_of(result) for result in results}
        return by_index(found, self.before.workers, cluster.num_workers)

    def _workers(self, cut: Cut, cluster: ClusterOptions) -> Sequence[WorkerArrays]:
        """The workers' states, in rank order; of those that have not begun yet, what they will begin with."""
        if not cut.workers:
            return self.before.workers
        found = {rank - cluster.num_ps: state for rank, state in worker_arrays(cut).items()}
        for rank, state in cut.workers.items():
            index = rank - cluster.num_ps
            if not state.data.get("begun") and index < len(self.before.workers):
                found[index] = self.before.workers[index]
        return by_index(found, self.before.workers, cluster.num_workers)


def by_index(
    found: Mapping[int, WorkerArrays], before: Sequence[WorkerArrays], num_workers: int
) -> list[WorkerArrays]:
    """Each worker's state: what it told, else that of before, else none; a worker that was lost tells nothing."""
    known = {**dict(enumerate(before[:num_workers])), **found}
    return [known.get(index, WorkerArrays()) for index in range(max(known, default=-1) + 1)]


def worker_arrays_of(result: PhaseResult) -> WorkerArrays:
    """A worker's metric states and random state, as its result of an epoch brings them."""
    arrays, count = unpack_arrays(result.blob), int(result.data["metrics"])
    return WorkerArrays(arrays[:count], arrays[count:])


def summarize(reports: Sequence[Progress]) -> tuple[int, int, dict[str, Any]]:
    """Samples, steps and sample-weighted metrics of the workers' latest reports, for display.

    A metric of several numbers is a list. The exact metrics of an epoch are made of the workers' metric states, not of
    these.
    """
    samples = sum(report.data["samples"] for report in reports)
    steps = sum(report.data["steps"] for report in reports)
    names = {name for report in reports for name in report.data["logs"]}
    logs = {
        name: _mean(
            [
                (report.data["samples"], report.data["logs"][name])
                for report in reports
                if name in report.data["logs"]
            ],
            # A worker may not know a metric yet, such as the AUC while its labels are of one class. But a loss that is
            # NaN for one of them has to be seen, by callbacks too.
            skip_nan=name != "loss" and not name.endswith("_loss"),
        )
        for name in sorted(names)
    }
    return samples, steps, logs


def _mean(told: Sequence[tuple[int, Any]], *, skip_nan: bool) -> Any:
    """The mean of numbers, or of lists of them element by element, by their weights; NaN where there is none."""
    values = np.array([value for _, value in told], np.float64)
    counts = np.array([weight for weight, _ in told], np.float64)
    # Without samples yet all tell what they begin with.
    weights = (counts if counts.any() else np.ones_like(counts)).reshape(-1, *[1] * (values.ndim - 1))
    counted = np.broadcast_to(weights > 0, values.shape) & ~(skip_nan & np.isnan(values))
    sums = (weights * np.where(counted, values, 0.0)).sum(axis=0)
    total = np.where(counted, weights, 0.0).sum(axis=0)
    return np.where(total > 0, sums / np.maximum(total, 1.0), math.nan).tolist()
