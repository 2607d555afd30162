"""LocalStore: the embedding store inside this process; also what a parameter server holds."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import deeprec_spark.embedding._core as _core
from deeprec_spark.embedding.dense import DenseVector, dense_range
from deeprec_spark.embedding.filesystem import redacted
from deeprec_spark.embedding.hashing import as_keys
from deeprec_spark.embedding.local_snapshot import (
    DenseState,
    SavedStore,
    StoreSnapshot,
    TableRestore,
    read_chain,
    restore_tables,
)
from deeprec_spark.embedding.optimizers import Optimizer, step_rate
from deeprec_spark.embedding.store import (
    CheckpointFile,
    PullReply,
    PullRequest,
    PushRequest,
    SaveBaseError,
    TableSpec,
)
from deeprec_spark.embedding.table_chain import TableChain, read_vector
from deeprec_spark.embedding.variable import EmbeddingVariable, lookup_tables, seconds
from deeprec_spark.embedding.warm_start import WarmStart

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class LocalStore:
    """Tables and dense parameters in this process; implements `EmbeddingStore`.

    As shard `shard_index` of `num_shards` it holds the rows of its range of buckets (callers send only those keys)
    and the elements `dense_range(total, shard_index, num_shards)` of the dense vector and state: `init_dense` takes
    the whole vectors and keeps its part; pull and push carry only the part. Unlike the protocol demands, pull, push,
    evict, save and statistics may run in several threads at once; a save then holds each row as of one moment.

    Example:
        >>> store = LocalStore()
        >>> store.create_tables([TableSpec("user", 4)])
        >>> keys = UniqueKeys(np.array([5]), np.array([1]))
        >>> store.pull(PullRequest({"user": keys}, dense=False)).rows["user"].shape
        (1, 4)
    """

    def __init__(self, shard_index: int = 0, num_shards: int = 1) -> None:
        if not 0 <= shard_index < num_shards:
            raise ValueError(
                "shard_index must be within [0, num_shards). "
                f"Received: shard_index={shard_index}, num_shards={num_shards}"
            )
        self.shard_index = shard_index
        self.num_shards = num_shards
        self._specs: dict[str, TableSpec] = {}
        self._tables: dict[str, EmbeddingVariable] = {}
        self._dense: DenseVector | None = None
        self._state: Float32Array | None = None
        self._dense_total = 0
        self._state_total = 0
        self._step = 0
        self._snapshots: dict[str, StoreSnapshot] = {}
        # The snapshot that a next one may build on: the last one written or restored.
        self._saved: str | None = None
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        """Number of updates applied."""
        return self._step

    @property
    def specs(self) -> Mapping[str, TableSpec]:
        """The tables' descriptions by name."""
        return dict(self._specs)

    def table(self, name: str) -> EmbeddingVariable:
        """One table; a ValueError names the tables there are."""
        try:
            return self._tables[name]
        except KeyError:
            raise ValueError(
                f"The store has no such table; it has {sorted(self._tables)}. Received: table={name!r}"
            ) from None

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make the tables that do not exist yet; a table that exists with another spec is a ValueError."""
        with self._lock:
            for spec in specs:
                known = self._specs.get(spec.name)
                if known is not None:
                    if known != spec:
                        raise ValueError(
                            f"Table {spec.name!r} exists with another spec. Received: {spec}, existing: {known}"
                        )
                    continue
                self._tables[spec.name] = EmbeddingVariable(
                    spec.name,
                    spec.embedding_dim,
                    option=spec.option,
                    optimizer=spec.optimizer,
                    seed=spec.seed,
                )
                self._specs[spec.name] = spec

    def init_dense(self, dense: Float32Array, state: Float32Array, optimizer: Optimizer) -> None:
        """Set the dense parameters where the store has none yet: the whole vectors, float32 `[total]`.

        Later calls change nothing; a ValueError names both sides if sizes or optimizer then differ.
        """
        with self._lock:
            if self._dense is None:
                start, stop = dense_range(len(dense), self.shard_index, self.num_shards)
                self._dense = DenseVector(np.asarray(dense)[start:stop], optimizer)
                start, stop = dense_range(len(state), self.shard_index, self.num_shards)
                self._state = np.array(state[start:stop], dtype=np.float32)
                self._dense_total, self._state_total = len(dense), len(state)
                return
            mine = (self._dense_total, self._state_total, self._dense.optimizer)
            if mine != (len(dense), len(state), optimizer):
                raise ValueError(
                    "The store has dense parameters of another model or optimizer: "
                    f"{mine[0]} parameters, {mine[1]} of state, {mine[2]}. "
                    f"Received: {len(dense)} parameters, {len(state)} of state, {optimizer}"
                )

    def pull(self, request: PullRequest) -> PullReply:
        """Read the rows of all tables in one engine call, and this shard's part of the dense parameters."""
        names = list(request.keys)
        rows = lookup_tables(
            [self.table(name) for name in names],
            [request.keys[name].keys for name in names],
            [request.keys[name].counts for name in names],
            train=request.train,
        )
        if request.unknown == "default" and not request.train:
            rows = [
                self._with_default(name, request.keys[name].keys, part)
                for name, part in zip(names, rows, strict=True)
            ]
        dense = state = None
        if request.dense:
            vector, weights = self._require_dense()
            dense = vector.values
            with self._lock:
                state = weights.copy()
        return PullReply(dict(zip(names, rows, strict=True)), dense, state, self._step)

    def push(self, request: PushRequest) -> int:
        """Apply the gradients of one step in one engine call; repeated keys of a table are summed first."""
        tables, keys, gradients = self._checked(request)
        rate = step_rate(request.sparse_learning_rate, "sparse_learning_rate")
        with self._lock:
            self._step += 1
            step = self._step
        now = seconds(None)
        _core.push(tables, keys, gradients, step, rate, now)
        # Of all tables: what is due every N steps must not depend on which of them a step happens to touch.
        for table in list(self._tables.values()):
            table.end_step(step, now)
        if request.dense_gradient is not None:
            self._require_dense()[0].apply(request.dense_gradient, request.dense_learning_rate)
        if request.state_delta is not None:
            self._add_state(request.state_delta)
        return step

    def check(self, request: PullRequest | PushRequest) -> None:
        """Raise what `pull` or `push` would raise for a request that does not fit the tables; changes nothing.

        Whoever merges requests of several ranks can so refuse a bad one before it spoils the others.
        """
        if isinstance(request, PushRequest):
            self._checked(request)
            return
        for name, part in request.keys.items():
            table = self.table(name)
            keys, counts = as_keys(part.keys), as_keys(part.counts, "counts")
            if len(counts) != len(keys) or (len(counts) and int(counts.min()) < 0):
                raise ValueError(
                    f"Table {table.name!r} needs a count of at least 0 for each key. "
                    f"Received: {len(counts)} counts, {len(keys)} keys"
                )
        if request.dense:
            self._require_dense()

    def evict(self) -> Mapping[str, int]:
        """Run each table's eviction policy at the present step; returns the rows evicted by table."""
        return {name: len(table.evict(self._step)) for name, table in list(self._tables.items())}

    def snapshot(self, save_id: str, base: str | None = None) -> None:
        """Fix the state of this moment for `write_snapshot`; eviction policies run first.

        Raises:
            SaveBaseError: `base` is not the last snapshot that was written or restored.
            ValueError: a snapshot of this id is there.
        """
        with self._lock:
            step = self._step
            if save_id in self._snapshots:
                raise ValueError(f"There is a snapshot of this id already. Received: save_id={save_id!r}")
            if base is not None and base != self._saved:
                raise SaveBaseError(
                    "The store does not know what changed since that checkpoint: save a full one. "
                    f"Received: base={base!r}, last snapshot written or restored={self._saved!r}"
                )
        fixed = StoreSnapshot(save_id, base, step, self.shard_index, self.num_shards)
        # Until it is written nobody can build on what comes before it or on it.
        self._saved = None
        try:
            for name, table in list(self._tables.items()):
                if table.option.evict_options:
                    table.evict(step)
                fixed.add_table(self._specs[name], table)
            fixed.dense = self._dense_state()
        except BaseException:
            fixed.close()
            raise
        with self._lock:
            self._snapshots[save_id] = fixed

    def write_snapshot(self, save_id: str, directory: str) -> list[CheckpointFile]:
        """Write a snapshot below a path or URI, two tables at a time; returns the files.

        Raises:
            ValueError: there is no such snapshot.
            OSError: a file cannot be written; the snapshot is given up.
        """
        with self._lock:
            fixed = self._snapshots.pop(save_id, None)
        if fixed is None:
            raise ValueError(f"There is no such snapshot. Received: save_id={save_id!r}")
        try:
            files = fixed.write(directory)
        finally:
            fixed.close()
        self._saved = save_id
        return files

    def drop_snapshot(self, save_id: str) -> None:
        """Give a snapshot up; unknown ids are ignored."""
        with self._lock:
            fixed = self._snapshots.pop(save_id, None)
        if fixed is not None:
            fixed.close()

    def drop_snapshots(self) -> None:
        """Give up every snapshot that is not being written."""
        for save_id in list(self._snapshots):
            self.drop_snapshot(save_id)

    def save(self, directory: str) -> list[CheckpointFile]:
        """Write tables, dense parameters, slots and the step below a path or URI; returns the files.

        Eviction policies run first.
        """
        save_id = uuid.uuid4().hex
        self.snapshot(save_id)
        return self.write_snapshot(save_id, directory)

    def restore(
        self, chain: Sequence[str], save_id: str | None = None, warm_start: WarmStart | None = None
    ) -> None:
        """Read back this shard's part of what any number of shards saved: a full checkpoint, then incremental ones.

        The tables and the dense vector must have been created; a ValueError names what the checkpoint lacks or has
        otherwise, and then nothing has changed. What the store held before is replaced.

        Args:
            chain: directories, paths or URIs; a single one may be given as it is.
            save_id: of the last one; the next snapshot may build on it.
            warm_start: take only a part; the store's step then stays, rows count as never updated, and the next
                snapshot is a full one.
        """
        chain = [chain] if isinstance(chain, str) else list(chain)
        saved = read_chain(chain)
        last = saved[-1]
        warm = warm_start or WarmStart(last.directory)
        if warm_start is None and last.tables != set(self._tables):
            raise ValueError(
                "The checkpoint is of another model: its tables differ. "
                f"Received: {sorted(last.tables)} in the checkpoint, {sorted(self._tables)} in the store"
            )
        tables = [
            TableRestore(
                self._specs[ours],
                self._tables[ours],
                TableChain(chain, theirs, [one.files for one in saved]),
                values_only=warm.values_only,
                new_versions=warm_start is not None,
            )
            for ours, theirs in warm.sources(last.tables, self._tables).items()
        ]
        dense = None
        if self._dense is not None and warm.dense:
            dense = self._read_dense(last, self._dense, warm.values_only)
        self.drop_snapshots()
        self._saved = None
        restore_tables(tables, self.shard_index, self.num_shards)
        if dense is not None and self._dense is not None:
            values, slots, updates, state = dense
            self._dense.restore(values, slots, updates)
            with self._lock:
                self._state = state
        if warm_start is not None:
            return
        with self._lock:
            self._step = last.step
        # Files that were saved under another id are not what the caller will call the base.
        if save_id is not None and last.save_id == save_id and all(part.same_layout for part in tables):
            for part in tables:
                part.table.mark_saved()
            self._saved = save_id

    def statistics(self) -> Mapping[str, Mapping[str, Any]]:
        """Counters of each table; see `EmbeddingVariable.stats`."""
        return {name: table.stats() for name, table in list(self._tables.items())}

    def close(self) -> None:
        """Free all memory; the store is empty afterwards."""
        self.drop_snapshots()
        with self._lock:
            self._tables.clear()
            self._specs.clear()
            self._dense = None
            self._state = None

    def _with_default(self, name: str, keys: npt.NDArray[np.int64], rows: Float32Array) -> Float32Array:
        """The rows, with the table's default where a key has none."""
        table = self.table(name)
        absent = ~table.contains(keys)
        if absent.any():
            rows[absent] = table.option.init_option.default_value_no_permission
        return rows

    def _require_dense(self) -> tuple[DenseVector, Float32Array]:
        if self._dense is None or self._state is None:
            raise ValueError("The store has no dense parameters; call init_dense first. Received: dense=None")
        return self._dense, self._state

    def _checked(
        self, request: PushRequest
    ) -> tuple[list[_core.Table], list[Int64Array], list[Float32Array]]:
        """Tables, keys and gradients of a push that fits; it takes effect whole or not at all."""
        tables, keys, gradients = [], [], []
        for name, part in request.gradients.items():
            table = self.table(name)
            wanted = as_keys(part.keys)
            tables.append(table.core)
            keys.append(wanted)
            gradients.append(table.check_rows(part.gradient, len(wanted), "gradient"))
        self._check_dense(request)
        step_rate(request.sparse_learning_rate, "sparse_learning_rate")
        step_rate(request.dense_learning_rate, "dense_learning_rate")
        return tables, keys, gradients

    def _check_dense(self, request: PushRequest) -> None:
        """See that the dense part fits before anything is applied."""
        gradient, delta = request.dense_gradient, request.state_delta
        if gradient is None and delta is None:
            return
        vector, state = self._require_dense()
        if gradient is not None and len(gradient) != len(vector):
            raise ValueError(
                "The gradient must be as long as the dense vector. "
                f"Received: gradient of {len(gradient)}, vector of {len(vector)}"
            )
        if delta is not None and len(delta) != len(state):
            raise ValueError(
                "state_delta must be as long as this shard's state. "
                f"Received: delta of {len(delta)}, state of {len(state)}"
            )

    def _add_state(self, delta: Float32Array) -> None:
        _, state = self._require_dense()
        with self._lock:
            state += delta

    def _dense_state(self) -> DenseState | None:
        if self._dense is None:
            return None
        vector, weights = self._require_dense()
        values, slots, updates = vector.state()
        with self._lock:
            state = weights.copy()
        return DenseState(
            {"value": values, **slots},
            dense_range(self._dense_total, self.shard_index, self.num_shards)[0],
            self._dense_total,
            updates,
            vector.optimizer.to_dict(),
            state,
            dense_range(self._state_total, self.shard_index, self.num_shards)[0],
            self._state_total,
        )

    def _read_dense(
        self, saved: SavedStore, vector: DenseVector, values_only: bool
    ) -> tuple[Float32Array, dict[str, Float32Array], int, Float32Array]:
        """This shard's part of the dense values, slots, updates, and state; a ValueError unless they fit."""
        found, state = (read_vector(saved.directory, name, saved.files) for name in ("part", "state"))
        if found is None or state is None:
            raise ValueError(f"The checkpoint has no dense parameters. Received: {redacted(saved.directory)}")
        columns, info = found
        optimizer = Optimizer.from_dict(info["optimizer"])
        if not values_only and not vector.optimizer.compatible_with(optimizer):
            raise ValueError(
                "The checkpoint's dense parameters have another optimizer. "
                f"Received: {optimizer} in the checkpoint, {vector.optimizer} in the store"
            )
        sizes = (len(columns["value"]), len(state[0]["value"]))
        if sizes != (self._dense_total, self._state_total):
            raise ValueError(
                "The checkpoint is of another model: its dense parameters differ. "
                f"Received: {sizes[0]} parameters and {sizes[1]} of state in the checkpoint, "
                f"{self._dense_total} and {self._state_total} in the store"
            )
        mine = {name: self._part(column) for name, column in columns.items()}
        values = mine.pop("value")
        if values_only:
            _, mine, _ = DenseVector(values, vector.optimizer).state()
        updates = 0 if values_only else int(info["updates"])
        return values, mine, updates, self._part(state[0]["value"]).copy()

    def _part(self, column: Float32Array) -> Float32Array:
        start, stop = dense_range(len(column), self.shard_index, self.num_shards)
        return column[start:stop]
