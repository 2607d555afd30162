"""FitReport: where the time of a fit went, which worker is slow and which shard is hot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deeprec_spark.tracing.stages import STAGES
from deeprec_spark.tracing.staleness import Staleness

MAX_LINES = 20
"""Workers, and shards, that the report shows as text."""


@dataclass(frozen=True)
class WorkerReport:
    """One worker over a fit, restarts included: what it trained, and the seconds of each stage.

    `slowdown` is its time for a sample against the median of all workers. In a synchronous job, where all wait for the
    slowest one, only its own part of the time counts: what is not pull or push. `stale_pulls` are steps whose rows were
    read before an earlier push of this worker, `staleness` the updates of all workers between its pulls and pushes.
    """

    worker: int
    samples: int = 0
    steps: int = 0
    seconds: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    slowdown: float = 1.0
    stale_pulls: int = 0
    staleness: Staleness = field(default_factory=Staleness)

    def milliseconds(self, stage: str) -> float:
        """Mean time of a stage in one step."""
        return 1e3 * self.stages.get(stage, 0.0) / max(self.steps, 1)


@dataclass(frozen=True)
class ShardReport:
    """One table on one server (the worker itself where it holds the tables).

    `rows` and `memory_bytes` are those of the end; `keys` were read from it, evaluation included; `moved_bytes` is what
    rows of that many keys are in float32, there and, as gradients, back.
    """

    server: int
    table: str
    rows: int
    keys: int
    memory_bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class SkewReport:
    """How evenly a table's load lies on the servers: `ratio` is the keys of the hottest one over the mean."""

    table: str
    hottest: int
    ratio: float


