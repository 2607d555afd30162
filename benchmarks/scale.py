"""Training past this machine: a simulator fed with costs that are measured here, and what nodes cost the driver.

    python -m benchmarks.scale
    python -m benchmarks.scale --quick --bandwidth 25 --latency 50

Measures what requests and rows cost a server and its client, runs real node processes in every configuration that fits
here, takes the costs of steps from a few of them, and predicts all: the differences are the simulator's error. Then it
predicts clusters of one host for each node, from 1 to 1,000 workers and 1 to 128 servers, and measures a coordinator
with up to 200 nodes. The last line printed is `RESULT {json}`; a page and plots go to docs/benchmarks/. The exit status
is 1 where the simulator is off by more than a fifth.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from benchmarks import node_load, request_costs, scale_report, split_costs
from benchmarks.contestants import Peer
from benchmarks.peer_process import PeerProcess, end_on_sigterm, say
from benchmarks.scale_costs import (
    CALIBRATION,
    CHECKS,
    Configuration,
    Observation,
    averaged,
    costs_apart,
    costs_of,
)
from benchmarks.simulator import Cluster, Costs, Mode, Prediction, predict
from benchmarks.workloads import Workload, workload

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
SERVERS = (1, 2, 4, 8, 16, 32, 64, 128)
NODES = (25, 50, 100, 200)
EPOCHS = 2  # of what is timed
REPEATS, QUIET = 3, 0.1  # again where other processes keep more of a core busy, at most so often
PASSES = 2  # each configuration anew: processes of the same program differ in speed for as long as they live


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
        requests = _requests(arguments)
        costs = costs_of(observations, requests["swept"], _split(arguments))
        remote = costs_apart(observations, costs[batch], requests, arguments.cores)
        checks = [_check(one, costs[one.configuration.batch]) for one in observations]
        grid = _grid(remote, arguments)
        counts = () if arguments.no_nodes else NODES[:1] if arguments.quick else NODES
        loads = node_load.measure(counts, log)
    report = scale_report.Report(
        costs=costs,
        remote=remote,
        checks=checks,
        grid=grid,
        loads=loads,
        batch=batch,
        bandwidth_gbit=arguments.bandwidth,
        latency_us=arguments.latency,
        cores=arguments.cores,
    )
    sys.exit(report.conclude(docs=not arguments.no_docs))


def _kept(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the file has: `observations`, and `requests` by way."""
    path: Path | None = arguments.observations
    if path is None or not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _keep(arguments: argparse.Namespace, name: str, values: Any) -> None:
    if arguments.observations is not None:
        kept = {**_kept(arguments), name: values}
        arguments.observations.write_text(json.dumps(kept, indent=1) + "\n")


def _requests(arguments: argparse.Namespace) -> dict[str, request_costs.RequestCosts]:
    """What requests cost over a Unix socket and over TCP."""
    if known := _kept(arguments).get("requests"):
        return request_costs.from_dict(known)
    found = request_costs.measure()
    _keep(arguments, "requests", {way: asdict(costs) for way, costs in found.items()})
    for way, costs in found.items():
        say(
            f"  a request over {way}: {1e6 * costs.client_request:.0f} µs of its client, "
            f"{1e6 * costs.server_request:.0f} of its server; "
            f"a row {1e9 * costs.client_row:.0f} and {1e9 * costs.server_row:.0f} ns"
        )
    return found


def _split(arguments: argparse.Namespace) -> split_costs.SplitCosts:
    """What several servers cost a worker."""
    if known := _kept(arguments).get("split"):
        return split_costs.SplitCosts(**known)
    found = split_costs.measure()
    _keep(arguments, "split", asdict(found))
    say(
        f"  several servers cost a worker {1e6 * found.part:.0f} µs for each and {1e9 * found.row:.0f} ns for each row"
    )
    return found


def _observations(arguments: argparse.Namespace, log: IO[str]) -> list[Observation]:
    """What was seen in all configurations, on average; those that the file has are not run again."""
    wanted = [] if arguments.observed else CALIBRATION if arguments.quick else [*CALIBRATION, *CHECKS]
    seen = [Observation.from_dict(one) for one in _kept(arguments).get("observations", [])]
    known = Counter(one.configuration for one in seen)
    passes = range(1 if arguments.quick else PASSES)
    wanted = [one for number in passes for one in wanted if known[one] <= number]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, ExitStack() as stack:
        process: PeerProcess | None = None
        for configuration in wanted:
            data = Path(folder) / f"{configuration.batch}.npz"
            generated: Workload = workload("dlrm", configuration.batch)
            if not data.exists():
                generated.write(data)
            settings = {"data": str(data), **configuration.settings()}
            if process is None:
                peer = Peer("nodes", "benchmarks.peers.nodes", (), pause=False)
                slots = max(one.servers + one.workers for one in wanted)
                process = stack.enter_context(
                    peer.start(peer.python(), data, {**settings, "slots": slots}, log)
                )
            else:
                process.ask({"fit": settings})
            seen.append(observe(configuration, process, generated.distinct(data), generated.batches))
            _keep(arguments, "observations", [asdict(one) for one in seen])
    return averaged(seen)


def observe(configuration: Configuration, process: PeerProcess, rows: float, batches: int) -> Observation:
    """Train with real node processes: once through the data to warm up, then some times.

    Arguments:
        process: `benchmarks.peers.nodes`, with nodes of this configuration.
        rows, batches: distinct rows of a batch, and batches of the data.
    """
    process.ask({"steps": 1})
    answer = process.ask({"steps": EPOCHS * batches})
    for _ in range(REPEATS):
        if answer["others"] < QUIET:
            break
        answer = min(answer, process.ask({"steps": EPOCHS * batches}), key=lambda one: float(one["others"]))
    steps = answer["steps"]
    observation = Observation(
        configuration,
        rows=rows,
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
