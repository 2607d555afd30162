"""One server core under load: requests and rows a second with 1 to 32 client processes.

    python -m benchmarks.server

A server process is pinned to one core; clients are processes on the others. A request is the pull or the push of a step
(26 tables, 250 rows of 16 floats each), by turns, or a small pull (1 table, 32 rows). Ways to the server: Arrow Flight
(what servers spoke before), a channel over TCP, a channel over the host's Unix socket. `busy` is the share of its core
that the server used, so that a rate with a server that idles is seen to be the clients'. A table and a plot go to
docs/benchmarks/server.md; the last line printed is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np

from benchmarks.peer_process import ROOT, say

TOKEN = "benchmark"
WAIT_SECONDS = 300.0
WAYS = ("flight", "tcp", "unix")
DIM = 16
KEYS = 200_000
"""Distinct keys of each table, all of which have rows before anything is timed."""


@dataclass(frozen=True)
class Load:
    """What a client asks for.

    Arguments:
        tables, rows: `rows` of each table.
        pushes: whether each pull is followed by a push of its rows.
        exponent: of the Zipf law that keys are drawn from, as a batch of samples has them; 0 makes all alike.
        batches: different ones, that are asked for by turns.
        sweep: megabytes that the client goes through between requests, in a thread for each of its cores: it costs no
            processor time here, but what caches held is gone, as it is after the computing of a step.
    """

    name: str
    tables: int
    rows: int
    pushes: bool
    exponent: float = 0.0
    batches: int = 8
    sweep: int = 0


LOADS = (Load("step", 26, 250, pushes=True), Load("small", 1, 32, pushes=False))


class Process:
    """A process that answers over a pipe; ended with the benchmark."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")  # all import the same, so that happens once
        context.set_forkserver_preload(
            ["deeprec_spark.runtime.remote_store", "deeprec_spark.embedding.local_store"]
        )
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        """Ask."""
        self._pipe.send(message)

    def receive(self) -> Any:
        """The answer; a RuntimeError if there is none in time."""
        if not self._pipe.poll(WAIT_SECONDS):
            raise RuntimeError(
                f"A process of the benchmark is silent. Received: nothing in {WAIT_SECONDS:.0f} s"
            )
        return self._pipe.recv()

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(20)


@dataclass(frozen=True)
class Done:
    """What a client got done in a time, and the processor seconds that this took of its own."""

    requests: int = 0
    rows: int = 0
    seconds: float = 0.0


def serve(pipe: Pipe, way: str, cores: set[int], clients: int = 64) -> None:
    """A server's process for clients of ranks 1 to `clients`: its address, then its CPU seconds whenever asked."""
    os.sched_setaffinity(0, cores)
    import deeprec_spark.embedding._core as core
    from deeprec_spark.embedding.local_store import LocalStore
    from deeprec_spark.runtime.channel_server import ChannelServer
    from deeprec_spark.runtime.server import ParameterServer, ServerOptions
    from deeprec_spark.runtime.transport import MessageServer

    core.set_num_threads(len(cores))
    service = ParameterServer(LocalStore(), ServerOptions(1, clients))
    kind = MessageServer if way == "flight" else ChannelServer
    server = kind(service.handlers(), host="127.0.0.1", token=TOKEN)
    pipe.send(server.address)
    try:
        while pipe.recv() == "cpu":
            pipe.send(time.process_time())
    except EOFError:
        pass
    server.stop()


def drive(pipe: Pipe, way: str, address: str, number: int, cores: set[int]) -> None:
    """A client's process: for each load that it is sent, what it got done in a time."""
    os.sched_setaffinity(0, cores)
    from deeprec_spark.runtime.channel import Channel
    from deeprec_spark.runtime.loopback import Caller
    from deeprec_spark.runtime.transport import Connection

    flight = way == "flight"
    caller: Caller = (
        Connection(address, token=TOKEN) if flight else Channel(address, token=TOKEN, local=way == "unix")
    )
    store = _store(address, caller, rank=number + 1)
    random = np.random.default_rng(number)
    pipe.send("ready")
    try:
        while True:
            load, seconds = pipe.recv()
            if seconds == 0:
                _fill(store, load)
                pipe.send(Done())
                continue
            batches = [requests_of(load, random) for _ in range(load.batches)]
            pipe.send("prepared")
            pipe.recv()  # once all are
            pipe.send(_work(store, load, batches, time.monotonic() + seconds))
    except EOFError:
        store.close()


def _store(address: str, caller: Any, rank: int) -> Any:
    from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions

    return RemoteStore([address], RemoteStoreOptions(TOKEN, rank=rank, retry_seconds=60.0), {0: caller})


