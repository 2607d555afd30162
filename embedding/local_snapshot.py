"""What a LocalStore saves and restores: its state of one moment, and the files of that."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deeprec_spark.embedding.filesystem import list_files, make_directory, redacted, resolve
from deeprec_spark.embedding.store import CheckpointFile, SaveBaseError, TableSpec
from deeprec_spark.embedding.table_chain import TableChain
from deeprec_spark.embedding.table_files import (
    TableSpecDict,
    TableState,
    bloom_of,
    bucket_range,
    check_spec,
    int64_column,
    matrix_column,
    spec_to_dict,
    write_json,
    write_table,
    write_vector,
)
from deeprec_spark.embedding.variable import NEVER_UPDATED, EmbeddingVariable, RowBlock

logger = logging.getLogger(__name__)

Float32Array = npt.NDArray[np.float32]

THREADS = 2
"""Tables, or halves of one, that are written or read at a time."""


@dataclass
class DenseState:
    """This shard's part of the dense parameters: elements from `start` on, of `total`."""

    columns: Mapping[str, Float32Array]
    start: int
    total: int
    updates: int
    optimizer: Mapping[str, Any]
    state: Float32Array
    state_start: int
    state_total: int


@dataclass
class StoreSnapshot:
    """A store's state of one moment, to be written once."""

    save_id: str
    base: str | None
    step: int
    shard_index: int
    num_shards: int
    tables: list[tuple[TableSpec, EmbeddingVariable, TableState]] = field(default_factory=list)
    dense: DenseState | None = None

    def add_table(self, spec: TableSpec, table: EmbeddingVariable) -> None:
        """Fix a table's content, or what changed in it.

        Raises:
            SaveBaseError: The table does not know what changed since the base.
        """
        try:
            state = table.snapshot(changed_only=self.base is not None)
        except ValueError as error:
            raise SaveBaseError(str(error)) from error
        self.tables.append((spec, table, state))

    def write(self, directory: str) -> list[CheckpointFile]:
        """Write everything below a path or URI; returns the files."""
        filesystem, root = resolve(directory)
        make_directory(filesystem, root)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="write") as pool:
            written = [
                pool.submit(
                    write_table,
                    filesystem,
                    root,
                    spec,
                    table,
                    state,
                    shard_index=self.shard_index,
                    step=self.step,
                )
                for spec, table, state in self.tables
            ]
            try:
                files = self._write_dense(filesystem, root)
                files = [file for future in written for file in future.result()] + files
            except BaseException:
                for future in written:
                    future.cancel()
                raise
        info = {
            "step": self.step,
            "shard_index": self.shard_index,
            "num_shards": self.num_shards,
            "tables": sorted(spec.name for spec, _, _ in self.tables),
            "save_id": self.save_id,
            "base": self.base,
            # A reader takes these and no others: a server of an earlier try may write here too late.
            "files": [file.path for file in files],
        }
        files.append(write_json(filesystem, root, f"store-{self.shard_index:05d}.json", info))
        return files

    def close(self) -> None:
        """Let go of the tables; what was not written is as changed as before."""
        for _, _, state in self.tables:
            state.close()

    def _write_dense(self, filesystem: Any, root: str) -> list[CheckpointFile]:
        dense = self.dense
        if dense is None:
            return []
        info = {
            "start": dense.start,
            "total": dense.total,
            "updates": dense.updates,
            "optimizer": dense.optimizer,
        }
        state_info = {"start": dense.state_start, "total": dense.state_total}
        shard = self.shard_index
        return [
            write_vector(filesystem, root, "part", dense.columns, info, shard_index=shard),
            write_vector(filesystem, root, "state", {"value": dense.state}, state_info, shard_index=shard),
        ]


@dataclass(frozen=True)
class SavedStore:
    """What the `store-*.json` files of one checkpoint directory say."""

    directory: str
    step: int
    tables: frozenset[str]
    save_id: str | None
    base: str | None
    files: frozenset[str] | None = None

    @classmethod
    def read(cls, directory: str) -> SavedStore:
        """The stores of a directory; a ValueError if some are missing."""
        filesystem, root = resolve(directory)
        infos: list[dict[str, Any]] = []
        for path in list_files(filesystem, root, "store-", ".json"):
            with filesystem.open_input_stream(path) as stream:
                content = stream.read()
            try:
                infos.append(json.loads(content))
            except ValueError as error:
                raise ValueError(f"A file of the checkpoint is damaged: {error}. Received: {path}") from error
        if not infos or len(infos) != infos[0]["num_shards"]:
            wanted = infos[0]["num_shards"] if infos else "at least 1"
            raise ValueError(
                f"The checkpoint is not complete: it needs {wanted} store-*.json files. "
                f"Received: {len(infos)} in {redacted(directory)}"
            )
        ids = {(info.get("save_id"), info.get("base")) for info in infos}
        if len(ids) > 1 and any(base is not None for _, base in ids):
            raise ValueError(
                "The servers' parts of an incremental checkpoint are of different saves. "
                f"Received: {sorted(str(pair) for pair in ids)} in {redacted(directory)}"
            )
        lists = [info["files"] for info in infos if "files" in info]
        return cls(
            directory,
            max(int(info["step"]) for info in infos),
            frozenset(infos[0]["tables"]),
            infos[0].get("save_id"),
            infos[0].get("base"),
            frozenset(file for part in lists for file in part) if len(lists) == len(infos) else None,
        )


