"""A discrete-event simulator of training with parameter servers: throughput from costs, cores and network.

Hosts share their cores among the tasks that run there (processor sharing), which take longer where several processes
take turns. Links send one message after another.
A worker prepares batches in a thread of its own, and takes steps: pull from all servers, compute, push to all servers;
two of them at a time where the pull of one may run ahead of the push of the other.
In async mode each worker goes at its own pace. In sync mode a server has all workers' messages of a step before it
works on them, in one thread, as one task: their rows are merged, and the tables are read or updated once.
Colocated servers are on the workers' hosts, one on each; what a worker sends to its own is no message.

Servers get equal parts of the rows, so where there are many, a few are simulated and stand for all.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmarks.simulated_parts import Action, Clock, Host, Link, Together

Mode = Literal["async", "sync"]
Placement = Literal["separate", "colocated"]
SIMULATED_SERVERS = 2


@dataclass(frozen=True)
class Costs:
    """What a step costs; seconds are those of one core, rows are distinct ones of a batch.

    Arguments:
        samples, rows: of a step of one worker.
        compute: seconds of the model's step and of all else that a step takes; split among `threads` at most.
        threads: how many cores the computing keeps busy.
        prepare: seconds of reading and making ids distinct, in a thread beside the computing.
        client_request, client_row: seconds of a worker for each message to a server, and for each row in a step (pull
            and push together).
        split_part, split_row: seconds of a worker with several servers for each of them, and for each row, in a step.
        server_request, server_row, server_step: seconds of a server for each message, for each row in a step, and for
            the dense parameters and all else in a step (each server has its part).
        server_threads: how many cores the rows of a message keep busy.
        merge_row: instead of `server_row`, where a server merges the rows of several workers.
        embedded_row: seconds for each row in a step where the tables are in the worker.
        embedded_threads: how many cores that keeps busy.
        crowding: how much longer everything takes for each process at work on the host beside the first, as a share.
        spread: how much the seconds of computing differ from step to step: uniformly, up to this share.
        wakeup: seconds from a message's arrival until somebody works on it, cores being free.
        row_bytes, dense_bytes: of one direction.
    """

    samples: int
    rows: float
    compute: float
    threads: float = 2.0
    prepare: float = 0.0
    client_request: float = 0.0
    client_row: float = 0.0
    split_part: float = 0.0
    split_row: float = 0.0
    server_request: float = 0.0
    server_row: float = 0.0
    server_step: float = 0.0
    server_threads: float = 1.0
    merge_row: float = 0.0
    embedded_row: float = 0.0
    embedded_threads: float = 1.0
    crowding: float = 0.0
    wakeup: float = 0.0
    spread: float = 0.0
    row_bytes: float = 64.0
    dense_bytes: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Who trains, and on what.

    Arguments:
        workers, servers, mode: the topology; no server means that the one worker holds the tables.
        placement: "colocated" servers are on the hosts of the workers, one on each.
        staleness: pushes that a worker's pull may run ahead of; None is what a job has by itself: 1 in async mode with
            servers, else 0.
        parallel_steps: steps that a worker computes at the same time, if their rows are there.
        cores: of each host.
        one_host: all nodes share one host, and messages do not go through its links; else a host for each node.
        bandwidth, latency: bytes a second of a host's link in each direction, and seconds of a message under way.
    """

    workers: int = 1
    servers: int = 1
    mode: Mode = "async"
    staleness: int | None = None
    parallel_steps: int = 2
    cores: float = 2.0
    one_host: bool = False
    bandwidth: float = 1.25e9
    latency: float = 1e-4
    placement: Placement = "separate"

    @property
    def own(self) -> int:
        """How many servers are in a worker's own process."""
        return 1 if self.placement == "colocated" else 0

    @property
    def merging(self) -> bool:
        """Whether servers merge the messages of several workers."""
        return self.mode == "sync" and self.workers > 1

    @property
    def ahead(self) -> int:
        """How many pushes a pull may run ahead of."""
        if self.staleness is not None:
            return self.staleness
        return 1 if self.mode == "async" and self.servers else 0