def _fill(store: Any, load: Load) -> None:
    """Make the tables and all their rows."""
    from deeprec_spark.embedding.optimizers import Adagrad
    from deeprec_spark.embedding.store import PullRequest, TableSpec, UniqueKeys

    names = [f"t{index}" for index in range(load.tables)]
    store.create_tables([TableSpec(name, DIM, optimizer=Adagrad(0.01)) for name in names])
    keys = UniqueKeys(np.arange(KEYS), np.ones(KEYS, np.int64))
    for name in names:
        store.pull(PullRequest({name: keys}, dense=False))


@functools.cache
def _cumulative(exponent: float) -> Any:
    return np.cumsum(np.arange(1, KEYS + 1, dtype=np.float64) ** -exponent)


def draw_keys(load: Load, random: np.random.Generator) -> Any:
    """Distinct keys of one table for one request: int64 [rows]."""
    if not load.exponent:
        return np.sort(random.choice(KEYS, load.rows, replace=False))
    cumulative = _cumulative(load.exponent)
    found = np.empty(0, np.int64)
    while len(found) < load.rows:
        drawn = np.searchsorted(cumulative, random.random(4 * load.rows) * cumulative[-1])
        found = np.concatenate([found, drawn])
        _, first = np.unique(found, return_index=True)
        found = found[np.sort(first)]
    return found[: load.rows]


def requests_of(load: Load, random: np.random.Generator) -> tuple[Any, Any]:
    from deeprec_spark.embedding.store import PullRequest, PushRequest, SparseGradient, UniqueKeys

    keys = {f"t{index}": draw_keys(load, random) for index in range(load.tables)}
    ones = np.ones(load.rows, np.int64)
    gradient = random.normal(size=(load.rows, DIM)).astype(np.float32)
    return (
        PullRequest({name: UniqueKeys(part, ones) for name, part in keys.items()}, dense=False),
        PushRequest({name: SparseGradient(part, gradient) for name, part in keys.items()}, None, None, 1),
    )


