"""Contestants timed in turns: settings tried, processes warmed up, rounds in alternation."""

from __future__ import annotations

import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from benchmarks.contestants import Peer
from benchmarks.peer_process import PeerProcess, say


@dataclass(frozen=True)
class ContestOptions:
    """How long and how often.

    Arguments:
        seconds: of each contestant in each round, about.
        warmup: seconds before its first round.
        trial: seconds for each of its settings; 0 takes its last ones untried.
        rounds: of all contestants in turns.
        fresh: a new process for each contestant and round, so that one at a time needs memory; else all stay.
    """

    seconds: float = 5.0
    warmup: float = 6.0
    trial: float = 2.0
    rounds: int = 5
    fresh: bool = False


@dataclass
class Measurement:
    """What one contestant did."""

    peer: Peer
    python: str
    settings: Mapping[str, Any]
    version: str = ""
    trials: list[tuple[Mapping[str, Any], float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median samples a second over the rounds."""
        return statistics.median(self.rates)


Contestant = TypeVar("Contestant", Peer, Measurement)


class Contest:
    """One comparison on one set of batches.

    Arguments:
        data: the file of batches.
        batch: samples of a step.
        options: see ContestOptions.
    """

    def __init__(self, data: Path, batch: int, options: ContestOptions) -> None:
        self._data, self._batch, self._options = data, batch, options

    def run(self, contestants: Sequence[Peer]) -> list[Measurement]:
        """Try all settings, then time everybody in turns. Who fails is told, and left out.

        Raises:
            RuntimeError: all contestants failed; with the end of the last one's log.
        """
        with ExitStack() as stack:
            self._log: IO[str] = stack.enter_context(
                tempfile.NamedTemporaryFile("w", prefix="benchmark-", suffix=".log", delete=False)
            )
            measured = self._those_that_can(contestants, self._prepared)
            play = self._fresh
            processes: dict[str, tuple[PeerProcess, float]] = {}
            if not self._options.fresh:
                # Called after the pool has ended: whoever was started but not asked yet must not stay behind, stopped.
                starts: dict[str, Future[PeerProcess]] = {}
                stack.callback(_end_all, starts)
                # Imports, virtual machines and clusters start at the same time: much of it is waiting.
                pool = stack.enter_context(ThreadPoolExecutor(len(measured)))
                starts.update((result.peer.name, pool.submit(self._start, result)) for result in measured)

                def enter(result: Measurement) -> Measurement:
                    process = stack.enter_context(starts[result.peer.name].result())
                    processes[result.peer.name] = process, self._warmed_up(result, process)
                    return result

                measured = self._those_that_can(measured, enter)

                def play(result: Measurement) -> Measurement:
                    process, rate = processes[result.peer.name]
                    return self._round(result, process, result.rates[-1] if result.rates else rate)

            for number in range(self._options.rounds):
                try:
                    measured = self._those_that_can(measured, play)
                except SystemExit:
                    if not all(result.rates for result in measured):
                        raise
                    say(f"told to end in round {number + 1}: the figures are those so far")
                    for process, _ in processes.values():
                        process.kill()
                    break
                rates = ", ".join(f"{result.peer.name} {result.rates[-1]:,.0f}" for result in measured)
                say(f"round {number + 1}/{self._options.rounds}: {rates} samples/s")
        return measured

    def _those_that_can(
        self, ones: Sequence[Contestant], act: Callable[[Contestant], Measurement]
    ) -> list[Measurement]:
        """What `act` makes of each one; a failure is told, and raised if nobody is left."""
        left, failure = [], RuntimeError("There are no contestants. Received: an empty list")
        for one in ones:
            try:
                left.append(act(one))
            except (RuntimeError, subprocess.SubprocessError) as error:  # noqa: PERF203  # each has its chance
                say(f"  {one.peer.name if isinstance(one, Measurement) else one.name} fails: {error}")
                failure = RuntimeError(str(error))
        if not left:
            raise failure
        return left

    def _prepared(self, peer: Peer) -> Measurement:
        """Make its environment, and choose the fastest of its settings."""
        result = Measurement(peer, peer.python(), peer.settings[-1])
        if not self._options.trial or len(peer.settings) == 1:
            return result
        for settings in peer.settings:
            try:
                with peer.start(result.python, self._data, settings, self._log) as process:
                    rate, _ = self._timed(process, self._first_rate(process), self._options.trial)
            except RuntimeError as error:
                say(f"  {peer.name} {dict(settings)}: fails ({str(error).splitlines()[0]})")
                continue
            say(f"  {peer.name} {dict(settings)}: {rate:,.0f} samples/s")
            result.trials.append((settings, rate))
        if not result.trials:
            raise RuntimeError(
                f"No setting of peer {peer.name} runs; see {self._log.name}. Received: settings {peer.settings}"
            )
        result.settings = max(result.trials, key=lambda trial: trial[1])[0]
        return result

    def _start(self, result: Measurement) -> PeerProcess:
        return result.peer.start(result.python, self._data, result.settings, self._log)

    def _warmed_up(self, result: Measurement, process: PeerProcess) -> float:
        """Train for the warm-up; the rate there."""
        result.version = process.ready["version"]
        return self._timed(process, self._first_rate(process), self._options.warmup)[0]

    def _fresh(self, result: Measurement) -> Measurement:
        with self._start(result) as process:
            return self._round(result, process, self._warmed_up(result, process))

    def _round(self, result: Measurement, process: PeerProcess, rate: float) -> Measurement:
        measured, loss = self._timed(process, rate, self._options.seconds)
        result.rates.append(measured)
        result.losses.append(loss)
        return result

    def _first_rate(self, process: PeerProcess) -> float:
        """Samples a second after compilation, roughly."""
        process.ask({"steps": 3})
        return self._timed(process, self._batch * 4.0, 1.0)[0]

    def _timed(self, process: PeerProcess, rate: float, seconds: float) -> tuple[float, float]:
        """Samples a second and loss over about so many seconds."""
        steps = max(4, math.ceil(seconds * rate / self._batch))
        reply = process.ask({"steps": steps})
        return reply["steps"] * self._batch / reply["seconds"], reply["loss"]


def _end_all(starts: Mapping[str, Future[PeerProcess]]) -> None:
    for start in starts.values():
        if not start.cancelled() and start.exception() is None:
            start.result().kill()
            start.result().close()
