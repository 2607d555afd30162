"""What the scale simulator is made of: events in order of time, hosts that share cores, links that queue messages."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """The queue of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time: float, action: Action) -> None:
        """Call `action` then; in order of time, then of these calls."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


class Host:
    """Cores that are shared equally by all tasks, each of which keeps one busy at most.

    Tasks of several processes take each other's place in the caches: all of them take longer by the share `crowding`
    for each process at work beside the first.
    """

    def __init__(self, clock: Clock, cores: float, crowding: float = 0.0) -> None:
        self._clock, self._cores, self._crowding = clock, cores, crowding
        self._served = 0.0  # seconds that each task present since the beginning would have had
        self._changed = 0.0
        self._tasks: list[tuple[float, int, str, Action]] = []
        self._processes: Counter[str] = Counter()  # tasks of each
        self._count = self._version = 0
        self.used: dict[str, float] = {}  # core seconds of each process

    @property
    def busy(self) -> float:
        """Core seconds of all processes."""
        return sum(self.used.values())

    def work(self, process: str, seconds: float, done: Action) -> None:
        """Start a task of `process`, which takes so many seconds of a core if no other process is at work."""
        self._advance()
        self._count += 1
        self._processes[process] += 1
        heapq.heappush(self._tasks, (self._served + seconds, self._count, process, done))
        self._schedule()

    def _share(self) -> float:
        """Of a core, for each task."""
        return min(1.0, self._cores / len(self._tasks)) if self._tasks else 0.0

    def _rate(self) -> float:
        return self._share() / (1.0 + self._crowding * max(0, len(self._processes) - 1))

    def _advance(self) -> None:
        passed = self._clock.now - self._changed
        self._served += passed * self._rate()
        for process, tasks in self._processes.items():
            self.used[process] = self.used.get(process, 0.0) + passed * self._share() * tasks
        self._changed = self._clock.now

    def _schedule(self) -> None:
        self._version += 1
        if self._tasks:
            version = self._version
            left = max(0.0, self._tasks[0][0] - self._served) / self._rate()
            self._clock.at(self._clock.now + left, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        _, _, process, done = heapq.heappop(self._tasks)
        self._processes[process] -= 1
        if not self._processes[process]:
            del self._processes[process]
        self._schedule()
        done()


class Link:
    """One direction of a host's network: messages go one after another."""

    def __init__(self, clock: Clock, bandwidth: float) -> None:
        self._clock, self._bandwidth = clock, bandwidth
        self._free = 0.0
        self.busy = 0.0

    def send(self, size: float, arrived: Action, latency: float) -> None:
        """Send a message; `arrived` is called `latency` seconds after its last byte."""
        seconds = size / self._bandwidth
        self.busy += seconds
        self._free = max(self._free, self._clock.now) + seconds
        self._clock.at(self._free + latency, arrived)


class Together:
    """Calls an action when `count` parts are done."""

    def __init__(self, count: int, action: Action) -> None:
        self._left, self._action = count, action

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()