def _work(store: Any, load: Load, batches: Sequence[tuple[Any, Any]], end: float) -> Done:
    requests, used = 0, 0.0
    cores = len(os.sched_getaffinity(0))
    swept = [np.zeros(load.sweep * 2**17 // cores) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as threads:
        while time.monotonic() < end:
            pull, push = batches[requests % len(batches)]
            for call, request in ((store.pull, pull), (store.push, push))[: 1 + load.pushes]:
                if load.sweep:
                    list(threads.map(lambda part: np.add(part, 1.0, out=part), swept))
                began = time.process_time()
                call(request)
                used += time.process_time() - began
                requests += 1
    return Done(requests, requests * load.tables * load.rows, used)


@dataclass
class Result:
    """One way at one number of clients under one load."""

    way: str
    load: str
    clients: int
    requests: list[float] = field(default_factory=list)  # a second, by round
    rows: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Medians."""
        return {
            "requests_per_s": round(float(np.median(self.requests)), 1),
            "rows_per_s": round(float(np.median(self.rows))),
            "server_busy": round(float(np.median(self.busy)), 3),
        }


def measure(ways: Sequence[str], numbers: Sequence[int], seconds: float, rounds: int) -> list[Result]:
    """Every way with every number of clients, by turns."""
    everything = sorted(os.sched_getaffinity(0))
    server_cores, client_cores = set(everything[:1]), set(everything[1:] or everything)
    results: list[Result] = []
    for clients in numbers:
        with ExitStack() as stack:
            groups: list[tuple[str, Process, list[Process]]] = []
            for way in ways:
                server = Process(serve, way, server_cores)
                stack.callback(server.close)
                address = server.receive()
                drivers = []
                for number in range(clients):
                    driver = Process(drive, way, address, number, client_cores)
                    stack.callback(driver.close)
                    drivers.append(driver)
                for driver in drivers:
                    driver.receive()
                drivers[0].send((LOADS[0], 0))
                drivers[0].receive()
                groups.append((way, server, drivers))
            for load in LOADS:
                found = [Result(way, load.name, clients) for way in ways]
                for _ in range(rounds + 1):  # the first one warms up
                    for result, (_, server, drivers) in zip(found, groups, strict=True):
                        _time(result, load, server, drivers, seconds)
                for result in found:
                    result.requests, result.rows, result.busy = (
                        result.requests[1:],
                        result.rows[1:],
                        result.busy[1:],
                    )
                    shown = result.summary()
                    say(
                        f"{clients:3} clients, {load.name:5} over {result.way:6}: "
                        f"{shown['requests_per_s']:9,.0f} requests/s, {shown['rows_per_s']:12,.0f} rows/s, "
                        f"server {shown['server_busy']:.0%} busy"
                    )
                results += found
    return results


def _time(result: Result, load: Load, server: Process, drivers: Sequence[Process], seconds: float) -> None:
    elapsed, served, answers = run_for(load, server, drivers, seconds)
    result.busy.append(served / elapsed)
    result.requests.append(sum(answer.requests for answer in answers) / elapsed)
    result.rows.append(sum(answer.rows for answer in answers) / elapsed)


def run_for(
    load: Load, server: Process, drivers: Sequence[Process], seconds: float
) -> tuple[float, float, list[Done]]:
    """All clients at work for some seconds: how long it was, the server's processor seconds, what each got done."""
    for driver in drivers:
        driver.send((load, seconds))
    for driver in drivers:
        driver.receive()
    server.send("cpu")
    before, begin = server.receive(), time.monotonic()
    for driver in drivers:
        driver.send("go")
    answers = [driver.receive() for driver in drivers]
    elapsed = time.monotonic() - begin
    server.send("cpu")
    return elapsed, server.receive() - before, answers


def report(results: Sequence[Result], numbers: Sequence[int], ways: Sequence[str]) -> str:
    """The tables."""
    lines = []
    for load in LOADS:
        lines += [
            f"### {load.name}: {load.tables} tables, {load.rows} rows of each in a request",
            "",
            "| clients | " + " | ".join(f"{way}: requests/s | rows/s | busy" for way in ways) + " |",
            "|---|" + "---|---|---|" * len(ways),
        ]
        for clients in numbers:
            cells = []
            for way in ways:
                [result] = [
                    one for one in results if (one.way, one.load, one.clients) == (way, load.name, clients)
                ]
                shown = result.summary()
                cells.append(
                    f"{shown['requests_per_s']:,.0f} | {shown['rows_per_s']:,.0f} | {shown['server_busy']:.0%}"
                )
            lines.append(f"| {clients} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(results: Sequence[Result], numbers: Sequence[int], ways: Sequence[str]) -> str:
    """An SVG of rows a second over the number of clients, one line for each way."""
    left, top, width, height = 80, 40, 460, 260
    colors = {"flight": "#b0b0b0", "tcp": "#ff7f0e", "unix": "#1f77b4"}
    curves = {
        way: [
            next(one for one in results if (one.way, one.load, one.clients) == (way, "step", clients))
            for clients in numbers
        ]
        for way in ways
    }
    highest = max(one.summary()["rows_per_s"] for curve in curves.values() for one in curve)
    step = width / max(1, len(numbers) - 1)
    parts = [
        f'<text x="{left + index * step:.0f}" y="{top + height + 20}" text-anchor="middle">{clients}</text>'
        for index, clients in enumerate(numbers)
    ]
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        parts.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>'
            f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{highest * share / 1e6:.1f} M</text>'
        )
    for position, (way, curve) in enumerate(curves.items()):
        points = " ".join(
            f"{left + index * step:.0f},{top + height * (1 - one.summary()['rows_per_s'] / highest):.0f}"
            for index, one in enumerate(curve)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colors[way]}" stroke-width="2.5"/>'
            f'<text x="{left + width + 12}" y="{top + 18 + 20 * position}" fill="{colors[way]}">{way}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{top + height + 50}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="22" font-weight="bold">Rows a second of one server core, by client processes</text>'
        f"{''.join(parts)}</svg>\n"
    )


def write_docs(tables: str, picture: str, arguments: argparse.Namespace) -> None:
    """docs/benchmarks/server.md below its marker, which what is written by hand stands before, and the plot."""
    page = ROOT / "docs" / "benchmarks" / "server.md"
    marker = "<!-- measured -->"
    before = page.read_text().split(marker)[0] if page.exists() else "# One server core\n\n"
    page.write_text(
        f"{before}{marker}\n\n`python -m benchmarks.server` on {os.cpu_count()} cores, Python "
        f"{platform.python_version()}: the server on one of them, all clients on the rest. Medians of "
        f"{arguments.rounds} alternating rounds of {arguments.seconds:g} s.\n\n![](server.svg)\n\n{tables}"
    )
    page.with_suffix(".svg").write_text(picture)


def result_line(results: Sequence[Result]) -> Mapping[str, Any]:
    """What the last line holds."""
    return {
        "benchmark": "server",
        "cores": os.cpu_count(),
        "results": [
            {"way": one.way, "load": one.load, "clients": one.clients, **one.summary()} for one in results
        ],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", default="1,2,4,8,16,32", help="numbers of client processes")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-docs", action="store_true", help="do not write docs/benchmarks/")
    arguments = parser.parse_args()
    ways = arguments.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"ways must be of {', '.join(WAYS)}. Received: {', '.join(unknown)}")
    numbers = [int(number) for number in arguments.clients.split(",")]
    results = measure(ways, numbers, arguments.seconds, arguments.rounds)
    tables = report(results, numbers, ways)
    say(tables)
    if not arguments.no_docs:
        write_docs(tables, plot(results, numbers, ways), arguments)
    say("RESULT " + json.dumps(result_line(results)))


if __name__ == "__main__":
    main()
