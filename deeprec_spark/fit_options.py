"""Options of one call of `fit`, and what it tells afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deeprec_spark.runtime.phases import PhaseResult
from deeprec_spark.runtime.semi_sync import SemiSyncReport
from deeprec_spark.saving import SaveRecord
from deeprec_spark.tracing.staleness import Staleness


@dataclass(frozen=True)
class FitOptions:
    """One call of `fit`. `batch_size` is the global batch in sync mode, each worker's own in async mode."""

    epochs: int = 1
    batch_size: int = 32
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_freq: int = 1
    validation_steps: int | None = None
    shuffle: bool = True
    shuffle_rows: int = 0
    seed: int = 0
    verbose: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "validation_freq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1. Received: {name}={getattr(self, name)}")
        if self.shuffle_rows < 0:
            raise ValueError(f"shuffle_rows must not be negative. Received: shuffle_rows={self.shuffle_rows}")
        for name in ("steps_per_epoch", "validation_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be None or at least 1. Received: {name}={value}")
        if not 0 <= self.initial_epoch < self.epochs:
            raise ValueError(
                f"initial_epoch must lie in [0, epochs). Received: initial_epoch={self.initial_epoch}, "
                f"epochs={self.epochs}"
            )


@dataclass
class FitStatistics:
    """What a fit did: rows, steps of the model (updates), and the seconds that its training phases took.

    Rows and steps are those that the model has seen: what was trained again after a failure counts once. `saves` are
    its checkpoints and what each of them cost, `restarts` how often its nodes were started again, `semi_sync` what
    semi-synchronous training cost. `stale_pulls` are steps whose rows were read before the last
    `max_staleness` pushes (at most) of the same worker; `staleness` is how many updates of all workers came between the
    pull and the push of a step (for each worker in `Estimator.report()`).
    """

    rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    restarts: int = 0
    stale_pulls: int = 0
    max_staleness: int = 0
    staleness: Staleness = field(default_factory=Staleness)
    saves: list[SaveRecord] = field(default_factory=list)
    semi_sync: SemiSyncReport = field(default_factory=SemiSyncReport)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def count(self, results: Sequence[PhaseResult]) -> None:
        """Add what the workers tell of a phase of training: its time, its staleness, what waiting has cost."""
        for result in results:
            self.semi_sync.add(SemiSyncReport.from_dict(result.data["semi_sync"]))
            self.stale_pulls += int(result.data["stale_pulls"])
            self.staleness += Staleness.from_dict(result.data["staleness"])
        self.seconds += max((float(result.data["seconds"]) for result in results), default=0.0)

    @property
    def samples_per_second(self) -> float:
        """Trained rows a second, all workers together."""
        return self.rows / self.seconds if self.seconds else 0.0
