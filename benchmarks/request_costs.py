"""What requests and rows cost a server and its client: processor seconds of one process of each, measured directly.

The processes are those of `benchmarks.server`. A request names all tables of the model, and is the pull or the push of
a step, by turns; what rows cost is the difference between requests with few and with many of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.server import Load, Process, drive, run_for, serve

Way = Literal["unix", "tcp"]
FEW, MANY = Load("few", 26, 4, pushes=True), Load("step", 26, 250, pushes=True)
SECONDS, ROUNDS = 0.5, 5


@dataclass(frozen=True)
class RequestCosts:
    """Processor seconds of a client and of a server for a message, and for a row in a step (pull and push together)."""

    client_request: float
    client_row: float
    server_request: float
    server_row: float


def measure(
    ways: Sequence[Way] = ("unix", "tcp"), seconds: float = SECONDS, rounds: int = ROUNDS
) -> dict[str, RequestCosts]:
    """The costs over each way: one server process and one client process, each on a core of its own if there are two.

    Rounds with few and with many rows alternate; the first one of each warms up, of the others the median counts.
    """
    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, RequestCosts] = {}
    for way in ways:
        with ExitStack() as stack:
            server = Process(serve, way, set(cores[:1]))
            stack.callback(server.close)
            client = Process(drive, way, server.receive(), 0, set(cores[1:] or cores))
            stack.callback(client.close)
            client.receive()
            client.send((MANY, 0))
            client.receive()
            seen: dict[Load, list[tuple[float, float]]] = {FEW: [], MANY: []}
            for _ in range(rounds + 1):
                for load, pairs in seen.items():
                    _, served, [done] = run_for(load, server, [client], seconds)
                    pairs.append((done.seconds / done.requests, served / done.requests))
        median = {load: np.median(pairs[1:], axis=0).tolist() for load, pairs in seen.items()}
        found[way] = costs_between(median[FEW], median[MANY])
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
