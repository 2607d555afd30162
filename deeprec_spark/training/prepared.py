"""A batch on its way through a step: tensors of its parts, and the distinct keys that it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.store import UniqueKeys
from deeprec_spark.training.lookups import Lookups


@dataclass(frozen=True)
class PreparedPart:
    """The tensors of a part of a batch, and how its ids spread over the distinct keys of the batch."""

    columns: Sequence[Any]
    labels: Sequence[Any]
    weight: Sequence[Any]
    lookups: Lookups
    size: int


@dataclass(frozen=True)
class PreparedBatch:
    """A batch and its parts: one, unless `DenseStepOptions.micro_batch` asks for more."""

    batch: Batch
    parts: Sequence[PreparedPart]

    @property
    def keys(self) -> Mapping[str, UniqueKeys]:
        """The distinct keys of the batch by table."""
        return self.parts[0].lookups.keys

    @property
    def weighted(self) -> bool:
        """Whether it has sample weights."""
        return bool(self.parts[0].weight)


def split_batch(batch: Batch, max_samples: int | None) -> list[Batch]:
    """Parts of about equal size, of at most so many samples; groups stay whole, one that has more is a part of its own.

    Example:
        >>> [part.size for part in split_batch(Batch({"id": np.arange(10)}), 4)]
        [3, 3, 4]
    """
    if max_samples is None or batch.size <= max_samples:
        return [batch]
    if batch.groups is None:
        count = math.ceil(batch.size / max_samples)
        edges = (np.arange(count + 1) * batch.size // count).tolist()
    else:
        offsets = batch.groups.offsets
        edges = [0]
        while edges[-1] < batch.rows:
            limit = offsets[edges[-1]] + max_samples
            stop = int(np.searchsorted(offsets, limit, side="right")) - 1
            edges.append(max(stop, edges[-1] + 1))
    parts = [batch.slice(start, stop) for start, stop in pairwise(edges)]
    return [part for part in parts if part.size]
