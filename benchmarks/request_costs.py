"""What requests and rows cost a server and its client: processor seconds of one process of each, measured directly.

The processes are those of `benchmarks.server`. A request names all tables of the model, and is the pull or the push of
a step, by turns, with keys that are as frequent as those of its data; what rows cost is the difference between requests
with few and with many of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.server import Load, Process, drive, run_for, serve
from benchmarks.workloads import workload

EXPONENT = workload("dlrm", 512).exponent
FEW, MANY = (Load(name, 26, rows, True, EXPONENT, 64) for name, rows in (("few", 4), ("many", 250)))
SWEPT = replace(FEW, name="swept", sweep=64)
SECONDS, ROUNDS = 0.5, 5


@dataclass(frozen=True)
class RequestCosts:
    """Processor seconds of a client and of a server for a message, and for a row in a step (pull and push together)."""

    client_request: float
    client_row: float
    server_request: float
    server_row: float


def measure(seconds: float = SECONDS, rounds: int = ROUNDS) -> dict[str, RequestCosts]:
    """The costs by "unix" and "tcp", and those by "swept": over a Unix socket, after caches were used by others.

    One server process and one client process. Rounds with few and with many rows alternate; the first one of each warms
    up, of the others the median counts.
    """
    cores = os.sched_getaffinity(0)
    found: dict[str, RequestCosts] = {}
    for way in ("unix", "tcp"):
        with ExitStack() as stack:
            server = Process(serve, way, cores)
            stack.callback(server.close)
            client = Process(drive, way, server.receive(), 0, cores)
            stack.callback(client.close)
            client.receive()
            client.send((MANY, 0))
            client.receive()
            seen: dict[Load, list[tuple[float, float]]] = {FEW: [], MANY: []}
            if way == "unix":
                seen[SWEPT] = []
            for _ in range(rounds + 1):
                for load, pairs in seen.items():
                    _, served, [done] = run_for(load, server, [client], seconds)
                    pairs.append((done.seconds / done.requests, served / done.requests))
        median = {load: np.median(pairs[1:], axis=0).tolist() for load, pairs in seen.items()}
        found[way] = costs_between(median[FEW], median[MANY])
        if way == "unix":
            client_request, server_request = median[SWEPT]
            found["swept"] = replace(
                found[way],
                client_request=max(client_request, found[way].client_request),
                server_request=max(server_request, found[way].server_request),
            )
    return found


def costs_between(few: Sequence[float], many: Sequence[float]) -> RequestCosts:
    """The costs, from the seconds of client and server for each request of the loads FEW and MANY.

    Example:
        >>> costs_between((2e-4, 3e-4), (2e-4, 3e-4)).client_row
        0.0
    """
    few_rows, many_rows = (load.tables * load.rows for load in (FEW, MANY))
    rows = [max(0.0, b - a) / (many_rows - few_rows) for a, b in zip(few, many, strict=True)]
    requests = [max(0.0, a - row * few_rows) for a, row in zip(few, rows, strict=True)]
    return RequestCosts(requests[0], 2 * rows[0], requests[1], 2 * rows[1])


def from_dict(fields: Mapping[str, Mapping[str, float]]) -> dict[str, RequestCosts]:
    """What `asdict` made of each way's costs."""
    return {way: RequestCosts(**costs) for way, costs in fields.items()}
