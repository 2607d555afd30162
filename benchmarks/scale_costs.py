"""Costs of requests, rows and steps, from what real nodes were seen to use."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.peers.protocol import BOTTOM, TOP
from benchmarks.request_costs import RequestCosts
from benchmarks.simulator import Cluster, Costs, Mode, Placement, predict

DENSE, FIELDS, DIM = 13, 26, 16
SPREAD = 0.1  # of the seconds of a step's computing; seen between the steps of a worker alone
LARGE, SMALL = 2048, 512
LOOSEST_WAKEUP = 0.02


@dataclass(frozen=True)
class Configuration:
    """What was run: a topology, a batch for each worker, and `max_staleness`, if not the project's choice.

    With colocated placement each worker has a server in its process, and `servers` is 0.
    """

    servers: int
    workers: int
    batch: int = LARGE
    mode: Mode = "async"
    staleness: int | None = None
    placement: Placement = "separate"

    @property
    def name(self) -> str:
        """`2+2 sync`."""
        if self.placement == "colocated":
            nodes = f"{self.workers} colocated"
        else:
            nodes = "embedded" if self.servers == 0 else f"{self.servers}+{self.workers}"
        ahead = "" if self.staleness is None else f", {self.staleness} ahead"
        return (nodes if self.mode == "async" else f"{nodes} {self.mode}") + ahead

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
# cost. Their processor times are; their throughput is not, but for that of 1+1 at the small batch.
CALIBRATION = [
    Configuration(0, 1),
    Configuration(0, 1, SMALL),
    Configuration(1, 1, staleness=0),
    Configuration(1, 1, SMALL, staleness=0),
    Configuration(1, 2, mode="sync"),
    Configuration(1, 2, SMALL, mode="sync"),
]
CHECKS = [
    Configuration(1, 1),
    Configuration(1, 1, SMALL),
    Configuration(2, 1),
    Configuration(1, 2),
    Configuration(1, 2, SMALL),
    Configuration(2, 2),
    Configuration(2, 2, SMALL),
    Configuration(2, 2, mode="sync"),
    Configuration(2, 2, SMALL, mode="sync"),
    Configuration(0, 2, mode="sync", placement="colocated"),
    Configuration(0, 2, SMALL, mode="sync", placement="colocated"),
]


def costs_of(observations: Sequence[Observation], requests: RequestCosts) -> dict[int, Costs]:
    """The costs at each batch size, on one host.

    `requests` says what messages and rows cost. Of the processor time that was observed, the embedded run says what
    computing takes and how many cores it keeps busy; what 1+1 uses beyond computing, messages and rows is for the dense
    parameters and all else in a step with servers. Where it uses less, rows cost no more than it used. What the server
    of 1+2 sync uses beyond messages and that is for merging rows. How long a message waits for somebody to work on it
    follows from the throughput of 1+1 at the small batch.

    Raises:
        KeyError: a configuration of CALIBRATION is missing.
    """
    seen = {one.configuration: one for one in observations}
    costs: dict[int, Costs] = {}
    for batch in (SMALL, LARGE):
        steps = _computing(seen[Configuration(0, 1, batch)])
        one = seen[Configuration(1, 1, batch, staleness=0)]
        merged = seen[Configuration(1, 2, batch, mode="sync")]
        served = 2 * requests.server_request
        computed = steps.compute + steps.prepare + 2 * requests.client_request
        client_row, client_step = _shared(one.worker_seconds - computed, one.rows, requests.client_row)
        server_row, server_step = _shared(one.server_seconds - served, one.rows, requests.server_row)
        costs[batch] = replace(
            steps,
            client_request=requests.client_request,
            client_row=client_row,
            client_step=client_step,
            server_request=requests.server_request,
            server_row=server_row,
            server_step=server_step,
            merge_row=max(0.0, merged.server_seconds - served - server_step) / merged.rows,
            row_bytes=4.0 * DIM,
            dense_bytes=4.0 * dense_floats(),
            spread=SPREAD,
        )
    wakeup = _wakeup(costs[SMALL], seen[Configuration(1, 1, SMALL, staleness=0)])
    return {batch: replace(found, wakeup=wakeup) for batch, found in costs.items()}


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


def _computing(embedded: Observation) -> Costs:
    """The parts of a step without servers: reading and preparing beside it, the tables, and the model."""
    stages = embedded.stages
    prepare = stages["read"] + stages["prepare"]
    tables = stages["pull"] + stages["push"]
    alone = stages["compute"] + stages["measure"]
    compute = max(embedded.worker_seconds - prepare - tables, alone)
    return Costs(
        samples=embedded.configuration.batch,
        rows=embedded.rows,
        compute=compute,
        threads=compute / alone,
        prepare=prepare,
        embedded_row=tables / embedded.rows,
    )


def _shared(seconds: float, rows: float, row: float) -> tuple[float, float]:
    """Seconds of a step as those of each row, which cost `row` at most, and the rest."""
    row = min(row, max(0.0, seconds) / rows)
    return row, max(0.0, seconds - rows * row)


def _wakeup(costs: Costs, seen: Observation) -> float:
    """The wait of each message with which 1+1 on one host is as fast as it was seen to be."""
    low, high = 0.0, LOOSEST_WAKEUP
    for _ in range(20):
        middle = (low + high) / 2
        found = predict(replace(costs, wakeup=middle), seen.cluster()).samples_per_s
        low, high = (middle, high) if found > seen.samples_per_s else (low, middle)
    return low
