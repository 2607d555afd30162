"""Staleness: how much the model moved on between the pull and the push of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Staleness:
    """Updates of the store between the pull and the push of a step, over any number of steps.

    They are those of other workers, and of the worker itself where its pulls run ahead of its pushes. In a synchronous
    job there are none. Of several servers it is the one with the most updates that is told.

    Attributes:
        steps: steps that are counted.
        updates: their updates in all.
        most: the most of one step.

    Example:
        >>> seen = Staleness().after(pulled=10, pushed=11).after(pulled=10, pushed=14)
        >>> seen.mean, seen.most
        (1.5, 3)
    """

    steps: int = 0
    updates: int = 0
    most: int = 0

    def after(self, *, pulled: int, pushed: int) -> Staleness:
        """With one more step: the store had made `pulled` updates at its pull, and `pushed` with its own at its end."""
        between = pushed - pulled - 1
        return Staleness(self.steps + 1, self.updates + between, max(self.most, between))

    def __add__(self, other: Staleness) -> Staleness:
        """Of two workers, or of two times."""
        return Staleness(self.steps + other.steps, self.updates + other.updates, max(self.most, other.most))

    @property
    def mean(self) -> float:
        """Updates of a step on average."""
        return self.updates / self.steps if self.steps else 0.0

    def to_dict(self) -> dict[str, int]:
        """JSON-able data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Staleness:
        """Read back what `to_dict` gave."""
        return cls(int(data["steps"]), int(data["updates"]), int(data["most"]))
