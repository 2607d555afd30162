"""What the scale benchmark leaves: tables, plots, where scaling stops and why, and the result line."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.node_load import NodeLoad
from benchmarks.peer_process import ROOT
from benchmarks.simulator import Costs, Prediction
from benchmarks.training_report import processor

FOLDER = ROOT / "docs" / "benchmarks"
EFFICIENT = 0.5
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")


@dataclass(frozen=True)
class Check:
    """A configuration that fits this machine: what was seen, and what the simulator says of the cores others left."""

    name: str
    batch: int
    seen: float
    predicted: float
    others: float
    calibrated: bool

    @property
    def error(self) -> float:
        """Relative: 0.1 is a prediction of a tenth too much."""
        return self.predicted / self.seen - 1


@dataclass(frozen=True)
class Limit:
    """Where more workers stop being worth it: the last number at which each still does half of what one alone does."""

    mode: str
    servers: int
    workers: int
    samples_per_s: float
    reason: str


@dataclass(frozen=True)
class Report:
    """All that one run has found."""

    costs: Mapping[int, Costs]
    checks: Sequence[Check]
    grid: Mapping[tuple[str, int, int], Prediction]
    loads: Sequence[NodeLoad]
    batch: int
    bandwidth_gbit: float
    latency_us: float
    cores: float

    def limits(self) -> list[Limit]:
        """For each mode and number of servers."""
        modes = list(dict.fromkeys(mode for mode, _, _ in self.grid))
        return [self._limit(mode, servers) for mode in modes for servers in self._servers()]

    def result(self) -> dict[str, Any]:
        """The content of the result line."""
        best = max(self.grid.items(), key=lambda item: item[1].samples_per_s)
        errors = [abs(check.error) for check in self.checks]
        return {
            "benchmark": "scale",
            "batch": self.batch,
            "worst_error": round(max(errors), 3),
            "errors": {f"{check.name} {check.batch}": round(check.error, 3) for check in self.checks},
            "best": {"mode": best[0][0], "workers": best[0][1], "servers": best[0][2]},
            "best_samples_per_s": round(best[1].samples_per_s),
            "limits": [asdict(limit) for limit in self.limits()],
            "nodes": [asdict(load) for load in self.loads],
            "costs": asdict(self.costs[self.batch]),
            "bandwidth_gbit": self.bandwidth_gbit,
            "latency_us": self.latency_us,
            "cores": self.cores,
        }

    def text(self) -> str:
        """Everything as tables."""
        parts = [
            "## The simulator beside what was measured here",
            self._checks(),
            "## Costs that were measured",
            self._costs(),
        ]
        for mode in dict.fromkeys(mode for mode, _, _ in self.grid):
            parts += [f"## Predicted, {mode}: samples a second", f"![](scale-{mode}.svg)", self._grid(mode)]
        parts += ["## Where it stops scaling", self._limits()]
        if self.loads:
            parts += ["## What nodes cost the driver", "![](scale-nodes.svg)", self._loads()]
        return "\n\n".join(parts)

    def write(self) -> None:
        """The page and its plots."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        notes = FOLDER / "scale-notes.md"
        page = [
            "# Training past one machine",
            f"`python -m benchmarks.scale` on {os.cpu_count()} cores ({processor()}): DLRM, 5.2 M ids, dim 16, "
            f"Adagrad, batch {self.batch:,} for each worker. Predicted clusters have a host for each node: "
            f"{self.cores:g} such cores, {self.bandwidth_gbit:g} Gbit/s in each direction, {self.latency_us:g} µs.",
            *([notes.read_text().strip()] if notes.exists() else []),
            self.text(),
        ]
        (FOLDER / "scale.md").write_text("\n\n".join(page) + "\n")
        for mode in dict.fromkeys(mode for mode, _, _ in self.grid):
            lines = {
                f"{servers} servers": [
                    (workers, self.grid[mode, workers, servers].samples_per_s) for workers in self._workers()
                ]
                for servers in self._servers()
            }
            chart = line_chart(lines, f"DLRM, {mode}, predicted: samples/s by workers")
            (FOLDER / f"scale-{mode}.svg").write_text(chart)
        if self.loads:
            lines = {
                "driver, MiB": [(load.nodes, load.driver_mib) for load in self.loads],
                "leases/s": [(load.nodes, load.leases_per_s) for load in self.loads],
            }
            (FOLDER / "scale-nodes.svg").write_text(line_chart(lines, "The coordinator by number of nodes"))

    def _workers(self) -> list[int]:
        return sorted({workers for _, workers, _ in self.grid})

    def _servers(self) -> list[int]:
        return sorted({servers for _, _, servers in self.grid})

    def _limit(self, mode: str, servers: int) -> Limit:
        workers = self._workers()
        alone = self.grid["async", workers[0], servers].samples_per_s / workers[0]
        rates = {many: self.grid[mode, many, servers].samples_per_s for many in workers}
        good = [many for many in workers if rates[many] >= EFFICIENT * alone * many]
        last = max(good, default=workers[0])
        beyond = [many for many in workers if many > last]
        if not beyond:
            return Limit(mode, servers, last, rates[last], "not within what was simulated")
        found = self.grid[mode, beyond[0], servers]
        reasons = {
            "server cores": "the servers' cores are busy: more cores for each, or larger steps; more servers "
            "share rows, but not what a message costs",
            "server link": "the servers' network is full: more servers, or less to send",
            "worker cores": "a worker's own cores are busy with messages to so many servers",
            "worker link": "a worker's network is full",
            "waiting": "workers and servers take turns, each idle while the other works",
        }
        return Limit(mode, servers, last, rates[last], reasons[found.bottleneck])

    def _checks(self) -> str:
        rows = [
            [
                check.name,
                f"{check.batch:,}",
                f"{check.seen:,.0f}",
                f"{check.predicted:,.0f}",
                f"{100 * check.error:+.0f} %",
                f"{check.others:.2f}",
                "yes" if check.calibrated else "",
            ]
            for check in self.checks
        ]
        header = [
            "servers + workers",
            "batch",
            "samples/s",
            "predicted",
            "error",
            "cores others used",
            "costs come from it",
        ]
        return _table(header, rows)

    def _costs(self) -> str:
        names = [name for name in asdict(self.costs[self.batch]) if name not in ("samples", "spread")]
        rows = [
            [name, *(_number(getattr(self.costs[batch], name)) for batch in sorted(self.costs))]
            for name in names
        ]
        return _table(["cost", *(f"batch {batch:,}" for batch in sorted(self.costs))], rows)

    def _grid(self, mode: str) -> str:
        rows = [
            [
                f"{workers:,}",
                *(f"{self.grid[mode, workers, servers].samples_per_s:,.0f}" for servers in self._servers()),
            ]
            for workers in self._workers()
        ]
        return _table(["workers", *(f"{servers} servers" for servers in self._servers())], rows)

    def _limits(self) -> str:
        rows = [
            [
                limit.mode,
                f"{limit.servers}",
                f"{limit.workers:,}",
                f"{limit.samples_per_s:,.0f}",
                limit.reason,
            ]
            for limit in self.limits()
        ]
        header = [
            "mode",
            "servers",
            "workers that still do half of what one alone does",
            "samples/s",
            "why not more",
        ]
        return _table(header, rows)

    def _loads(self) -> str:
        rows = [
            [
                f"{load.nodes}",
                f"{load.register_seconds:.1f}",
                f"{load.driver_mib:.0f}",
                f"{load.driver_threads}",
                f"{100 * load.driver_idle:.1f} %",
                f"{load.leases_per_s:,.0f}",
                f"{load.client_mib:.1f}",
            ]
            for load in self.loads
        ]
        header = [
            "nodes",
            "registered after, s",
            "driver, MiB",
            "its threads",
            "a core, for heartbeats",
            "leases/s",
            "a node's client, MiB",
        ]
        return _table(header, rows)