@dataclass(frozen=True)
class Prediction:
    """Samples a second, and how busy what could be the limit was: shares of one.

    `worker_seconds` and `server_seconds` are the processor time of all workers and of all servers for each step of a
    worker.
    `bottleneck` is the busiest of "merging" (the one core of a server that merges workers' messages), "server cores",
    "server link", "worker cores", "worker link"; "waiting" where none is busy for more than four fifths of the time.
    """

    samples_per_s: float
    busy: dict[str, float]
    worker_seconds: float = 0.0
    server_seconds: float = 0.0

    @property
    def bottleneck(self) -> str:
        """What limits the throughput."""
        return self.busiest if self.busy[self.busiest] > 0.8 else "waiting"

    @property
    def busiest(self) -> str:
        """What is at work for most of the time."""
        return max(self.busy, key=lambda name: self.busy[name])


def predict(costs: Costs, cluster: Cluster, steps: int | None = None) -> Prediction:
    """Simulate `steps` steps of each worker; the first third is not counted. None takes fewer for more workers.

    Raises:
        ValueError: no worker, no servers for several workers, or colocated servers that are not one for each worker.
    """
    if cluster.workers < 1 or cluster.servers < 0 or (cluster.servers == 0 and cluster.workers > 1):
        raise ValueError(
            "A cluster needs a worker, and servers where it has several. Received: "
            f"workers={cluster.workers}, servers={cluster.servers}"
        )
    if cluster.own and cluster.servers != cluster.workers:
        raise ValueError(
            "Colocated servers are one for each worker. Received: "
            f"workers={cluster.workers}, servers={cluster.servers}"
        )
    return _Simulation(costs, cluster, steps or min(60, max(9, 2000 // cluster.workers))).run()


class _Simulation:
    def __init__(self, costs: Costs, cluster: Cluster, steps: int) -> None:
        self.costs, self.cluster, self.steps = costs, cluster, steps
        self.clock = clock = Clock()
        alike = not cluster.one_host and not cluster.own
        self.simulated = min(cluster.servers, SIMULATED_SERVERS) if alike else cluster.servers
        if cluster.one_host:
            host = self._host()
            self.server_hosts = [host] * self.simulated
            self.worker_hosts = [host] * cluster.workers
        else:
            self.worker_hosts = [self._host() for _ in range(cluster.workers)]
            self.server_hosts = (
                self.worker_hosts if cluster.own else [self._host() for _ in range(self.simulated)]
            )
        self.replies = [Link(clock, cluster.bandwidth) for _ in range(self.simulated)]
        self.requests = [Link(clock, cluster.bandwidth) for _ in range(self.simulated)]
        self.uplinks = [Link(clock, cluster.bandwidth) for _ in range(cluster.workers)]
        self.downlinks = [Link(clock, cluster.bandwidth) for _ in range(cluster.workers)]
        self.waiting: dict[tuple[int, int, str], list[Action]] = {}
        self.merged = [0.0] * self.simulated  # seconds
        self.workers = [_Worker(self, index) for index in range(cluster.workers)]

    def _host(self) -> Host:
        return Host(self.clock, self.cluster.cores, self.costs.crowding)

    def server_process(self, server: int) -> str:
        """The process in which a server is."""
        return f"worker {server}" if self.cluster.own else f"server {server}"

    def run(self) -> Prediction:
        for worker in self.workers:
            worker.start()
        self.clock.run()
        # While all are at work: from when the last has done a third of its steps until the first has done all.
        first = max(worker.finished[self.steps // 3] for worker in self.workers)
        last = min(worker.finished[-1] for worker in self.workers)
        rate = sum(worker.rate(first, last) for worker in self.workers) * self.costs.samples
        end, cores = self.clock.now, self.cluster.cores
        busy = {
            "merging": max(self.merged, default=0.0) / end,
            "worker cores": max(host.busy for host in self.worker_hosts) / end / cores,
            "worker link": max(link.busy for link in [*self.uplinks, *self.downlinks]) / end,
            "server cores": max((host.busy for host in self.server_hosts), default=0.0) / end / cores,
            "server link": max((link.busy for link in [*self.requests, *self.replies]), default=0.0) / end,
        }
        steps = self.steps * self.cluster.workers
        used: defaultdict[str, float] = defaultdict(float)
        for host in {id(host): host for host in [*self.worker_hosts, *self.server_hosts]}.values():
            for process, seconds in host.used.items():
                used[process.split()[0]] += seconds / steps
        share = self.cluster.servers / max(1, self.simulated)
        return Prediction(rate, busy, used["worker"], used["server"] * share)

    # --- one exchange of a worker with all servers ---

    def exchange(self, worker: int, step: int, kind: str, done: Action) -> None:
        """Rows and dense parameters of a step to all servers (`push`) or from them (`pull`), half of the costs each."""
        costs, servers, own = self.costs, self.cluster.servers, self.cluster.own
        host, process = self.worker_hosts[worker], f"worker {worker}"
        if not servers:
            _in_threads(host, process, costs.rows * costs.embedded_row / 2, costs.embedded_threads, done)
            return
        messages = servers - own
        sent = costs.rows * messages / servers  # rows that leave this process
        client = messages * costs.client_request + sent * costs.client_row / 2
        if servers > 1:
            client += (servers * costs.split_part + costs.rows * costs.split_row) / 2
        size = (costs.rows * costs.row_bytes + costs.dense_bytes) / servers
        keys = costs.rows * 8 / servers
        up, down = (keys, size) if kind == "pull" else (keys + size, 0.0)
        part = servers / self.simulated  # each simulated server stands for so many

        def received() -> None:
            host.work(process, client / 2, done)

        def send() -> None:
            together = Together(self.simulated, received)
            for server in range(self.simulated):
                self._request(worker, server, (step, kind), (up, down), part, together)

        host.work(process, client / 2, send)

    def _request(
        self,
        worker: int,
        server: int,
        what: tuple[int, str],
        sizes: tuple[float, float],
        part: float,
        answered: Action,
    ) -> None:
        up, down = sizes
        costs, latency = self.costs, self.cluster.latency
        near = bool(self.cluster.own) and server == worker

        def reply() -> None:
            # Through the server's link, and then, with those of the other servers, through the worker's.
            if near:
                answered()
                return
            self._through(
                self.replies[server],
                down,
                lambda: self._through(self.downlinks[worker], down * part, answered),
                latency=latency,
            )

        def arrive() -> None:
            if self.cluster.merging:
                self._gather(server, what, reply)
                return
            part = 1 / self.cluster.servers / 2
            host, process = self.server_hosts[server], self.server_process(server)
            request = (0.0 if near else costs.server_request) + costs.server_step * part
            rows = costs.rows * costs.server_row * part
            host.work(
                process,
                request,
                lambda: _in_threads(host, process, rows, costs.server_threads, reply),
            )

        if near:
            arrive()
            return
        self._through(
            self.uplinks[worker],
            up * part,
            lambda: self._through(self.requests[server], up, arrive, pause=costs.wakeup),
            latency=latency,
        )

    def _through(
        self, link: Link, size: float, arrived: Action, *, latency: float = 0.0, pause: float = 0.0
    ) -> None:
        if self.cluster.one_host:
            self.clock.at(self.clock.now + pause, arrived)
        else:
            link.send(size, arrived, latency + pause)

    def _gather(self, server: int, what: tuple[int, str], reply: Action) -> None:
        """Once all workers' messages of this step are there: one task for all of them, then the replies."""
        costs, workers = self.costs, self.cluster.workers
        waiting = self.waiting.setdefault((server, *what), [])
        waiting.append(reply)
        if len(waiting) < workers:
            return
        replies = self.waiting.pop((server, *what))
        shared = (costs.rows * costs.merge_row + costs.server_step) / self.cluster.servers / 2
        seconds = workers * shared + (workers - self.cluster.own) * costs.server_request
        self.merged[server] += seconds

        def merged() -> None:
            for action in replies:
                action()

        self.server_hosts[server].work(self.server_process(server), seconds, merged)


class _Worker:
    """Steps of one worker: computing waits for its pull, and its pull for the push `ahead` + 1 steps before.

    Pushes are in the order of the steps, whichever of those that compute at the same time ends first.
    """

    def __init__(self, simulation: _Simulation, index: int) -> None:
        self._simulation, self._index = simulation, index
        self._random = random.Random(index)
        self._pulled: set[int] = set()
        self._prepared = self._pulls = self._pushed = self._begun = self._computed = 0
        self._preparing = self._exchanging = False
        self._ended: set[int] = set()
        self._to_push: list[int] = []
        self.finished: list[float] = []

    def start(self) -> None:
        """Begin, a little after the workers before this one: they would not be in step by themselves."""
        total = self._simulation.costs.compute / self._simulation.costs.threads
        offset = total * self._index / self._simulation.cluster.workers
        self._simulation.clock.at(0.0 if self._simulation.cluster.mode == "sync" else offset, self._go_on)

    def rate(self, first: float, last: float) -> float:
        """Steps a second between these times, parts of steps included."""
        times = [0.0, *self.finished]

        def done(time: float) -> float:
            index = bisect.bisect_right(times, time) - 1
            if index + 1 == len(times):
                return float(index)
            return index + (time - times[index]) / (times[index + 1] - times[index])

        return (done(last) - done(first)) / (last - first)

    def _go_on(self) -> None:
        """Start whatever may start now."""
        simulation, steps = self._simulation, self._simulation.steps
        host = simulation.worker_hosts[self._index]
        if not self._preparing and self._prepared < min(steps, self._computed + 3):
            self._preparing = True
            host.work(f"worker {self._index}", simulation.costs.prepare, self._on_prepared)
        if not self._exchanging:
            self._exchange()
        while (
            self._begun - self._computed < simulation.cluster.parallel_steps and self._begun in self._pulled
        ):
            step = self._begun
            self._begun += 1
            spread = simulation.costs.spread
            seconds = simulation.costs.compute * (1 + self._random.uniform(-spread, spread))
            process, done = f"worker {self._index}", partial(self._on_computed, step)
            _in_threads(host, process, seconds, simulation.costs.threads, done)

    def _exchange(self) -> None:
        """The next pull, if it may run ahead of the pushes that are missing; else the next push.

        Their order is fixed, as in `StepPipeline`: a pull whose batch is not there yet is waited for.
        """
        simulation = self._simulation
        step = self._pulls
        ahead = step - self._pushed  # steps whose push this pull would run ahead of
        if step < simulation.steps and ahead <= simulation.cluster.ahead:
            if step >= self._prepared:
                return
            self._exchanging = True
            self._pulls += 1
            simulation.exchange(self._index, step, "pull", lambda: self._on_pulled(step))
        elif self._to_push:
            self._exchanging = True
            done = self._to_push.pop(0)
            simulation.exchange(self._index, done, "push", self._on_pushed)

    def _on_prepared(self) -> None:
        self._preparing = False
        self._prepared += 1
        self._go_on()

    def _on_pulled(self, step: int) -> None:
        self._exchanging = False
        self._pulled.add(step)
        self._go_on()

    def _on_computed(self, step: int) -> None:
        self._ended.add(step)
        while self._computed in self._ended:
            self._ended.remove(self._computed)
            self._to_push.append(self._computed)
            self._computed += 1
        self._go_on()

    def _on_pushed(self) -> None:
        self._exchanging = False
        self._pushed += 1
        self.finished.append(self._simulation.clock.now)
        self._go_on()


def _in_threads(host: Host, process: str, seconds: float, threads: float, done: Action) -> None:
    """A task that keeps so many cores busy, where they are free."""
    together = Together(max(1, math.ceil(threads)), done)
    for share in _shares(seconds, threads):
        host.work(process, share, together)


def _shares(seconds: float, threads: float) -> list[float]:
    """Core seconds as tasks for whole threads, the longest of which takes seconds / threads."""
    whole = max(1, math.ceil(threads))
    longest = seconds / max(1.0, threads)
    rest = seconds - longest * (whole - 1)
    return [longest] * (whole - 1) + [max(rest, 0.0)]
