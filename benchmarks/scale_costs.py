"""Costs of requests, rows and steps, from what real nodes were seen to use."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, harmonic_mean
from typing import Any

from benchmarks.peers.protocol import BOTTOM, TOP
from benchmarks.request_costs import RequestCosts
from benchmarks.simulator import Cluster, Costs, Mode, Placement, predict
from benchmarks.split_costs import SplitCosts

DENSE, FIELDS, DIM = 13, 26, 16
SPREAD = 0.1  # of the seconds of a step's computing; seen between the steps of a worker alone
LARGE, SMALL = 2048, 512
LARGEST_WAKEUP, LARGEST_CROWDING, LARGEST_MERGE_ROW = 0.02, 1.0, 1e-5
ROUNDS = 3  # in which numbers that depend on each other are fitted


@dataclass(frozen=True)
class Configuration:
    """What was run: a topology, a batch for each worker, and `max_staleness`, if not the project's choice.

    With colocated placement each worker has a server in its process, and `servers` is 0. `intra` is how many threads
    TensorFlow splits an operation among, if not the project's choice.
    """

    servers: int
    workers: int
    batch: int = LARGE
    mode: Mode = "async"
    staleness: int | None = None
    placement: Placement = "separate"
    intra: int | None = None

    @property
    def name(self) -> str:
        """`2+2 sync`."""
        if self.placement == "colocated":
            nodes = f"{self.workers} colocated"
        else:
            nodes = "embedded" if self.servers == 0 else f"{self.servers}+{self.workers}"
        ahead = "" if self.staleness is None else f", {self.staleness} ahead"
        whole = "" if self.intra is None else ", operations whole"
        return (nodes if self.mode == "async" else f"{nodes} {self.mode}") + ahead + whole

    def settings(self) -> dict[str, Any]:
        """For `benchmarks.peers.nodes`."""
        return {name: value for name, value in asdict(self).items() if name != "batch"}


@dataclass(frozen=True)
class Observation:
    """What was seen: samples a second, and for each step of a worker the distinct rows and the seconds.

    `worker_seconds` and `server_seconds` are processor time of all workers and all servers; `stages` is wall time of
    the stages of a worker's step; `others` is how many cores other processes of the machine kept busy meanwhile.
    """

    configuration: Configuration
    rows: float
    samples_per_s: float
    worker_seconds: float
    server_seconds: float
    stages: Mapping[str, float] = field(default_factory=dict)
    others: float = 0.0

    def cluster(self) -> Cluster:
        """What was run, for the simulator: all nodes on this host, with the cores that others left."""
        one = self.configuration
        cores = max(0.5, (os.cpu_count() or 1) - self.others)
        servers = one.workers if one.placement == "colocated" else one.servers
        return Cluster(
            one.workers,
            servers,
            one.mode,
            one.staleness,
            cores=cores,
            one_host=True,
            placement=one.placement,
        )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Observation:
        """What `asdict` made."""
        return cls(**{**fields, "configuration": Configuration(**fields["configuration"])})


# What costs are taken from, 1+1 one step at a time, as without servers: what one step costs another is no message's
# cost. Their processor times are; their throughput is not, but for that of 1+1 at the small batch. A worker alone on a
# host splits operations; those that share cores, and compute at the same time, do not.
CALIBRATION = [
    Configuration(0, 1),
    Configuration(0, 1, SMALL),
    Configuration(1, 1, staleness=0),
    Configuration(1, 1, staleness=0, intra=1),
    Configuration(1, 1, SMALL, staleness=0, intra=1),
    Configuration(1, 2, mode="sync"),
    Configuration(1, 2, SMALL, mode="sync"),
    Configuration(2, 2, SMALL),
]
CHECKS = [
    Configuration(1, 1),
    Configuration(1, 1, SMALL),
    Configuration(2, 1),
    Configuration(1, 2),
    Configuration(1, 2, SMALL),
    Configuration(2, 2),
    Configuration(2, 2, mode="sync"),
    Configuration(2, 2, SMALL, mode="sync"),
    Configuration(0, 2, mode="sync", placement="colocated"),
    Configuration(0, 2, SMALL, mode="sync", placement="colocated"),
]


def averaged(observations: Sequence[Observation]) -> list[Observation]:
    """One observation of each configuration: the means of all that there are, by step and not by second."""
    found: dict[Configuration, list[Observation]] = {}
    for one in observations:
        found.setdefault(one.configuration, []).append(one)
    return [
        Observation(
            configuration,
            rows=fmean(one.rows for one in seen),
            samples_per_s=harmonic_mean([one.samples_per_s for one in seen]),
            worker_seconds=fmean(one.worker_seconds for one in seen),
            server_seconds=fmean(one.server_seconds for one in seen),
            stages={name: fmean(one.stages[name] for one in seen) for name in seen[0].stages},
            others=fmean(one.others for one in seen),
        )
        for configuration, seen in found.items()
    ]


def costs_of(
    observations: Sequence[Observation], requests: RequestCosts, split: SplitCosts
) -> dict[int, Costs]:
    """The costs at each batch size, of nodes that share a host.

    `requests` says what messages and rows cost. What the worker of 1+1 (one step at a time) uses beyond messages, rows
    and preparing is for computing; what its server uses beyond messages and rows is for the dense parameters and all
    else, and where it uses less, rows cost no more than it used. What the embedded run uses beyond computing and
    preparing is for its tables. How much longer all takes for each process beside the first is what 2+2 uses more at
    the small batch, and what the server of 1+2 sync uses beyond messages is for merging rows. How long a message
    waits for somebody to work on it follows from the throughput of 1+1 at the small batch.

    Raises:
        KeyError: a configuration of CALIBRATION is missing.
    """
    seen = {one.configuration: one for one in observations}
    costs = {
        batch: replace(
            _alone(
                seen[Configuration(0, 1, batch)],
                seen[Configuration(1, 1, batch, staleness=0, intra=1)],
                requests,
            ),
            split_part=split.part,
            split_row=split.row,
        )
        for batch in (SMALL, LARGE)
    }
    alone, crowded = seen[Configuration(1, 1, SMALL, staleness=0, intra=1)], seen[Configuration(2, 2, SMALL)]
    merged = {batch: seen[Configuration(1, 2, batch, mode="sync")] for batch in costs}
    wakeup = crowding = 0.0
    for _ in range(ROUNDS):  # each follows from the others
        fitted = {"crowding": crowding, "wakeup": wakeup}
        costs = {batch: replace(found, **fitted) for batch, found in costs.items()}
        costs = {
            batch: replace(found, merge_row=_merge_row(found, merged[batch]))
            for batch, found in costs.items()
        }
        crowding = _crowding(costs[SMALL], crowded)
        wakeup = _wakeup(replace(costs[SMALL], crowding=crowding), alone)
    return costs


def costs_apart(
    observations: Sequence[Observation],
    shared: Costs,
    requests: Mapping[str, RequestCosts],
    cores: float | None = None,
) -> Costs:
    """The costs at the large batch of nodes that have a host each; `shared` are those of nodes that share one.

    What 1+1 uses, one step at a time and with all threads, with messages over TCP. Servers work on rows with all
    `cores` of theirs; None is as many as this host has.
    """
    seen = {one.configuration: one for one in observations}
    alone = _alone(seen[Configuration(0, 1)], seen[Configuration(1, 1, staleness=0)], requests["swept"])
    alone = replace(
        alone,
        split_part=shared.split_part,
        split_row=shared.split_row,
        merge_row=shared.merge_row,
        wakeup=shared.wakeup,
        server_threads=alone.server_threads if cores is None else cores,
    )
    return between_hosts(alone, requests["unix"], requests["tcp"])


def between_hosts(costs: Costs, here: RequestCosts, there: RequestCosts) -> Costs:
    """Costs that were found with messages that cost `here`, where they cost `there`."""
    # Two measurements of nearly the same: what looks cheaper over a network is noise.
    client_row, server_row = (
        max(0.0, getattr(there, name) - getattr(here, name)) for name in ("client_row", "server_row")
    )
    return replace(
        costs,
        client_request=there.client_request,
        client_row=costs.client_row + client_row,
        server_request=there.server_request,
        server_row=costs.server_row + server_row,
        merge_row=costs.merge_row + server_row,
    )


def dense_floats() -> int:
    """Weights of the model beside its tables."""
    vectors = FIELDS + 1
    bottom = [DENSE, *BOTTOM, DIM]
    top = [DIM + vectors * (vectors - 1) // 2, *TOP, 1]
    return sum((a + 1) * b for widths in (bottom, top) for a, b in itertools.pairwise(widths))


def _alone(embedded: Observation, one: Observation, requests: RequestCosts) -> Costs:
    """The parts of a step that the runs with one worker tell."""
    prepare = one.stages["read"] + one.stages["prepare"]
    wall = one.stages["compute"] + one.stages["measure"]
    client = 2 * requests.client_request
    client_row, compute = _shared(one.worker_seconds - prepare - client, one.rows, requests.client_row)
    compute = max(compute, wall)
    server_row, server_step = _shared(
        one.server_seconds - 2 * requests.server_request, one.rows, requests.server_row
    )
    tables = max(0.0, embedded.worker_seconds - prepare - compute)
    waited = embedded.stages["pull"] + embedded.stages["push"]
    return Costs(
        samples=one.configuration.batch,
        rows=one.rows,
        compute=compute,
        threads=compute / wall,
        prepare=prepare,
        client_request=requests.client_request,
        client_row=client_row,
        server_request=requests.server_request,
        server_row=server_row,
        server_step=server_step,
        server_threads=one.cluster().cores,
        embedded_row=tables / embedded.rows,
        embedded_threads=min(max(1.0, tables / waited), one.cluster().cores),
        row_bytes=4.0 * DIM,
        dense_bytes=4.0 * dense_floats(),
        spread=SPREAD,
    )


def _shared(seconds: float, rows: float, row: float) -> tuple[float, float]:
    """Seconds of a step as those of each row, which cost `row` at most, and the rest."""
    row = min(row, max(0.0, seconds) / rows)
    return row, max(0.0, seconds - rows * row)


def _merge_row(costs: Costs, seen: Observation) -> float:
    """What merging a row costs, so that the server of 1+2 sync uses what it was seen to use."""
    return _fitted(
        lambda value: predict(replace(costs, merge_row=value), seen.cluster()).server_seconds,
        seen.server_seconds,
        LARGEST_MERGE_ROW,
    )


def _crowding(costs: Costs, seen: Observation) -> float:
    """How much longer all takes beside another process, so that the nodes of 2+2 use what they were seen to use."""

    def used(value: float) -> float:
        found = predict(replace(costs, crowding=value), seen.cluster())
        return found.worker_seconds + found.server_seconds

    return _fitted(used, seen.worker_seconds + seen.server_seconds, LARGEST_CROWDING)


def _wakeup(costs: Costs, seen: Observation) -> float:
    """The wait of each message with which 1+1 on one host is as fast as it was seen to be."""
    return _fitted(
        lambda value: 1 / predict(replace(costs, wakeup=value), seen.cluster()).samples_per_s,
        1 / seen.samples_per_s,
        LARGEST_WAKEUP,
    )


def _fitted(of: Callable[[float], float], wanted: float, largest: float) -> float:
    """The value from 0 to `largest` at which a rising function is `wanted`."""
    low, high = 0.0, largest
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) < wanted else (low, middle)
    return low