def line_chart(lines: Mapping[str, Sequence[tuple[float, float]]], title: str) -> str:
    """An SVG of lines over two logarithmic axes; points are (x, y), all above 0."""
    width, height, left, top = 640, 400, 70, 40
    points = [point for line in lines.values() for point in line]
    low_x, high_x = (pick(x for x, _ in points) for pick in (min, max))
    low_y, high_y = (pick(y for _, y in points) for pick in (min, max))

    def place(value: float, low: float, high: float, length: float) -> float:
        return length * math.log(value / low) / max(math.log(high / low), 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + place(x, low_x, high_x, width), top + height - place(y, low_y, high_y, height)

    parts = []
    for number, (name, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in line)
        _, end = at(*line[-1])
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{left + width + 8}" y="{end + 4:.0f}" fill="{color}">{name}</text>')
    parts += [
        f'<text x="{at(x, low_y)[0]:.0f}" y="{top + height + 18}" text-anchor="middle">{x:,.0f}</text>'
        for x in sorted({x for x, _ in points})
    ]
    for exponent in range(math.floor(math.log10(low_y)), math.ceil(math.log10(high_y)) + 1):
        if low_y <= 10**exponent <= high_y:
            y = at(low_x, 10**exponent)[1]
            parts.append(f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{10**exponent:,}</text>')
            parts.append(
                f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e0e0e0"/>'
            )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 130}" height="{top + height + 30}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="22" font-weight="bold">{title}</text>{"".join(parts)}</svg>\n'
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
