"""What labels are allowed to be, as the losses of a model say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

LabelKind = Literal["binary", "regression", "multiclass"]


@dataclass(frozen=True)
class LabelKinds:
    """The kinds of a model's labels, by output name where the losses are named, else by position.

    Example:
        >>> LabelKinds(("binary", "regression"), {"click": "binary", "watch": "regression"}).of(["watch", "click"])
        ['regression', 'binary']
    """

    by_position: tuple[LabelKind, ...] = ("regression",)
    by_name: Mapping[str, LabelKind] = field(default_factory=dict)

    def of(self, labels: Sequence[str]) -> list[LabelKind]:
        """One kind for each label column; a single loss counts for all, what no loss says is a regression."""
        if labels and set(labels) <= set(self.by_name):
            return [self.by_name[label] for label in labels]
        if len(self.by_position) == 1:
            return [self.by_position[0]] * len(labels)
        known = list(self.by_position)[: len(labels)]
        return [*known, *["regression"] * (len(labels) - len(known))]  # type: ignore[list-item]  # literals


def check_labels(name: str, values: npt.NDArray[Any], kind: LabelKind) -> None:
    """See that an array holds labels of a kind.

    Raises:
        ValueError: a label is not finite, a binary one is outside [0, 1], or a class number is not whole or below 0.
    """
    numbers = np.asarray(values, np.float64)
    valid = np.isfinite(numbers)
    meaning = "finite"
    if kind == "binary":
        valid &= (numbers >= 0) & (numbers <= 1)
        meaning = "in [0, 1]"
    elif kind == "multiclass":
        valid &= (numbers >= 0) & (numbers == np.floor(numbers))
        meaning = "a class number from 0"
    if not valid.all():
        raise ValueError(
            f"Label {name!r} must be {meaning} in every row. "
            f"Received: {int((~valid).sum())} rows that are not, such as {numbers[~valid].reshape(-1)[0]!r}"
        )
