"""LocalStore: the embedding store inside this process; also what a parameter server holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import deeprec_spark.embedding._core as _core
from deeprec_spark.embedding.dense import DenseVector, dense_range
from deeprec_spark.embedding.hashing import as_keys
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.store import (
    CheckpointFile,
    PullReply,
    PullRequest,
    PushRequest,
    TableSpec,
)
from deeprec_spark.embedding.table_files import (
    hashing_file,
    read_table,
    read_vector,
    write_table,
    write_vector,
)
from deeprec_spark.embedding.variable import EmbeddingVariable, lookup_tables, seconds

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
        dense = state = None
        if request.dense:
            vector, weights = self._require_dense()
            dense = vector.values
            with self._lock:
                state = weights.copy()
        return PullReply(dict(zip(names, rows, strict=True)), dense, state, self._step)

    def push(self, request: PushRequest) -> int:
        """Apply the gradients of one step in one engine call; repeated keys of a table are summed first."""
        tables, keys, gradients = [], [], []
        for name, part in request.gradients.items():
            table = self.table(name)
            wanted = as_keys(part.keys)
            tables.append(table.core)
            keys.append(wanted)
            gradients.append(table.check_rows(part.gradient, len(wanted), "gradient"))
        if request.dense_gradient is not None or request.state_delta is not None:
            self._require_dense()
        with self._lock:
            self._step += 1
            step = self._step
        rate = request.sparse_learning_rate
        now = seconds(None)
        _core.push(tables, keys, gradients, step, float("nan") if rate is None else float(rate), now)
        for name in request.gradients:
            self._tables[name].end_step(step, now)
        if request.dense_gradient is not None:
            self._require_dense()[0].apply(request.dense_gradient, request.dense_learning_rate)
        if request.state_delta is not None:
            self._add_state(request.state_delta)
        return step

    def evict(self) -> Mapping[str, int]:
        """Run each table's eviction policy at the present step; returns the rows evicted by table."""
        return {name: len(table.evict(self._step)) for name, table in list(self._tables.items())}

    def save(self, directory: str) -> list[CheckpointFile]:
        """Write tables, dense parameters, slots and the step below `directory`; returns the files.

        Eviction policies run first.
        """
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        with self._lock:
            step = self._step
        files = []
        for name, table in list(self._tables.items()):
            if table.option.evict_options:
                table.evict(step)
            files += write_table(root, self._specs[name], table, shard_index=self.shard_index, step=step)
        if self._dense is not None:
            files += self._save_dense(root)
        info = {"step": step, "shard_index": self.shard_index, "num_shards": self.num_shards}
        name = f"store-{self.shard_index:05d}.json"
        with hashing_file(root / name) as sink:
            sink.write(json.dumps({**info, "tables": sorted(self._tables)}).encode())
        files.append(CheckpointFile(name, None, 0, sink.num_bytes, sink.sha256.hexdigest()))
        return files

    def restore(self, directory: str) -> None:
        """Read back this shard's part of what any number of shards saved.

        The tables and the dense vector must have been created; a ValueError names what the checkpoint lacks or has
        otherwise. What the store held before is replaced.
        """
        root = Path(directory)
        infos = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(root.glob("store-*.json"))]
        if not infos or len(infos) != infos[0]["num_shards"]:
            wanted = infos[0]["num_shards"] if infos else "at least 1"
            raise ValueError(
                f"The checkpoint is not complete: it needs {wanted} store-*.json files. "
                f"Received: {len(infos)} in {directory}"
            )
        saved = set(infos[0]["tables"])
        if saved != set(self._tables):
            raise ValueError(
                "The checkpoint is of another model: its tables differ. "
                f"Received: {sorted(saved)} in the checkpoint, {sorted(self._tables)} in the store"
            )
        for name, table in self._tables.items():
            read_table(
                root, self._specs[name], table, shard_index=self.shard_index, num_shards=self.num_shards
            )
        if self._dense is not None:
            self._restore_dense(root, self._dense)
        with self._lock:
            self._step = max(int(info["step"]) for info in infos)

    def statistics(self) -> Mapping[str, Mapping[str, Any]]:
        """Counters of each table; see `EmbeddingVariable.stats`."""
        return {name: table.stats() for name, table in list(self._tables.items())}

    def close(self) -> None:
        """Free all memory; the store is empty afterwards."""
        with self._lock:
            self._tables.clear()
            self._specs.clear()
            self._dense = None
            self._state = None

    def _require_dense(self) -> tuple[DenseVector, Float32Array]:
        if self._dense is None or self._state is None:
            raise ValueError("The store has no dense parameters; call init_dense first. Received: dense=None")
        return self._dense, self._state

    def _add_state(self, delta: Float32Array) -> None:
        _, state = self._require_dense()
        if len(delta) != len(state):
            raise ValueError(
                "state_delta must be as long as this shard's state. "
                f"Received: delta of {len(delta)}, state of {len(state)}"
            )
        with self._lock:
            state += delta

    def _save_dense(self, root: Path) -> list[CheckpointFile]:
        vector, weights = self._require_dense()
        values, slots, updates = vector.state()
        start, _ = dense_range(self._dense_total, self.shard_index, self.num_shards)
        info = {
            "start": start,
            "total": self._dense_total,
            "updates": updates,
            "optimizer": vector.optimizer.to_dict(),
        }
        with self._lock:
            state = weights.copy()
        first, _ = dense_range(self._state_total, self.shard_index, self.num_shards)
        return [
            write_vector(root, "part", {"value": values, **slots}, info, shard_index=self.shard_index),
            write_vector(
                root,
                "state",
                {"value": state},
                {"start": first, "total": self._state_total},
                shard_index=self.shard_index,
            ),
        ]

    def _restore_dense(self, root: Path, vector: DenseVector) -> None:
        found, state = read_vector(root, "part"), read_vector(root, "state")
        if found is None or state is None:
            raise ValueError(f"The checkpoint has no dense parameters. Received: {root}")
        columns, info = found
        optimizer = Optimizer.from_dict(info["optimizer"])
        if not vector.optimizer.compatible_with(optimizer):
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
        start, stop = dense_range(self._dense_total, self.shard_index, self.num_shards)
        mine = {name: column[start:stop] for name, column in columns.items()}
        vector.restore(mine.pop("value"), mine, int(info["updates"]))
        start, stop = dense_range(self._state_total, self.shard_index, self.num_shards)
        with self._lock:
            self._state = state[0]["value"][start:stop].copy()
