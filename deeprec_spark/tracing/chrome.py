"""JobTrace: the spans of all nodes on one clock, as a file for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deeprec_spark.tracing.spans import Span, TraceBounds
from deeprec_spark.tracing.stages import STAGES

MAX_SPANS = 200_000
"""Spans of a job that the driver keeps, some 40 MB: each node has its share."""

_SPANS_OF_A_STEP = len(STAGES) + 3
_DRIVER = -1


class JobTrace:
    """Collects what nodes tell, keeps the last spans of each, and writes them as one file.

    Args:
        num_ps, num_workers: ranks below num_ps are servers.
        steps: how many steps of each worker to keep.
        sample_every: of how many steps one is kept.

    Example:
        >>> trace = JobTrace(num_ps=1, num_workers=2, steps=100)
        >>> trace.add(1, spans, offset=0.25)
        >>> trace.write(Path("trace.json"))
    """

    def __init__(self, num_ps: int, num_workers: int, steps: int, sample_every: int = 1) -> None:
        self._num_ps = num_ps
        share = MAX_SPANS // (num_ps + num_workers + 1)
        # A server has a pull and a push of each worker in a step.
        wanted = steps * max(_SPANS_OF_A_STEP, 2 * num_workers if num_ps else 0)
        self.bounds = TraceBounds(min(wanted, share), sample_every)
        self._origin = time.monotonic()
        self._spans: dict[int, deque[Span]] = {}
        self._uncertainty: dict[int, float] = {}

    def add(self, rank: int, spans: Iterable[Span], offset: float = 0.0, uncertainty: float = 0.0) -> None:
        """Spans of a node, whose clock plus `offset` is the driver's, but for `uncertainty` seconds."""
        kept = self._spans.setdefault(rank, deque(maxlen=self.bounds.capacity))
        kept.extend(span._replace(start=span.start + offset) for span in spans)
        self._uncertainty[rank] = max(uncertainty, self._uncertainty.get(rank, 0.0))

    def driver(self, name: str, start: float, seconds: float, number: int = 1) -> None:
        """A span of the driver's own, on its clock."""
        self.add(_DRIVER, [Span(name, "fit", start, seconds, number)])

    def events(self) -> list[dict[str, Any]]:
        """The trace's events: names of nodes and threads first, then the spans by time, in microseconds."""
        events: list[dict[str, Any]] = []
        spans: list[dict[str, Any]] = []
        for rank, kept in sorted(self._spans.items()):
            process = rank + 1
            events.append(_named("process_name", process, 0, {"name": self._name(rank)}))
            events.append(_named("process_sort_index", process, 0, {"sort_index": process}))
            threads = {name: number for number, name in enumerate(sorted({span.thread for span in kept}), 1)}
            events += [
                _named("thread_name", process, number, {"name": name}) for name, number in threads.items()
            ]
            spans += [
                {
                    "name": span.name,
                    "ph": "X",
                    "pid": process,
                    "tid": threads[span.thread],
                    "ts": round(1e6 * (span.start - self._origin), 1),
                    "dur": round(1e6 * span.seconds, 1),
                    "args": {"number": span.number},
                }
                for span in kept
            ]
        return events + sorted(spans, key=lambda event: event["ts"])

    def write(self, path: Path) -> None:
        """Write the file."""
        whole = {
            "traceEvents": self.events(),
            "displayTimeUnit": "ms",
            "otherData": {
                "clock uncertainty in ms": {
                    self._name(rank): round(1e3 * seconds, 3)
                    for rank, seconds in sorted(self._uncertainty.items())
                },
            },
        }
        path.write_text(json.dumps(whole, separators=(",", ":")), encoding="utf-8")

    def _name(self, rank: int) -> str:
        if rank == _DRIVER:
            return "driver"
        return f"server {rank}" if rank < self._num_ps else f"worker {rank - self._num_ps}"


def _named(kind: str, process: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}
