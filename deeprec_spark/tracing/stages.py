"""StageClock: the seconds that one worker's steps spend in each stage, and the spans of the last ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType

from deeprec_spark.tracing.spans import SpanRing

STAGES = ("read", "prepare", "pull", "compute", "push", "wait")
"""Stages of a step, in order.

`read`: the next batch of the data; `prepare`: its tensors and distinct ids; `pull`, `push`: the store, other workers'
part of a synchronous step included; `compute`: TensorFlow; `wait`: the training thread had nothing to compute, because
a batch or its rows were not there yet, a save held it, or its rows had run out before those of other workers.
"""


class StageClock:
    """Adds up seconds by stage; stages may run in several threads, each of them in one thread at a time.

    Read and prepare run ahead of the step in a thread of their own, so the stages of a step add up to more than its
    time: what delays training of them is in `wait`.

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

    def stage(self, name: str) -> _Timer:
        """A context manager that counts its block for a stage, once it has ended without an error."""
        return self._timers[name]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each stage so far."""
        return {name: timer.seconds for name, timer in self._timers.items()}


class _Timer:
    """Counts one stage; entered by one thread at a time, not within itself."""

    __slots__ = ("_name", "_spans", "_started", "count", "seconds")

    def __init__(self, name: str, spans: SpanRing | None) -> None:
        self._name = name
        self._spans = spans
        self._started = 0.0
        self.seconds = 0.0
        self.count = 0

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        seconds = time.monotonic() - self._started
        self.seconds += seconds
        self.count += 1
        if self._spans is not None and self._spans.keeps:
            self._spans.add(self._name, threading.current_thread().name, self._started, seconds, self.count)