@dataclass(frozen=True)
class FitReport:
    """Who did what in a fit.

    Args:
        mode: "async" or "sync".
        workers, shards: in order.
        restarts: how often nodes were started again; what was trained twice counts twice here.
        cache: what became of remote files in the workers' caches (see FileCache.counts); empty without one.

    Example:
        >>> report = estimator.report()  # doctest: +SKIP
        >>> report.slowest.slowdown, [skew.ratio for skew in report.skew]  # doctest: +SKIP
        (1.04, [1.01, 1.36])
        >>> print(report)  # doctest: +SKIP
    """

    mode: str
    workers: Sequence[WorkerReport]
    shards: Sequence[ShardReport]
    restarts: int = 0
    cache: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        mode: str,
        workers: Sequence[WorkerReport],
        shards: Sequence[ShardReport],
        restarts: int = 0,
        cache: Mapping[str, int] | None = None,
    ) -> FitReport:
        """The report of what was measured; fills in each worker's slowdown."""
        costs = {one.worker: _own_seconds(one, mode) / one.samples for one in workers if one.samples}
        median = statistics.median(costs.values()) if costs else 0.0
        slowdowns = {worker: cost / median if median else 1.0 for worker, cost in costs.items()}
        return cls(
            mode,
            [replace(one, slowdown=slowdowns.get(one.worker, 1.0)) for one in workers],
            list(shards),
            restarts,
            dict(cache or {}),
        )

    @property
    def slowest(self) -> WorkerReport | None:
        """The worker with the greatest slowdown; None without workers."""
        return max(self.workers, key=lambda one: one.slowdown, default=None)

    @property
    def skew(self) -> list[SkewReport]:
        """For each table, its hottest server; the most uneven table first."""
        by_table: dict[str, list[ShardReport]] = {}
        for shard in self.shards:
            by_table.setdefault(shard.table, []).append(shard)
        found = []
        for table, shards in by_table.items():
            hottest = max(shards, key=lambda one: one.keys)
            total = sum(one.keys for one in shards)
            ratio = hottest.keys * len(shards) / total if total else 1.0
            found.append(SkewReport(table, hottest.server, ratio))
        return sorted(found, key=lambda one: -one.ratio)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data."""
        return {
            "mode": self.mode,
            "restarts": self.restarts,
            "workers": [_fields(one) for one in self.workers],
            "shards": [asdict(one) for one in self.shards],
            "skew": [asdict(one) for one in self.skew],
            "cache": dict(self.cache),
        }

    def to_html(self) -> str:
        """A page with bars for workers and servers."""
        from deeprec_spark.tracing.page import render  # which is made of this module

        return render(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.to_html()

    def __str__(self) -> str:
        """Two tables as text, for a log: of very many workers and shards the slowest and the hottest ones."""
        parts = [self._worker_table()]
        if self.shards:
            parts.append(self._shard_table())
        if self.cache:
            counts = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in self.cache.items())
            parts.append(f"cache of remote files: {counts}")
        return "\n".join(parts)

    def _worker_table(self) -> str:
        head = ["worker", "samples", "steps", "seconds", *(f"{stage} ms" for stage in STAGES), "slowdown"]
        if self.mode == "async":
            head += ["pulled ahead", "staleness", "most"]
        shown = sorted(self.workers, key=lambda one: -one.slowdown)[:MAX_LINES]
        rows = [
            [
                str(one.worker),
                f"{one.samples:,}",
                f"{one.steps:,}",
                f"{one.seconds:.1f}",
                *(f"{one.milliseconds(stage):.2f}" for stage in STAGES),
                f"{one.slowdown:.2f}",
                *(_staleness(one) if self.mode == "async" else ()),
            ]
            for one in sorted(shown, key=lambda one: one.worker)
        ]
        return _aligned([head, *rows]) + _more(len(self.workers), "workers, none of them slower")

    def _shard_table(self) -> str:
        ratios = {one.table: one for one in self.skew}
        head = ["server", "table", "rows", "keys read", "memory MB", "moved MB", "of mean"]
        means: dict[str, float] = {}
        for shard in self.shards:
            means[shard.table] = means.get(shard.table, 0.0) + shard.keys
        counts = {table: sum(one.table == table for one in self.shards) for table in means}
        hottest = sorted(self.shards, key=lambda one: (-ratios[one.table].ratio, -one.keys))[:MAX_LINES]
        shown = sorted(hottest, key=lambda one: (-ratios[one.table].ratio, one.table, one.server))
        rows = [
            [
                str(one.server),
                one.table,
                f"{one.rows:,}",
                f"{one.keys:,}",
                f"{one.memory_bytes / 1e6:.1f}",
                f"{one.moved_bytes / 1e6:.1f}",
                f"{one.keys * counts[one.table] / means[one.table]:.2f}" if means[one.table] else "-",
            ]
            for one in shown
        ]
        return _aligned([head, *rows], text={1}) + _more(
            len(self.shards), "shards, less uneven or of less load"
        )


def split_line(workers: Sequence[WorkerReport], most: int = 4) -> str:
    """The time of a step by stage, for each worker; of more than `most` workers their mean and the slowest step.

    Example:
        >>> split_line([WorkerReport(0, steps=2, seconds=0.1, stages={"pull": 0.02, "compute": 0.06})])
        'ms/step 50: pull 10 compute 30'
    """
    shown = [one for one in workers if one.steps]
    if not shown:
        return ""
    if len(shown) == 1:
        return f"ms/step {_split(shown[0])}"
    if len(shown) > most:
        steps = sum(one.steps for one in shown)
        mean = WorkerReport(
            -1,
            steps=steps,
            seconds=sum(one.seconds for one in shown),
            stages={stage: sum(one.stages.get(stage, 0.0) for one in shown) for stage in STAGES},
        )
        slowest = max(shown, key=lambda one: one.seconds / one.steps)
        return f"ms/step mean {_split(mean)} | worker {slowest.worker} {_split(slowest)}"
    return "ms/step " + " | ".join(f"worker {one.worker} {_split(one)}" for one in shown)


def _split(one: WorkerReport) -> str:
    stages = [(stage, one.milliseconds(stage)) for stage in STAGES]
    parts = " ".join(f"{stage} {value:.{0 if value >= 10 else 1}f}" for stage, value in stages if value)
    return f"{1e3 * one.seconds / one.steps:.0f}: {parts}"


def _own_seconds(one: WorkerReport, mode: str) -> float:
    if mode != "sync":
        return one.seconds
    return max(one.seconds - one.stages.get("pull", 0.0) - one.stages.get("push", 0.0), 0.0)


def _fields(one: WorkerReport) -> dict[str, Any]:
    staleness = {"mean": one.staleness.mean, "most": one.staleness.most}
    return {**asdict(one), "stages": dict(one.stages), "staleness": staleness}


def _staleness(one: WorkerReport) -> list[str]:
    return [f"{one.stale_pulls:,}", f"{one.staleness.mean:.2f}", str(one.staleness.most)]


def _more(count: int, what: str) -> str:
    return f"\n… and {count - MAX_LINES} more {what}" if count > MAX_LINES else ""


def _aligned(rows: Sequence[Sequence[str]], text: frozenset[int] | set[int] = frozenset()) -> str:
    """Cells in columns: numbers to the right, the columns of `text` to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if column in text else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
