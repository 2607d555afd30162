"""The embedding store: the one protocol between a training step and its parameters.

The step sees nothing else. `LocalStore` holds the engine in this process; the runtime's
`RemoteStore` is the client of the parameter servers. Rows, dense parameters and the step counter
travel together, so that a step costs one round trip to each server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.options import EmbeddingVariableOption
from deeprec_spark.embedding.warm_start import WarmStart

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TableSpec:
    """All that a store needs to make one embedding table; equal specs make equal tables."""

    name: str
    embedding_dim: int
    option: EmbeddingVariableOption = field(default_factory=EmbeddingVariableOption)
    optimizer: Optimizer | None = None
    seed: int = 0


@dataclass(frozen=True)
class UniqueKeys:
    """The distinct keys of one table in a batch, and how often each occurs.

    `keys` is int64 `[unique]` without repeats; `counts` is int64 `[unique]`, at least 1 each.
    Counts feed the admission filters.
    """

    keys: Int64Array
    counts: Int64Array


@dataclass(frozen=True)
class PullRequest:
    """What one step reads: rows by table, and the dense parameters.

    With `train` the keys are counted and admitted and new rows are made; without it nothing changes, and `unknown`
    says what a key that has no row reads: its "start" value (the filter's default where there is a filter), as the
    first step of training would, or the table's "default", `default_value_no_permission`, as a checkpoint or an
    exported model gives.
    """

    keys: Mapping[str, UniqueKeys]
    train: bool = True
    dense: bool = True
    unknown: Literal["start", "default"] = "start"


@dataclass(frozen=True)
class PullReply:
    """Rows float32 `[unique, embedding_dim]` by table, in the order of the request's keys.

    `dense` (float32 `[parameters]`) and `state` (float32 `[state]`: non-trainable weights such as moving
    averages) are None where the request did not ask for them. `step` is the number of updates applied.
    """

    rows: Mapping[str, Float32Array]
    dense: Float32Array | None
    state: Float32Array | None
    step: int


@dataclass(frozen=True)
class SparseGradient:
    """The gradient of one table's rows: int64 `[unique]` keys and float32 `[unique, embedding_dim]`."""

    keys: Int64Array
    gradient: Float32Array


@dataclass(frozen=True)
class PushRequest:
    """What one step gives back.

    Gradients are those of the mean loss over this worker's `samples`. A synchronous store weights each
    worker's part by its samples, sums in rank order, and applies the result once. `state_delta` is new minus
    old of the non-trainable weights. The learning rates override those of the optimizers for this step
    (schedules and callbacks decide them); None keeps the optimizer's own.
    """

    gradients: Mapping[str, SparseGradient]
    dense_gradient: Float32Array | None
    state_delta: Float32Array | None
    samples: int
    sparse_learning_rate: float | None = None
    dense_learning_rate: float | None = None


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint: path relative to the checkpoint directory, its rows, bytes and `Checksum`."""

    path: str
    table: str | None
    rows: int
    num_bytes: int
    checksum: str


class SaveBaseError(ValueError):
    """The store does not know what changed since the checkpoint to build on: save a full one."""


class EmbeddingStore(Protocol):
    """Where a training step's parameters live. Implementations are safe to call from one thread at a time."""

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make the tables that do not exist yet; a table that exists with another spec is a ValueError."""

    def init_dense(self, dense: Float32Array, state: Float32Array, optimizer: Optimizer) -> None:
        """Set the dense parameters where the store has none yet; later calls must agree in size."""

    def pull(self, request: PullRequest) -> PullReply:
        """Read the rows and dense parameters of one step."""

    def push(self, request: PushRequest) -> int:
        """Apply the gradients of one step; returns the number of updates applied so far."""

    def evict(self) -> Mapping[str, int]:
        """Run each table's eviction policy; returns the rows evicted by table."""

    def snapshot(self, save_id: str, base: str | None = None) -> None:
        """Fix what `write_snapshot(save_id)` will write: the state of this moment; eviction policies run first.

        With `base` it is only what changed since the snapshot `base`, which must be the last one that was written or
        restored; otherwise a SaveBaseError. Nothing is copied but the dense parameters, so this is fast.
        """

    def write_snapshot(self, save_id: str, directory: str) -> list[CheckpointFile]:
        """Write a snapshot below a path or URI; training may go on meanwhile. It can be written once."""

    def drop_snapshot(self, save_id: str) -> None:
        """Give a snapshot up; unknown ids are ignored."""

    def save(self, directory: str) -> list[CheckpointFile]:
        """Write every table, the dense parameters, all slots and the step below a path or URI: a full snapshot."""

    def restore(
        self, chain: Sequence[str], save_id: str | None = None, warm_start: WarmStart | None = None
    ) -> None:
        """Read back a full checkpoint and the incremental ones after it, whatever number of servers wrote them.

        Each is a directory, a path or URI. `save_id` names the last one, so that the next snapshot may build on it.
        `warm_start` takes only a part of them; its `path` does not matter here.
        """

    def statistics(self) -> Mapping[str, Mapping[str, Any]]:
        """Counters of each table: rows, admitted, filtered, evicted, bytes."""

    def close(self) -> None:
        """Release connections and memory."""
