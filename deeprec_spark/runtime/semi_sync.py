"""Between async and sync: how far workers may drift apart, and how many a synchronous step does not wait for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SemiSyncOptions:
    """One of two ways to bound how much a slow worker costs.

    Args:
        max_staleness: with mode="async": a worker begins a step only if it is at most so many steps ahead of the
            slowest worker that trains. 0: all take their n-th step before anyone takes the next.
        backup_workers: with mode="sync": a step is applied once all workers but so many have pushed. What the others
            push for it is dropped: those samples do not update the model.
        patience_secs: with max_staleness: a worker that has pushed nothing for so long does not hold others up, until
            it pushes again.
    """

    max_staleness: int | None = None
    backup_workers: int = 0
    patience_secs: float = 60.0

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(
                f"max_staleness must not be negative. Received: max_staleness={self.max_staleness}"
            )
        if self.backup_workers < 0:
            raise ValueError(
                f"backup_workers must not be negative. Received: backup_workers={self.backup_workers}"
            )
        if (self.max_staleness is None) == (self.backup_workers == 0):
            raise ValueError(
                "Semi-synchronous training needs max_staleness (mode='async') or backup_workers (mode='sync'), not "
                f"both. Received: max_staleness={self.max_staleness}, backup_workers={self.backup_workers}"
            )
        if not 0 < self.patience_secs < math.inf:
            raise ValueError(
                f"patience_secs must be a positive number. Received: patience_secs={self.patience_secs}"
            )

    def check(self, mode: str, num_workers: int) -> None:
        """ValueError unless these fit a job's mode and size."""
        if self.max_staleness is not None and mode != "async":
            raise ValueError(
                "max_staleness bounds asynchronous workers; in sync mode none is ahead of another: set "
                f"mode='async', or backup_workers. Received: mode={mode!r}, max_staleness={self.max_staleness}"
            )
        if self.backup_workers and mode != "sync":
            raise ValueError(
                "backup_workers are those that a synchronous step does not wait for: set mode='sync', or "
                f"max_staleness. Received: mode={mode!r}, backup_workers={self.backup_workers}"
            )
        if self.backup_workers >= num_workers:
            raise ValueError(
                "A step needs at least one worker beside the backup workers. "
                f"Received: backup_workers={self.backup_workers}, num_workers={num_workers}"
            )


@dataclass
class SemiSyncReport:
    """What semi-synchronous training cost; of one worker's phase, or of a whole fit.

    Attributes:
        max_lead: the most steps by which a worker was ahead of the slowest one when it began a step.
        waits, wait_seconds: how often workers waited for the slowest one, and for how long together.
        left_out: by rank, how often others went on without a worker that had pushed nothing for patience_secs.
        dropped_steps, dropped_samples: by rank, what did not update the model, because the step was over before.
    """

    max_lead: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    left_out: dict[int, int] = field(default_factory=dict)
    dropped_steps: dict[int, int] = field(default_factory=dict)
    dropped_samples: dict[int, int] = field(default_factory=dict)

    def add(self, other: SemiSyncReport) -> None:
        """Count what another one counted, too."""
        self.max_lead = max(self.max_lead, other.max_lead)
        self.waits += other.waits
        self.wait_seconds += other.wait_seconds
        for name in ("left_out", "dropped_steps", "dropped_samples"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for rank, count in theirs.items():
                mine[rank] = mine.get(rank, 0) + count

    def drop(self, rank: int, samples: int) -> None:
        """A step of this worker did not update the model."""
        self.add(SemiSyncReport(dropped_steps={rank: 1}, dropped_samples={rank: samples}))

    def to_dict(self) -> dict[str, Any]:
        """JSON values; JSON has no integer keys."""
        return {
            "max_lead": self.max_lead,
            "waits": self.waits,
            "wait_seconds": self.wait_seconds,
            **{name: list(map(list, getattr(self, name).items())) for name in _BY_RANK},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SemiSyncReport:
        """Read back what `to_dict` gave."""
        by_rank = {name: {int(rank): int(count) for rank, count in data[name]} for name in _BY_RANK}
        return cls(data["max_lead"], data["waits"], data["wait_seconds"], **by_rank)

    def describe(self, options: SemiSyncOptions) -> str:
        """One line for the end of a fit."""
        if options.max_staleness is not None:
            text = (
                f"workers were at most {self.max_lead} steps ahead of the slowest (max_staleness="
                f"{options.max_staleness}); they waited {self.waits} times, {self.wait_seconds:.1f} s together"
            )
            return text + (f"; left out: {_counts(self.left_out)}" if self.left_out else "")
        steps, samples = sum(self.dropped_steps.values()), sum(self.dropped_samples.values())
        text = f"{steps} late steps with {samples} samples did not update the model"
        return text + (f": steps by worker: {_counts(self.dropped_steps)}" if steps else "")


_BY_RANK = ("left_out", "dropped_steps", "dropped_samples")


def _counts(by_rank: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank}: {count}" for rank, count in sorted(by_rank.items()))
