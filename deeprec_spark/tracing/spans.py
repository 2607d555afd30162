"""SpanRing: the last spans of one node, in bounded memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Something that took time: `start` on the node's monotonic clock, `number` counts spans of its name from 1."""

    name: str
    thread: str
    start: float
    seconds: float
    number: int


@dataclass(frozen=True)
class TraceBounds:
    """How many spans a node keeps, and of how many it keeps one."""

    capacity: int
    sample_every: int = 1


class SpanRing:
    """Keeps the last `capacity` spans that are sampled: each `sample_every`-th of every name. Safe from many threads.

    Example:
        >>> ring = SpanRing(TraceBounds(capacity=2))
        >>> for number in range(1, 4):
        ...     ring.add("pull", "main", float(number), 0.5, number)
        >>> [span.number for span in ring.drain()]
        [2, 3]
    """

    def __init__(self, bounds: TraceBounds) -> None:
        self._every = bounds.sample_every
        # Appending to and popping from a deque are atomic.
        self._spans: deque[Span] = deque(maxlen=bounds.capacity)

    def add(self, name: str, thread: str, start: float, seconds: float, number: int) -> None:
        """Keep a span, unless it is not sampled; the oldest one makes room."""
        if number % self._every == 0:
            self._spans.append(Span(name, thread, start, seconds, number))

    def drain(self) -> list[Span]:
        """The spans that are kept, oldest first; they are kept no more."""
        return [self._spans.popleft() for _ in range(len(self._spans))]
