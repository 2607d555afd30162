"""SpanRing: the last spans of one node, in bounded memory."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
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
    """How many spans a node keeps, and of how many it keeps one; it keeps none at a capacity of 0."""

    capacity: int = 0
    sample_every: int = 1


class SpanRing:
    """Keeps the last spans of those that are sampled: each `sample_every`-th of every name. Safe from many threads.

    Example:
        >>> ring = SpanRing(TraceBounds(capacity=2))
        >>> for number in range(1, 4):
        ...     ring.add("pull", "main", float(number), 0.5, number)
        >>> [span.number for span in ring.drain()]
        [2, 3]
    """

    def __init__(self, bounds: TraceBounds | None = None) -> None:
        self.configure(bounds or TraceBounds())

    def configure(self, bounds: TraceBounds) -> None:
        """Keep so many spans from now on; what is kept stays where nothing changes."""
        if bounds != getattr(self, "_bounds", None):
            self._bounds = bounds
            # Appending to and popping from a deque are atomic.
            self._spans: deque[Span] = deque(maxlen=bounds.capacity)

    @property
    def keeps(self) -> bool:
        """Whether any span is kept."""
        return self._bounds.capacity > 0

    def __len__(self) -> int:
        """How many spans are kept."""
        return len(self._spans)

    def add(self, name: str, thread: str, start: float, seconds: float, number: int) -> None:
        """Keep a span, unless it is not sampled; the oldest one makes room."""
        if number % self._bounds.sample_every == 0:
            self._spans.append(Span(name, thread, start, seconds, number))

    def drain(self) -> list[Span]:
        """The spans that are kept, oldest first; they are kept no more."""
        spans = self._spans
        return [spans.popleft() for _ in range(len(spans))]


def encode_spans(spans: Sequence[Span]) -> bytes:
    """Spans as bytes for `decode_spans`."""
    return json.dumps(spans, separators=(",", ":")).encode()


def decode_spans(data: bytes) -> list[Span]:
    """The spans that `encode_spans` wrote; a ValueError where the bytes are no spans."""
    if not data:
        return []
    try:
        found = [Span(*entry) for entry in json.loads(data)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"These bytes hold no spans: {error}. Received: {data[:100]!r}") from error
    for span in found:
        if not (isinstance(span.start, float) and isinstance(span.seconds, float)):
            raise ValueError(f"A span has numbers for its times. Received: {span}")
    return found
