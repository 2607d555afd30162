"""What TensorBoard shows of a node: numbers of the time since the last ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deeprec_spark.tracing.report import ShardReport, WorkerReport
from deeprec_spark.tracing.stages import STAGES


def worker_scalars(now: WorkerReport, before: WorkerReport | None) -> dict[str, float]:
    """Milliseconds of each stage in a step, samples a second, and staleness; nothing where no step was taken.

    `staleness/most so far` is of the whole fit, all else of the time since `before`.

    Example:
        >>> worker_scalars(WorkerReport(0, samples=64, steps=2, seconds=0.5), None)["samples per second"]
        128.0
    """
    last = before or WorkerReport(now.worker)
    steps, seconds = now.steps - last.steps, now.seconds - last.seconds
    if steps <= 0 or seconds <= 0:
        return {}
    stages = {stage: now.stages.get(stage, 0.0) - last.stages.get(stage, 0.0) for stage in STAGES}
    counted = now.staleness.steps - last.staleness.steps
    return {
        "samples per second": (now.samples - last.samples) / seconds,
        "ms per step/whole": 1e3 * seconds / steps,
        **{f"ms per step/{stage}": 1e3 * value / steps for stage, value in stages.items()},
        "staleness/mean": (now.staleness.updates - last.staleness.updates) / max(counted, 1),
        "staleness/most so far": float(now.staleness.most),
        "staleness/pulled ahead": (now.stale_pulls - last.stale_pulls) / steps,
    }


def shard_scalars(now: ShardReport, keys_before: int, seconds: float) -> dict[str, float]:
    """A table's rows and memory on a server, and the keys read a second."""
    return {
        f"rows/{now.table}": float(now.rows),
        f"memory MB/{now.table}": now.memory_bytes / 1e6,
        f"keys per second/{now.table}": (now.keys - keys_before) / max(seconds, 1e-9),
    }


def call_scalars(
    now: Mapping[str, Sequence[float]], before: Mapping[str, Sequence[float]], seconds: float
) -> dict[str, float]:
    """For each method of a server: calls a second, and how many were in progress on average."""
    found: dict[str, float] = {}
    for method, (calls, busy) in now.items():
        calls_before, busy_before = before.get(method, (0, 0.0))
        found[f"calls per second/{method}"] = (calls - calls_before) / max(seconds, 1e-9)
        found[f"calls in progress/{method}"] = (busy - busy_before) / max(seconds, 1e-9)
    return found
