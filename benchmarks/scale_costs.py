"""Costs of requests, rows and steps, from what real nodes were seen to use."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.peers.protocol import BOTTOM, TOP
from benchmarks.simulator import Cluster, Costs, Mode, predict

DENSE, FIELDS, DIM = 13, 26, 16
SPREAD = 0.1  # of the seconds of a step's computing; seen between the steps of a worker alone
LARGE, SMALL = 2048, 512
LOOSEST_WAKEUP = 0.02


@dataclass(frozen=True)
class Configuration:
    """What was run: a topology, a batch for each worker, and `max_staleness`, if not the project's choice."""

    servers: int
    workers: int
    batch: int = LARGE
    mode: Mode = "async"
    staleness: int | None = None

    @property
    def name(self) -> str:
        """`2+2 sync`."""
        nodes = "embedded" if self.servers == 0 else f"{self.servers}+{self.workers}"
        ahead = "" if self.staleness is None else f", {self.staleness} ahead"
        return (nodes if self.mode == "async" else f"{nodes} {self.mode}") + ahead


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
        return Cluster(one.workers, one.servers, one.mode, one.staleness, cores=cores, one_host=True)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Observation:
        """What `asdict` made."""
        return cls(**{**fields, "configuration": Configuration(**fields["configuration"])})


# What costs are taken from, one step at a time, as without servers: what one step costs another is no message's cost.
# Their processor times are; their throughput is not, but for that of 1+1 at the small batch.
CALIBRATION = [
    Configuration(0, 1),
    Configuration(0, 1, SMALL),
    Configuration(1, 1, staleness=0),
    Configuration(1, 1, SMALL, staleness=0),
    Configuration(2, 1, staleness=0),
]
CHECKS = [
    Configuration(1, 1),
    Configuration(1, 1, SMALL),
    Configuration(2, 1),
    Configuration(2, 2),
    Configuration(1, 2),
    Configuration(2, 2, mode="sync"),
    Configuration(2, 2, SMALL),
    Configuration(1, 2, mode="sync"),
    Configuration(1, 2, SMALL),
]


def costs_of(observations: Sequence[Observation]) -> dict[int, Costs]:
    """The costs at each batch size.

    The embedded run says what computing takes and how many cores it keeps busy. What a worker with one server uses
    beyond that is for messages; two batch sizes tell those for rows from the rest, and a second server those for a
    message from those for a step. How long a message waits for somebody to work on it follows from the throughput of
    1+1 at the small batch.

    Raises:
        KeyError: a configuration of CALIBRATION is missing.
    """
    seen = {one.configuration: one for one in observations}
    embedded = {batch: seen[Configuration(0, 1, batch)] for batch in (SMALL, LARGE)}
    one = {batch: seen[Configuration(1, 1, batch, staleness=0)] for batch in (SMALL, LARGE)}
    two = seen[Configuration(2, 1, staleness=0)]
    steps = {batch: _computing(embedded[batch]) for batch in (SMALL, LARGE)}
    client = {
        batch: max(0.0, one[batch].worker_seconds - steps[batch].compute - steps[batch].prepare)
        for batch in (SMALL, LARGE)
    }
    rows = {batch: one[batch].rows for batch in (SMALL, LARGE)}
    client_row = _slope(client, rows)
    server_row = _slope({batch: one[batch].server_seconds for batch in (SMALL, LARGE)}, rows)
    # One server means two messages in a step, a second one two more: least squares of both runs.
    beside = steps[LARGE].compute + steps[LARGE].prepare + client_row * rows[LARGE]
    messages = [(2, one[LARGE].worker_seconds - beside), (4, two.worker_seconds - beside)]
    client_request = max(0.0, sum(count * used for count, used in messages)) / sum(
        count * count for count, _ in messages
    )
    server_request = max(0.0, two.server_seconds - one[LARGE].server_seconds) / 2
    fixed = one[LARGE].server_seconds - server_row * rows[LARGE]
    shared: dict[str, Any] = {
        "client_request": client_request,
        "client_row": client_row,
        "server_request": min(server_request, fixed / 2),
        "server_row": server_row,
        "server_step": max(0.0, fixed - 2 * min(server_request, fixed / 2)),
        "row_bytes": 4.0 * DIM,
        "dense_bytes": 4.0 * dense_floats(),
        "spread": SPREAD,
    }
    costs = {batch: replace(steps[batch], **shared) for batch in (SMALL, LARGE)}
    wakeup = _wakeup(costs[SMALL], one[SMALL])
    return {batch: replace(found, wakeup=wakeup) for batch, found in costs.items()}


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


def _slope(seconds: Mapping[int, float], rows: Mapping[int, float]) -> float:
    """Seconds for each row, from two batch sizes."""
    found = (seconds[LARGE] - seconds[SMALL]) / (rows[LARGE] - rows[SMALL])
    return min(max(found, 0.0), seconds[LARGE] / rows[LARGE])


def _wakeup(costs: Costs, seen: Observation) -> float:
    """The wait of each message with which 1+1 on one host is as fast as it was seen to be."""
    low, high = 0.0, LOOSEST_WAKEUP
    for _ in range(20):
        middle = (low + high) / 2
        found = predict(replace(costs, wakeup=middle), seen.cluster()).samples_per_s
        low, high = (middle, high) if found > seen.samples_per_s else (low, middle)
    return low
