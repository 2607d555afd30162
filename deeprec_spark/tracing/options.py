"""Options of what a fit writes about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TracingOptions:
    """What a fit writes beside its log: TensorBoard's event files, a Chrome trace, a page with the report.

    Args:
        log_dir: path or URI of a folder; None is `tracing` in model_dir.
        tensorboard: write scalars of each worker and server.
        trace_steps: steps of each worker that `trace.json` shows, the last ones; 0 writes no trace.
        sample_every: of how many steps the trace shows one.
        interval_secs: how often nodes are asked, and scalars written.
    """

    log_dir: str | None = None
    tensorboard: bool = True
    trace_steps: int = 200
    sample_every: int = 1
    interval_secs: float = 10.0

    def __post_init__(self) -> None:
        if self.trace_steps < 0:
            raise ValueError(f"trace_steps must not be negative. Received: trace_steps={self.trace_steps}")
        if self.sample_every < 1:
            raise ValueError(f"sample_every must be at least 1. Received: sample_every={self.sample_every}")
        if self.interval_secs <= 0:
            raise ValueError(f"interval_secs must be above 0. Received: interval_secs={self.interval_secs}")
