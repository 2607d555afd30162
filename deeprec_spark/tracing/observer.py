"""FitObserver: what workers and servers tell of themselves during a fit, added up on the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deeprec_spark.runtime.phases import PhaseResult, Progress
from deeprec_spark.tracing.report import FitReport, ShardReport, WorkerReport
from deeprec_spark.tracing.stages import STAGES
from deeprec_spark.tracing.staleness import Staleness


class FitObserver:
    """Adds up the reports of nodes over epochs and over restarts.

    A worker's numbers begin anew with each epoch and each copy of it; a server's with each start of the nodes. What the
    newest report of a copy that died has told is kept.

    Args:
        mode: of the job.
        num_ps: workers are the ranks from here on.
        dims: numbers in a row, by table.

    Example:
        >>> observer = FitObserver("async", num_ps=1, dims={"items": 16})
        >>> observer.worker(1, {"steps": 2, "samples": 64, "seconds": 0.5, "stages": {"pull": 0.1}})
        >>> observer.report().workers[0].samples
        64
    """

    def __init__(self, mode: str, num_ps: int, dims: Mapping[str, int]) -> None:
        self._mode = mode
        self._num_ps = num_ps
        self._dims = dict(dims)
        self._workers: dict[int, WorkerReport] = {}
        self._running: dict[int, tuple[int, WorkerReport]] = {}
        self._last: list[WorkerReport] = []
        self._cached: dict[tuple[int, int], dict[str, int]] = {}
        self._cached_before: Counter[str] = Counter()
        self._tables: dict[int, dict[str, dict[str, Any]]] = {}
        self._keys_before: dict[tuple[int, str], int] = {}
        self.restarts = 0

    def worker(self, rank: int, data: Mapping[str, Any]) -> None:
        """A worker's report of the running epoch: what it has done in it so far."""
        copy = int(data.get("incarnation", 0))
        running = self._running.get(rank)
        if running is not None and running[0] != copy:
            self._add(rank, running[1])
        self._cached[rank, copy] = dict(data.get("cache") or self._cached.get((rank, copy), {}))
        worker = WorkerReport(
            rank - self._num_ps,
            int(data["samples"]),
            int(data["steps"]),
            float(data["seconds"]),
            {stage: float(data["stages"].get(stage, 0.0)) for stage in STAGES},
            stale_pulls=int(data.get("stale_pulls", 0)),
            staleness=Staleness.from_dict(data["staleness"]) if "staleness" in data else Staleness(),
        )
        self._running[rank] = (copy, worker)

    def workers(self, reports: Sequence[Progress | PhaseResult]) -> None:
        """The reports of several workers, by rank."""
        for report in reports:
            self.worker(report.rank, report.data)

    def epoch_end(self) -> None:
        """The epoch has ended, or its nodes have: what was reported last is what was done."""
        self._last = self.running
        for rank, (_, worker) in self._running.items():
            self._add(rank, worker)
        self._running.clear()

    def server(self, rank: int, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """The counters of a node that holds tables, since it was started."""
        self._tables[rank] = {name: dict(values) for name, values in tables.items()}

    def nodes_started(self) -> None:
        """Other nodes take the place of those before: their counters begin at 0."""
        for rank, tables in self._tables.items():
            for name, values in tables.items():
                place = (rank, name)
                self._keys_before[place] = self._keys_before.get(place, 0) + int(values["lookups"])
                values["lookups"] = 0
        # Copies of the workers are numbered anew.
        for counts in self._cached.values():
            self._cached_before.update(counts)
        self._cached.clear()
        self.epoch_end()

    @property
    def running(self) -> list[WorkerReport]:
        """The workers in the running epoch, or in the last one where none runs."""
        return [worker for _, (_, worker) in sorted(self._running.items())] or self._last

    def report(self) -> FitReport:
        """All so far."""
        totals = dict(self._workers)
        for rank, (_, worker) in self._running.items():
            totals[rank] = _sum(totals.get(rank), worker)
        return FitReport.of(
            self._mode,
            [worker for _, worker in sorted(totals.items())],
            self._shards(),
            self.restarts,
            sum((Counter(counts) for counts in self._cached.values()), self._cached_before),
        )

    def _shards(self) -> list[ShardReport]:
        shards = []
        for rank, tables in sorted(self._tables.items()):
            for name, values in sorted(tables.items()):
                keys = int(values["lookups"]) + self._keys_before.get((rank, name), 0)
                moved = 2 * 4 * self._dims.get(name, 0) * keys
                shards.append(ShardReport(rank, name, int(values["rows"]), keys, int(values["bytes"]), moved))
        return shards

    def _add(self, rank: int, worker: WorkerReport) -> None:
        self._workers[rank] = _sum(self._workers.get(rank), worker)


def _sum(before: WorkerReport | None, more: WorkerReport) -> WorkerReport:
    if before is None:
        return more
    return replace(
        before,
        samples=before.samples + more.samples,
        steps=before.steps + more.steps,
        seconds=before.seconds + more.seconds,
        stages={stage: before.stages.get(stage, 0.0) + more.stages.get(stage, 0.0) for stage in STAGES},
        stale_pulls=before.stale_pulls + more.stale_pulls,
        staleness=before.staleness + more.staleness,
    )
