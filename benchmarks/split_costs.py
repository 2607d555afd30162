"""What it costs a worker that its tables lie on several servers: keys and gradients are split, rows are put together.

Processor seconds of pulls and pushes of a `RemoteStore` whose servers are in this process and answer at once. Computing
uses the caches between two steps: memory is swept before each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.request_costs import FEW, MANY
from benchmarks.server import DIM, Load, requests_of
from deeprec_spark.embedding.store import PullReply
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions
from deeprec_spark.runtime.store_messages import encode_pull_reply

TWO, SEVERAL = 2, 8
STEPS, ROUNDS = 30, 5
SWEEP_MIB = 64


@dataclass(frozen=True)
class SplitCosts:
    """Seconds of a worker for each of several servers, and for each row, in a step (pull and push together)."""

    part: float = 0.0
    row: float = 0.0


class Answering:
    """A server that knows its answers: rows of zeros for a pull, a step for a push."""

    def __init__(self) -> None:
        self._replies: dict[tuple[int, ...], Message] = {}

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        """The answer, which is made at the first request of these lengths."""
        if method == "push":
            return Message({"step": 1})
        lengths = tuple(message.array("lengths", np.int64).tolist())
        if lengths not in self._replies:
            tables = message.header["tables"]
            rows = {
                table: np.zeros((count, DIM), np.float32)
                for table, count in zip(tables, lengths, strict=True)
            }
            encoded = encode_pull_reply(PullReply(rows, dense=None, state=None, step=1), tables)
            joined = {
                name: np.concatenate(part) if isinstance(part, list) else part
                for name, part in encoded.arrays.items()
            }
            self._replies[lengths] = Message(encoded.header, joined)
        return self._replies[lengths]

    def close(self) -> None:
        """Nothing to close."""


def measure(steps: int = STEPS, rounds: int = ROUNDS) -> SplitCosts:
    """The costs; rounds of all loads and numbers of servers alternate, and the median counts."""
    runs = [(1, FEW), (1, MANY), (TWO, FEW), (TWO, MANY), (SEVERAL, FEW)]
    seen: dict[tuple[int, Load], list[float]] = {run: [] for run in runs}
    for _ in range(rounds + 1):
        for servers, load in runs:
            seen[servers, load].append(_seconds(servers, load, steps))
    return costs_between({run: median(times[1:]) for run, times in seen.items()})


def costs_between(seconds: Mapping[tuple[int, Load], float]) -> SplitCosts:
    """The costs, from the seconds of a step with each number of servers and each load.

    What each server's messages cost, one server has as well, and so the rows: they are not counted here.
    """
    few_rows, many_rows = (load.tables * load.rows for load in (FEW, MANY))
    part = seconds[SEVERAL, FEW] / SEVERAL - seconds[1, FEW]
    of_rows = (seconds[TWO, MANY] - seconds[TWO, FEW]) - (seconds[1, MANY] - seconds[1, FEW])
    return SplitCosts(max(0.0, part), max(0.0, of_rows) / (many_rows - few_rows))


def _seconds(servers: int, load: Load, steps: int) -> float:
    callers = {server: Answering() for server in range(servers)}
    store = RemoteStore(["in this process"] * servers, RemoteStoreOptions("none"), local=callers)
    try:
        pull, push = requests_of(load, np.random.default_rng(1))
        store.pull(pull)
        swept = np.zeros(SWEEP_MIB * 2**17)
        seconds = 0.0
        for _ in range(steps):
            swept += 1.0
            for call, request in ((store.pull, pull), (store.push, push)):
                start = time.process_time()
                call(request)
                seconds += time.process_time() - start
        return seconds / steps
    finally:
        store.close()
