"""Batch: the arrays of one training step, as they leave the reader, flat or in groups of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Groups:
    """Which samples of a batch belong together.

    Args:
        features: names of the group-level features: the first axis of their arrays is the group.
        sizes: int64 `[groups]`, the samples of each; they lie one group after the other.
    """

    features: frozenset[str]
    sizes: npt.NDArray[np.int64]

    @property
    def index(self) -> npt.NDArray[np.int32]:
        """int32 `[samples]`: the group of each sample."""
        return np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.sizes)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64 `[groups + 1]`: where each group's samples begin."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)])


@dataclass(frozen=True)
class Batch:
    """Feature and label arrays by column name; the first axis of every array is the sample.

    Dense features are float32 `[batch]` (or `[batch, width]`), categorical ones int64 `[batch]`, sequences
    int64 `[batch, max_length]` filled up with the feature's padding value. `sample_weight` is float32
    `[batch]`.

    With `groups`, the first axis of the group-level features is the group. `group_index` is the name of the column in
    which a model may ask for the group of each sample; None: the data have no grouping (see `features.spec.Grouping`).
    """

    features: Mapping[str, Array]
    labels: Mapping[str, Array] = field(default_factory=dict)
    sample_weight: npt.NDArray[np.float32] | None = None
    groups: Groups | None = None
    group_index: str | None = None

    @property
    def size(self) -> int:
        """Number of samples."""
        if self.groups is not None:
            return int(self.groups.sizes.sum())
        return self.rows

    @property
    def rows(self) -> int:
        """Rows of the data that it is made of: groups where there are such, else samples."""
        if self.groups is not None:
            return len(self.groups.sizes)
        return len(next(iter(self.features.values())))

    def take(self, order: npt.NDArray[np.integer[Any]]) -> Batch:
        """These rows, in this order; a group comes with its samples.

        Example:
            >>> Batch({"id": np.array([5, 6, 7])}).take(np.array([2, 0])).features["id"].tolist()
            [7, 5]
        """
        if self.groups is None:
            return self._map(lambda array: array[order], lambda array: array[order])
        sizes = self.groups.sizes[order]
        begin = np.cumsum(sizes) - sizes
        # The i-th sample of a group lies i places behind its first one.
        samples = np.repeat(self.groups.offsets[:-1][order] - begin, sizes) + np.arange(sizes.sum())
        taken = self._map(lambda array: array[order], lambda array: array[samples])
        return replace(taken, groups=replace(self.groups, sizes=sizes))

    def slice(self, start: int, stop: int) -> Batch:
        """Rows [start, stop), as views; a group comes with its samples."""
        if self.groups is None:
            return self._map(lambda array: array[start:stop], lambda array: array[start:stop])
        sizes = self.groups.sizes[start:stop]
        first = int(self.groups.sizes[:start].sum())
        last = first + int(sizes.sum())
        part = self._map(lambda array: array[start:stop], lambda array: array[first:last])
        return replace(part, groups=replace(self.groups, sizes=sizes))

    def flat(self) -> Batch:
        """The same samples without groups: group-level features repeated."""
        if self.groups is None:
            return self
        index = self.groups.index
        return replace(self._map(lambda array: array[index], lambda array: array), groups=None)

    def grouped_inputs(self) -> Mapping[str, Array]:
        """The feature arrays and the group of each sample; where there are no groups, each sample is one."""
        if self.group_index is None:
            raise ValueError(
                "The data have no grouping, so there is no column that says to which group a sample belongs: prepare "
                f"them with group_by. Received: columns {list(self.features)}"
            )
        index = np.arange(self.size, dtype=np.int32) if self.groups is None else self.groups.index
        return {**self.features, self.group_index: index}

    def _map(self, of_groups: Callable[[Array], Array], of_samples: Callable[[Array], Array]) -> Batch:
        names = self.groups.features if self.groups else frozenset()
        return Batch(
            {
                name: of_groups(array) if name in names else of_samples(array)
                for name, array in self.features.items()
            },
            {name: of_samples(array) for name, array in self.labels.items()},
            None if self.sample_weight is None else of_samples(self.sample_weight),
            self.groups,
            self.group_index,
        )


def concatenate(parts: Sequence[Batch]) -> Batch:
    """The rows of several batches with the same columns, in order; beside groups, flat samples are groups of one."""
    if len(parts) == 1:
        return parts[0]
    names = next((part.groups.features for part in parts if part.groups is not None), None)
    if names is not None:
        parts = [
            replace(part, groups=Groups(names, np.ones(part.rows, np.int64))) if part.groups is None else part
            for part in parts
        ]
    first = parts[0]
    sizes = [part.groups.sizes for part in parts if part.groups is not None]
    return Batch(
        {name: np.concatenate([part.features[name] for part in parts]) for name in first.features},
        {name: np.concatenate([part.labels[name] for part in parts]) for name in first.labels},
        None
        if first.sample_weight is None
        else np.concatenate([part.sample_weight for part in parts if part.sample_weight is not None]),
        None if first.groups is None else replace(first.groups, sizes=np.concatenate(sizes)),
        first.group_index,
    )
