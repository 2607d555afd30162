"""What the scale benchmark leaves: tables, plots, where scaling stops and why, and the result line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import scale_leases
from benchmarks.node_load import NodeLoad
from benchmarks.peer_process import ROOT, say
from benchmarks.plots import line_chart, table
from benchmarks.simulator import Costs, Prediction
from benchmarks.training_report import processor

FOLDER = ROOT / "docs" / "benchmarks"
EFFICIENT = 0.5
WORST_ERROR = 0.2
NO_WAKEUP = 1e-6  # seconds; less was not found but is where the search ends
KEY_BYTES = 8
HELD_WORKERS = (8, 64, 256, 1000)


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
    """All that one run has found. `costs` are those of one host, by batch; `remote` those of hosts apart."""

    costs: Mapping[int, Costs]
    remote: Costs
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

    @property
    def worst_error(self) -> float:
        """Of all checks; never negative."""
        return max(abs(check.error) for check in self.checks)

    def conclude(self, *, docs: bool) -> int:
        """Print everything, the result line last, and write the page if `docs`; the status to exit with.

        It is 1 where the simulator is off by more than WORST_ERROR, which is said then.
        """
        say(self.text())
        if docs:
            self.write()
        off = [check for check in self.checks if abs(check.error) > WORST_ERROR]
        for check in off:
            say(
                f"The simulator is off by {100 * check.error:+.0f} % for {check.name} at batch {check.batch}, more "
                f"than {100 * WORST_ERROR:.0f} %: its predictions are not to be relied upon. Received: "
                f"{check.seen:,.0f} samples/s seen, {check.predicted:,.0f} predicted, others used "
                f"{check.others:.2f} cores"
            )
        say("RESULT " + json.dumps(self.result()))
        return 1 if off else 0

    def result(self) -> dict[str, Any]:
        """The content of the result line."""
        best = max(self.grid.items(), key=lambda item: item[1].samples_per_s)
        return {
            "benchmark": "scale",
            "batch": self.batch,
            "worst_error": round(self.worst_error, 3),
            "errors": {f"{check.name} {check.batch}": round(check.error, 3) for check in self.checks},
            "best": {"mode": best[0][0], "workers": best[0][1], "servers": best[0][2]},
            "best_samples_per_s": round(best[1].samples_per_s),
            "limits": [asdict(limit) for limit in self.limits()],
            "nodes": [asdict(load) for load in self.loads],
            "costs": asdict(self.remote),
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
            self._waits(),
        ]
        for mode in dict.fromkeys(mode for mode, _, _ in self.grid):
            parts += [f"## Predicted, {mode}: samples a second", f"![](scale-{mode}.svg)", self._grid(mode)]
        parts += ["## Where it stops scaling", self._limits()]
        if "sync" in {mode for mode, _, _ in self.grid}:
            parts += ["## What a server holds in a synchronous step, MiB", self._held()]
        if self.loads:
            most = max(self.loads, key=lambda load: load.nodes)
            rates = {
                many: max(self.grid["async", many, few].samples_per_s for few in self._servers())
                for many in self._workers()
            }
            parts += [
                "## Where the coordinator would be the limit",
                scale_leases.text(rates, self.batch, most),
            ]
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
        alone = self.grid[mode, workers[0], servers].samples_per_s / workers[0]
        rates = {many: self.grid[mode, many, servers].samples_per_s for many in workers}
        good = [many for many in workers if rates[many] >= EFFICIENT * alone * many]
        last = max(good, default=workers[0])
        beyond = [many for many in workers if many > last]
        if not beyond:
            return Limit(mode, servers, last, rates[last], "not within what was simulated")
        found = self.grid[mode, beyond[0], servers]
        reasons = {
            "merging": "a server merges the workers' messages on one core, which is busy: more servers share rows, but "
            "not what a message costs; or larger steps",
            "server cores": "the servers' cores are busy: more cores for each, or larger steps; more servers "
            "share rows, but not what a message costs",
            "server link": "the servers' network is full: more servers, or less to send",
            "worker cores": "a worker's own cores are busy with messages to so many servers",
            "worker link": "a worker's network is full",
            "waiting": "workers and servers take turns, each idle while the other works",
        }
        reason = reasons[found.bottleneck]
        if found.bottleneck == "waiting":
            reason += f"; busiest: {found.busiest}, {100 * found.busy[found.busiest]:.0f} % of the time"
        return Limit(mode, servers, last, rates[last], reason)

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
        return table(header, rows)

    def _costs(self) -> str:
        names = [name for name in asdict(self.remote) if name not in ("samples", "spread")]
        columns = {f"batch {batch:,}": self.costs[batch] for batch in sorted(self.costs)}
        columns[f"batch {self.batch:,}, hosts apart"] = self.remote
        rows = [[name, *(_number(getattr(costs, name)) for costs in columns.values())] for name in names]
        return table(["cost", *columns], rows)

    def _waits(self) -> str:
        wakeup = self.remote.wakeup
        if wakeup < NO_WAKEUP:
            return (
                "No wait of messages was found: 1+1 is as fast as the processor time of its messages allows, so that "
                "`wakeup` is 0, and predictions have no other wait than the network's."
            )
        return f"A message waits for {1e6 * wakeup:.0f} µs until somebody works on it, beside the network's latency."

    def _held(self) -> str:
        some = [workers for workers in self._workers() if workers in HELD_WORKERS]
        rows = [
            [f"{workers:,}", *(f"{held_mib(self.remote, workers, few):,.0f}" for few in self._servers())]
            for workers in some
        ]
        about = (
            "A server has the pushes of all workers before it merges them: keys, gradients, and its part of the dense "
            "gradients, from each. The sum of them comes on top, at most as much again; tables are not counted."
        )
        return about + "\n\n" + table(["workers", *(f"{few} servers" for few in self._servers())], rows)

    def _grid(self, mode: str) -> str:
        rows = [
            [
                f"{workers:,}",
                *(f"{self.grid[mode, workers, servers].samples_per_s:,.0f}" for servers in self._servers()),
            ]
            for workers in self._workers()
        ]
        return table(["workers", *(f"{servers} servers" for servers in self._servers())], rows)

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
        return table(header, rows)

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
                *(f"{load.client_mib + mib:.1f}" for mib in load.store_mib.values()),
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
            *(f"with {servers} servers" for servers in self.loads[0].store_mib),
        ]
        return table(header, rows)


def held_mib(costs: Costs, workers: int, servers: int) -> float:
    """What the pushes of a synchronous step take in a server."""
    return workers * (costs.rows * (costs.row_bytes + KEY_BYTES) + costs.dense_bytes) / servers / 2**20


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
