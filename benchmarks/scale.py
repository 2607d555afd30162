"""Training past this machine: a simulator fed with costs that are measured here, and what nodes cost the driver.

    python -m benchmarks.scale
    python -m benchmarks.scale --quick --bandwidth 25 --latency 50

Runs real node processes in every configuration that fits here, takes the costs of requests, rows and steps from a few
of them, and predicts all: the differences are the simulator's error. Then it predicts clusters of one host for each
node, from 1 to 1,000 workers and 1 to 128 servers, and measures a coordinator with up to 200 nodes. The last line
printed is `RESULT {json}`; a page and plots go to docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import IO

from benchmarks import node_load, scale_report
from benchmarks.contestants import Peer
from benchmarks.peer_process import end_on_sigterm, say
from benchmarks.scale_costs import CALIBRATION, CHECKS, Configuration, Observation, costs_of
from benchmarks.simulator import Cluster, Costs, Mode, Prediction, predict
from benchmarks.workloads import Workload, workload

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
SERVERS = (1, 2, 4, 8, 16, 32, 64, 128)
NODES = (25, 50, 100, 200)
SECONDS = 4.0
REPEATS, QUIET = 3, 0.1  # again where other processes keep more of a core busy, at most so often


def main() -> None:
    """The command line."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidth", type=float, default=10.0, help="Gbit/s of a host in each direction")
    parser.add_argument("--latency", type=float, default=100.0, help="microseconds of a message under way")
    parser.add_argument("--cores", type=float, default=os.cpu_count(), help="of each host")
    parser.add_argument("--quick", action="store_true", help="fewer configurations, clusters and nodes")
    parser.add_argument("--observations", type=Path, help="kept here, and not measured again")
    parser.add_argument("--observed", action="store_true", help="run nothing that the file does not have")
    parser.add_argument("--no-nodes", action="store_true", help="leave the coordinator out")
    parser.add_argument("--no-docs", action="store_true", help="do not write docs/benchmarks/")
    arguments = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", prefix="benchmark-", suffix=".log", delete=False) as log:
        observations = _observations(arguments, log)
        batch = max(one.configuration.batch for one in observations)
        costs = costs_of(observations)
        checks = [_check(one, costs[one.configuration.batch]) for one in observations]
        grid = _grid(costs[batch], arguments)
        counts = () if arguments.no_nodes else NODES[:1] if arguments.quick else NODES
        loads = node_load.measure(counts, log)
    report = scale_report.Report(
        costs=costs,
        checks=checks,
        grid=grid,
        loads=loads,
        batch=batch,
        bandwidth_gbit=arguments.bandwidth,
        latency_us=arguments.latency,
        cores=arguments.cores,
    )
    say(report.text())
    if not arguments.no_docs:
        report.write()
    say("RESULT " + json.dumps(report.result()))


def _observations(arguments: argparse.Namespace, log: IO[str]) -> list[Observation]:
    """What was seen in all configurations; those that the file has are not run again."""
    path: Path | None = arguments.observations
    wanted = CALIBRATION if arguments.quick else [*CALIBRATION, *CHECKS]
    if arguments.observed:
        wanted = []
    seen: list[Observation] = []
    if path is not None and path.exists():
        seen = [Observation.from_dict(one) for one in json.loads(path.read_text())]
    known = {one.configuration for one in seen}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for configuration in wanted:
            if configuration in known:
                continue
            seen.append(_observe(configuration, Path(folder), log))
            if path is not None:
                path.write_text(json.dumps([asdict(one) for one in seen], indent=1) + "\n")
    return seen


def _observe(configuration: Configuration, folder: Path, log: IO[str]) -> Observation:
    """Train with real node processes: once through the data to warm up, then for some seconds."""
    data = folder / f"{configuration.batch}.npz"
    generated: Workload = workload("dlrm", configuration.batch)
    if not data.exists():
        generated.write(data)
    peer = Peer(
        configuration.name,
        "benchmarks.peers.nodes",
        (
            {
                "servers": configuration.servers,
                "workers": configuration.workers,
                "mode": configuration.mode,
                "staleness": configuration.staleness,
            },
        ),
        pause=False,
    )
    with peer.start(peer.python(), data, peer.settings[0], log) as process:
        process.ask({"steps": 1})
        first = process.ask({"steps": 1})
        rate = first["steps"] * configuration.batch / first["seconds"]
        steps = max(1, int(SECONDS * rate / configuration.batch))
        answer = process.ask({"steps": steps})
        for _ in range(REPEATS):
            if answer["others"] < QUIET:
                break
            answer = min(answer, process.ask({"steps": steps}), key=lambda one: float(one["others"]))
    steps = answer["steps"]
    observation = Observation(
        configuration,
        rows=generated.distinct(data),
        samples_per_s=steps * configuration.batch / answer["seconds"],
        worker_seconds=answer["processor"]["worker"] / steps,
        server_seconds=answer["processor"]["server"] / steps,
        stages={name: seconds / steps for name, seconds in answer["stages"].items()},
        others=max(0.0, answer["others"]),
    )
    say(
        f"  {configuration.name} at batch {configuration.batch}: {observation.samples_per_s:,.0f} samples/s, "
        f"{observation.others:.2f} cores busy with other things"
    )
    return observation


def _check(observation: Observation, costs: Costs) -> scale_report.Check:
    one = observation.configuration
    predicted = predict(costs, observation.cluster()).samples_per_s
    return scale_report.Check(
        one.name, one.batch, observation.samples_per_s, predicted, observation.others, one in CALIBRATION
    )


def _grid(costs: Costs, arguments: argparse.Namespace) -> dict[tuple[str, int, int], Prediction]:
    """Predictions by mode, workers and servers, each node on a host of its own."""
    workers = WORKERS[::3] if arguments.quick else WORKERS
    servers = SERVERS[::3] if arguments.quick else SERVERS
    found: dict[tuple[str, int, int], Prediction] = {}
    modes: tuple[Mode, ...] = ("async", "sync")
    for mode in modes:
        for many in workers:
            for few in servers:
                cluster = Cluster(
                    workers=many,
                    servers=few,
                    mode=mode,
                    cores=arguments.cores,
                    bandwidth=arguments.bandwidth * 1e9 / 8,
                    latency=arguments.latency / 1e6,
                )
                found[mode, many, few] = predict(costs, cluster)
    return found


if __name__ == "__main__":
    main()