def read_chain(chain: Sequence[str]) -> list[SavedStore]:
    """The checkpoints of a chain, each built on the one before it; a ValueError names the one that is not."""
    if not chain:
        raise ValueError("A restore needs at least one checkpoint. Received: chain=[]")
    saved = [SavedStore.read(directory) for directory in chain]
    if saved[0].base is not None:
        raise ValueError(
            "A chain starts with a full checkpoint, and this one has only what changed since another. "
            f"Received: {redacted(saved[0].directory)}"
        )
    for older, newer in itertools.pairwise(saved):
        if newer.base is None or newer.base != older.save_id:
            raise ValueError(
                f"A checkpoint does not build on the one before it in the chain: it needs {newer.base!r}. "
                f"Received: {redacted(newer.directory)} after {redacted(older.directory)} ({older.save_id!r})"
            )
    return saved


@dataclass
class TableRestore:
    """One table of a chain and the table to fill: checked first, so that a mismatch changes nothing.

    With `new_versions` rows count as never updated, for a training whose steps begin anew.
    """

    spec: TableSpec
    table: EmbeddingVariable
    chain: TableChain
    values_only: bool = False
    new_versions: bool = False

    def __post_init__(self) -> None:
        for info in (info for level in self.chain.levels for info in level.infos):
            check_spec(TableSpecDict(info["table"]), self.spec, values_only=self.values_only)

    @property
    def same_layout(self) -> bool:
        """Whether an incremental save of the table fits onto the newest checkpoint: only its storage may differ."""
        pair = []
        for data in (self.chain.last.info["table"], json.loads(json.dumps(spec_to_dict(self.spec)))):
            option = {key: value for key, value in data["option"].items() if key != "storage_option"}
            pair.append((data["name"], option))
        return bool(pair[0] == pair[1])

    def clear(self) -> None:
        """Remove what the table holds."""
        self.table.clear()

    def fill(self, first: int, last: int) -> None:
        """Take in rows and counts of buckets [first, last)."""
        if self.values_only:
            for batch in self.chain.rows(first, last, ["key", "value"]):
                self.table.upsert(int64_column(batch, "key"), matrix_column(batch, "value"))
            return
        for batch in self.chain.rows(first, last):
            block = _block(batch, self.table)
            if self.new_versions:
                block = replace(block, version=np.full(len(block), NEVER_UPDATED, np.int64))
            self.table.import_rows(block)
        for batch in self.chain.filtered(first, last):
            self.table.import_filtered(int64_column(batch, "key"), int64_column(batch, "frequency"))

    def finish(self, shard_index: int, num_shards: int) -> None:
        """Take in the Bloom filter's counters, the table's clocks and the thresholds of ranks."""
        if self.values_only:
            return
        first, last = bucket_range(shard_index, num_shards)
        level = self.chain.last
        if level.blooms:
            now, then = bloom_of(self.spec), level.info["table"]["option"]["filter_option"]
            geometry = ("max_element_size", "false_positive_probability", "counter_type")
            if now is None or any(then[name] != getattr(now, name) for name in geometry):
                logger.warning(
                    "Table %r has another filter than its checkpoint (%s): counting starts anew",
                    self.spec.name,
                    then,
                )
            else:
                for index, counters in level.bloom():
                    if first <= index < last:
                        self.table.core.import_bloom(index, counters)
        self.table.core.updates, self.table.core.calls = level.updates, level.calls
        self.table.core.set_ranks(level.rank_refreshes, level.rank_thresholds(shard_index, num_shards))


def restore_tables(tables: Sequence[TableRestore], shard_index: int, num_shards: int) -> None:
    """Replace the tables' content by this shard's part of what any number of shards wrote."""
    first, last = bucket_range(shard_index, num_shards)
    for part in tables:
        part.clear()
    bounds = np.linspace(first, last, THREADS + 1).astype(int).tolist()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="restore") as pool:
        filled = [
            pool.submit(part.fill, begin, end)
            for part in tables
            for begin, end in itertools.pairwise(bounds)
            if end > begin
        ]
        try:
            for future in filled:
                future.result()
        finally:
            for future in filled:
                future.cancel()
    for part in tables:
        part.finish(shard_index, num_shards)


def _block(batch: pa.RecordBatch, table: EmbeddingVariable) -> RowBlock:
    names = batch.schema.names
    return RowBlock(
        key=int64_column(batch, "key"),
        frequency=int64_column(batch, "frequency"),
        version=int64_column(batch, "version"),
        value=matrix_column(batch, "value"),
        slots={name: matrix_column(batch, name) for name in table.optimizer.slot_names()},
        time=int64_column(batch, "time") if "time" in names else None,
        blocks=int64_column(batch, "blocks") if "blocks" in names else None,
        rank=int64_column(batch, "rank") if "rank" in names else None,
        rank_refresh=int64_column(batch, "rank_refresh") if "rank_refresh" in names else None,
    )
