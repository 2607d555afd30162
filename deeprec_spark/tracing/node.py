"""NodeObserver: what one node tells of itself when the driver asks."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from deeprec_spark.runtime.errors import JobError
from deeprec_spark.tracing.spans import Span, SpanRing, TraceBounds, encode_spans

logger = logging.getLogger(__name__)

Given = TypeVar("Given")
Answer = TypeVar("Answer")

_CLOCK_TRIES = 5


class NodeObserver:
    """Counts a node's handled calls, keeps its spans, and answers the driver's order `observe`.

    Args:
        ask_clock: asks the driver for its monotonic clock.

    Example:
        >>> observer = NodeObserver(client.clock)
        >>> observer.tables = store.statistics
        >>> server = MessageServer(observer.timed(service.handlers()), …)
    """

    def __init__(self, ask_clock: Callable[[], float]) -> None:
        self._ask_clock = ask_clock
        self.tables: Callable[[], Mapping[str, Mapping[str, Any]]] | None = None
        """The counters of the node's tables, where it holds some."""
        self.spans = SpanRing()
        self._lock = threading.Lock()
        self._calls: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    def timed(
        self, handlers: Mapping[str, Callable[[Given], Answer]]
    ) -> dict[str, Callable[[Given], Answer]]:
        """The handlers, each call counted and timed; waiting for other ranks is part of a call."""
        return {method: self._timed(method, handler) for method, handler in handlers.items()}

    def observe(self, payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        """Counters, and the spans since the last time; `payload["trace"]` says which spans to keep from now on.

        What cannot be told now is left out: no error of it may end the training that it tells of. Without the driver's
        clock spans wait for the next time.
        """
        data: dict[str, Any] = {
            "calls": {method: list(counts) for method, counts in list(self._calls.items())}
        }
        if self.tables is not None:
            try:
                data["tables"] = self.tables()
            except Exception:  # whatever the store's trouble is, its calls raise it where it matters
                logger.warning("The tables' counters cannot be told", exc_info=True)
        spans: list[Span] = []
        if self.spans:
            try:
                data["offset"], data["uncertainty"] = clock_offset(self._ask_clock)
            except (JobError, TimeoutError, OSError) as error:
                logger.warning("Spans are told later, since the driver's clock is not known: %s", error)
            else:
                spans = self.spans.drain()
        self.spans.configure(TraceBounds(**payload.get("trace") or {}))
        return data, encode_spans(spans) if spans else b""

    def _timed(self, method: str, handler: Callable[[Given], Answer]) -> Callable[[Given], Answer]:
        numbers = itertools.count(1)

        def call(given: Given) -> Answer:
            started = time.monotonic()
            answer = handler(given)
            seconds = time.monotonic() - started
            with self._lock:
                counts = self._calls[method]
                counts[0] += 1
                counts[1] += seconds
            if self.spans.keeps:
                self.spans.add(method, threading.current_thread().name, started, seconds, next(numbers))
            return answer

        return call


def clock_offset(
    ask: Callable[[], float], clock: Callable[[], float] = time.monotonic, tries: int = _CLOCK_TRIES
) -> tuple[float, float]:
    """What to add to this host's clock to get the one that `ask` reads, and how wrong that may be, in seconds.

    The answer of the fastest of a few calls is taken to be of their middle.
    """
    best: tuple[float, float] | None = None
    for _ in range(tries):
        sent = clock()
        there = ask()
        back = clock()
        found = ((back - sent) / 2, there - (sent + back) / 2)
        best = found if best is None or found < best else best
    assert best is not None  # tries is at least 1
    return best[1], best[0]
