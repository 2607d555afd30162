"""SnapshotStore: a checkpoint as a read-only embedding store over memory-mapped files."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from deeprec_spark.checkpoint.directory import find, load
from deeprec_spark.checkpoint.errors import CheckpointMismatchError
from deeprec_spark.checkpoint.manifest import Manifest
from deeprec_spark.checkpoint.snapshot_files import SortedRows, open_dense, open_table, prepared
from deeprec_spark.embedding.filesystem import redacted
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.store import (
    CheckpointFile,
    Float32Array,
    Int64Array,
    PullReply,
    PullRequest,
    PushRequest,
    TableSpec,
    UniqueKeys,
)
from deeprec_spark.embedding.warm_start import WarmStart

logger = logging.getLogger(__name__)

LOCK_SECONDS = 1800.0


@dataclass(frozen=True)
class SnapshotTable:
    """One table: its rows sorted by key, and what an id without a row reads."""

    spec: TableSpec
    rows: SortedRows
    default_value: float

    def lookup(self, keys: Int64Array) -> Float32Array:
        """Rows float32 `[n, dim]` of int64 `[n]` keys; an unknown key reads the default.

        The search goes through the keys in ascending order, so that pages of a large table are touched once.
        """
        result = np.full((len(keys), self.spec.embedding_dim), self.default_value, np.float32)
        if not len(keys) or not len(self.rows.keys):
            return result
        order = np.argsort(keys, kind="stable")
        wanted = keys[order]
        position = np.searchsorted(self.rows.keys, wanted)
        position[position == len(self.rows.keys)] = 0
        found = self.rows.keys[position] == wanted
        result[order[found]] = self.rows.values[position[found]]
        return result


class SnapshotStore:
    """The tables and dense parameters of one checkpoint, for prediction, evaluation and export.

    An incremental checkpoint is read together with what it builds on.

    The first process on a host sorts each table by key into the cache directory; all others map the same files,
    so that any number of Python workers share one copy in the page cache. The cache is found by the manifest's
    content, so a copied or moved checkpoint is not sorted twice, and a new one never reads an old one's rows.

    **Unknown ids.** Whatever the id's fate in training would be, an id that has no row in the checkpoint reads
    the table's `default_value_no_permission` (0.0 unless its InitializerOption says otherwise). The exported
    SavedModel does the same, so that predictions agree. Ids that a filter has only counted have no row.

    Args:
        path: Checkpoint directory, or a model directory, whose newest checkpoint is taken; any URI.
        cache_dir: Where sorted files go; default: `$DEEPREC_SPARK_CACHE`, or a folder of the user's in the temporary
            directory.
        lock_timeout: Seconds to wait while another process sorts.
        manifest: The checkpoint's manifest if it is known already: spares reading it.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: See `checkpoint.load`; files are verified as they are read.
        TimeoutError: Another process sorts for longer than `lock_timeout`.

    Example:
        >>> store = SnapshotStore("/models/ctr")
        >>> keys = UniqueKeys(np.array([7]), np.array([1]))
        >>> store.pull(PullRequest({"user": keys}, train=False)).rows["user"].shape
        (1, 16)
    """

    def __init__(
        self,
        path: str,
        cache_dir: str | None = None,
        *,
        lock_timeout: float = LOCK_SECONDS,
        manifest: Manifest | None = None,
    ) -> None:
        self.path = find(path) if manifest is None else path
        self.manifest = manifest or load(self.path, verify=False)
        self.step = self.manifest.step
        cache = Path(cache_dir or default_cache_dir())
        with prepared(self.path, self.manifest, cache, lock_timeout) as folder:
            self.tables: dict[str, SnapshotTable] = {
                record.name: SnapshotTable(
                    record.table_spec(), open_table(folder, record.name), record.default_value
                )
                for record in self.manifest.tables
            }
            self._dense, self._state = open_dense(folder)

    @property
    def dense(self) -> Float32Array:
        """The trainable dense weights, flat float32."""
        return self._dense

    @property
    def state(self) -> Float32Array:
        """The non-trainable dense weights (moving averages), flat float32."""
        return self._state

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        """See that the model's tables are those of the checkpoint; a CheckpointMismatchError names both sides."""
        self.manifest.check_model(specs)

    def init_dense(self, dense: Float32Array, state: Float32Array, optimizer: Optimizer) -> None:
        """See that the model has as many dense weights as the checkpoint; its values stand."""
        if (len(dense), len(state)) != (len(self._dense), len(self._state)):
            raise CheckpointMismatchError(
                "The checkpoint belongs to another model: use the model that wrote it. "
                f"Received: a model with {len(dense)} dense parameters and {len(state)} of state, checkpoint of "
                f"{self.manifest.model.name!r} with {len(self._dense)} and {len(self._state)}"
            )

    def pull(self, request: PullRequest) -> PullReply:
        """Rows, and copies of the dense parameters if asked for; a training pull is a ValueError."""
        if request.train:
            self._refuse("pull(train=True)")
        rows = {name: self._table(name).lookup(unique.keys) for name, unique in request.keys.items()}
        dense = np.array(self._dense) if request.dense else None
        state = np.array(self._state) if request.dense else None
        return PullReply(rows, dense, state, self.step)

    def lookup(self, table: str, keys: Int64Array) -> Float32Array:
        """Rows float32 `[n, dim]` of one table; repeats allowed."""
        counts = np.ones(len(keys), np.int64)
        return self.pull(PullRequest({table: UniqueKeys(keys, counts)}, train=False, dense=False)).rows[table]

    def push(self, request: PushRequest) -> int:
        """Not possible: a ValueError."""
        self._refuse("push")

    def evict(self) -> Mapping[str, int]:
        """Not possible: a ValueError."""
        self._refuse("evict")

    def snapshot(self, save_id: str, base: str | None = None) -> None:
        """Not possible: a ValueError."""
        self._refuse("snapshot")

    def write_snapshot(self, save_id: str, directory: str) -> list[CheckpointFile]:
        """Not possible: a ValueError."""
        self._refuse("write_snapshot")

    def drop_snapshot(self, save_id: str) -> None:
        """There is none."""

    def save(self, directory: str) -> list[CheckpointFile]:
        """Not possible: a ValueError."""
        self._refuse("save")

    def restore(
        self, chain: Sequence[str], save_id: str | None = None, warm_start: WarmStart | None = None
    ) -> None:
        """Not possible: a ValueError."""
        self._refuse("restore")

    def statistics(self) -> Mapping[str, Mapping[str, Any]]:
        """Rows and bytes of each table."""
        return {
            name: {
                "rows": len(table.rows.keys),
                "bytes": int(table.rows.keys.nbytes + table.rows.values.nbytes),
            }
            for name, table in self.tables.items()
        }

    def close(self) -> None:
        """Let go of the maps; the cached files stay for other processes."""
        self.tables = {}

    def _table(self, name: str) -> SnapshotTable:
        table = self.tables.get(name)
        if table is None:
            self.manifest.table(name)
            raise ValueError(f"The store is closed. Received: path={redacted(self.path)!r}")
        return table

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"A SnapshotStore is read-only: train on a LocalStore or RemoteStore. Received: {what}"
        )


def default_cache_dir() -> str:
    """`$DEEPREC_SPARK_CACHE`, or a folder of the user's in the temporary directory."""
    return os.environ.get("DEEPREC_SPARK_CACHE") or os.path.join(
        tempfile.gettempdir(), f"deeprec-spark-{os.getuid()}"
    )
