"""StageClock: the seconds that one worker's steps spend in each stage, and the spans of the last ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType

from deeprec_spark.tracing.spans import SpanRing

STAGES = ("read", "prepare", "pull", "compute", "measure", "push", "wait")
"""Stages of a step, in order.

`read`: the next batch of the data; `prepare`: its tensors and distinct ids; `pull`, `push`: the store, other workers'
part of a synchronous step included, and steps that a worker takes part in when its rows have run out before those of
others; `compute`: TensorFlow's loss and gradients; `measure`: its metrics; `wait`: there was nothing to compute,
because a batch or its rows were not there yet, or a save held the worker.
"""


class StageClock:
    """Adds up seconds by stage, of any number of threads.

    Read and prepare run ahead of the step in a thread of their own, and steps may compute side by side, so the stages
    of a step add up to more than its time: what delays training of them is in `wait`.

    Args:
        spans: where single spans are kept for a trace, if they are.

    Example:
        >>> clock = StageClock()
        >>> with clock.stage("pull"):
        ...     rows = store.pull(request)
        >>> clock.seconds["pull"] > 0
        True
    """

    def __init__(self, spans: SpanRing | None = None) -> None:
        self.spans = spans
        self._timers = {name: _Timer(name, spans) for name in STAGES}

    def stage(self, name: str) -> _Interval:
        """A context manager that counts its block for a stage, once it has ended without an error."""
        return _Interval(self._timers[name])

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each stage so far."""
        return {name: timer.seconds for name, timer in self._timers.items()}


class _Timer:
    """Counts one stage."""

    __slots__ = ("_lock", "_name", "_spans", "count", "seconds")

    def __init__(self, name: str, spans: SpanRing | None) -> None:
        self._name = name
        self._spans = spans
        self._lock = threading.Lock()
        self.seconds = 0.0
        self.count = 0

    def add(self, started: float) -> None:
        """Count what began then and ends now."""
        seconds = time.monotonic() - started
        with self._lock:
            self.seconds += seconds
            self.count += 1
            number = self.count
        if self._spans is not None and self._spans.keeps:
            self._spans.add(self._name, threading.current_thread().name, started, seconds, number)


class _Interval:
    """One block of a stage."""

    __slots__ = ("_started", "_timer")

    def __init__(self, timer: _Timer) -> None:
        self._timer = timer
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._timer.add(self._started)
