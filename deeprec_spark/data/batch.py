"""Batch: the arrays of one training step, as they leave the reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Batch:
    """Feature and label arrays by column name; the first axis of every array is the sample.

    Dense features are float32 `[batch]` (or `[batch, width]`), categorical ones int64 `[batch]`, sequences
    int64 `[batch, max_length]` filled up with the feature's padding value. `sample_weight` is float32
    `[batch]`.
    """

    features: Mapping[str, npt.NDArray[Any]]
    labels: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    sample_weight: npt.NDArray[np.float32] | None = None

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(next(iter(self.features.values())))
