"""What the command line does with checkpoints: compact a chain into a full one, compare two."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import fs

from deeprec_spark.checkpoint.chains import load_chain, table_chain
from deeprec_spark.checkpoint.directory import begin, commit, compact_directory, model_dir_of
from deeprec_spark.checkpoint.manifest import FileRecord, Manifest
from deeprec_spark.embedding.filesystem import make_directory, redacted, resolve
from deeprec_spark.embedding.local_snapshot import SavedStore
from deeprec_spark.embedding.store import CheckpointFile
from deeprec_spark.embedding.table_chain import TableChain, with_schema
from deeprec_spark.embedding.table_files import (
    BLOOM_SCHEMA,
    FILTERED_SCHEMA,
    TableWriter,
    int64_column,
    write_json,
)

Progress = Callable[[str, int], None]
"""Told the name of a table and how many of its rows have come."""


def _quiet(table: str, rows: int) -> None:
    """No progress is shown."""


def compact(source: str, target: str | None = None, *, progress: Progress = _quiet) -> str:
    """Write a full checkpoint that equals an incremental one with all that it builds on; what is there stays.

    A few row groups are in memory at a time, whatever the size of the tables. Training may go on meanwhile: the new one
    has the time of the one that it is made of and comes right after it, before what was committed later. If pruning
    deletes what is being read, it fails.

    Args:
        source: the checkpoint, or a model directory, whose newest one is taken.
        target: a directory that does not exist; None makes a new checkpoint of the same step in the model directory,
            from which training then goes on, if nothing newer is there.
        progress: called after each batch of rows.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: see `checkpoint.chain`; all files are verified first.
        FileExistsError: something is at `target`.
        ValueError: no target is given for a checkpoint that lies in no model directory.
    """
    found = load_chain(source, verify=True)
    last, manifest = found[-1]
    if target is None:
        model_dir = model_dir_of(last)
        if model_dir is None:
            raise ValueError(
                f"Say where the full checkpoint goes: this one lies in no model directory. Received: {redacted(last)}"
            )
        target = compact_directory(model_dir, manifest.step)
    else:
        filesystem, path = resolve(target)
        if filesystem.get_file_info(path).type != fs.FileType.NotFound:
            raise FileExistsError(f"The target exists. Received: {redacted(target)!r}")
    begin(target, alone=False)
    save_id = uuid.uuid4().hex
    files: list[CheckpointFile] = []
    for table in manifest.tables:
        files += _compact_table(table_chain(found, table.name), target, progress)
    copied = [file for file in manifest.files_of(None) if file.path.startswith("dense/")]
    _copy_files(last, target, copied)
    filesystem, root = resolve(target)
    info = {
        "step": SavedStore.read(last).step,
        "shard_index": 0,
        "num_shards": 1,
        "tables": sorted(table.name for table in manifest.tables),
        "save_id": save_id,
        "base": None,
    }
    files.append(write_json(filesystem, root, "store-00000.json", info))
    changes = {
        "kind": "full",
        "base": None,
        "base_id": None,
        "save_id": save_id,
        "files": (*(FileRecord.of(file) for file in files), *copied),
    }
    commit(target, Manifest.model_validate({**dict(manifest), **changes}))
    return target


def _compact_table(chain: TableChain, target: str, progress: Progress) -> list[CheckpointFile]:
    table = chain.table
    filesystem, root = resolve(target)
    writer = TableWriter(
        filesystem, root, table, {**chain.last.info, "changed_only": False, **_clocks(chain)}, shard_index=0
    )
    schema = chain.last.schema

    def rows() -> Iterator[pa.RecordBatch]:
        done = 0
        for batch in chain.rows(ordered=True):
            yield with_schema(batch, schema)
            done += len(batch)
            progress(table, done)

    files = writer.write("part", schema, rows(), at_least=1)
    counts = (with_schema(batch, FILTERED_SCHEMA) for batch in chain.filtered(ordered=True))
    files += writer.write("filtered", FILTERED_SCHEMA, counts)
    if chain.last.blooms:
        counters = (
            pa.record_batch(
                [pa.array([index], pa.int32()), pa.array([data], pa.binary())], schema=BLOOM_SCHEMA
            )
            for index, data in chain.last.bloom()
        )
        files += writer.write_bloom(counters)
    return files


def _clocks(chain: TableChain) -> dict[str, Any]:
    clocks: dict[str, Any] = {"updates": chain.last.updates, "calls": chain.last.calls}
    if "ranks" in chain.last.info:
        thresholds = chain.last.rank_thresholds(0, 1)
        clocks["ranks"] = {
            "shard_index": 0,
            "refreshes": chain.last.rank_refreshes,
            "thresholds": thresholds,
        }
    return clocks


def _copy_files(source: str, target: str, files: Sequence[FileRecord]) -> None:
    origin, from_root = resolve(source)
    filesystem, root = resolve(target)
    for file in files:
        place = f"{root}/{file.path}"
        make_directory(filesystem, place.rpartition("/")[0])
        fs.copy_files(
            f"{from_root}/{file.path}", place, source_filesystem=origin, destination_filesystem=filesystem
        )


@dataclass
class TableDifference:
    """How one table differs between two checkpoints; rows that only one has are None where a table is missing.

    Norms are L2 norms of all values of the table; `change_norm` is that of the difference over the rows that both have.
    """

    name: str
    rows_before: int | None = 0
    rows_after: int | None = 0
    added: int = 0
    removed: int = 0
    changed: int = 0
    norm_before: float = 0.0
    norm_after: float = 0.0
    change_norm: float = 0.0


def difference(before: str, after: str, *, progress: Progress = _quiet) -> list[TableDifference]:
    """Compare two checkpoints table by table, a few buckets at a time.

    A row is changed if its value, frequency or version is another.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: see `checkpoint.chain`; sizes are checked.
        ValueError: a table has another dimension; names both.
    """
    chains = [load_chain(path) for path in (before, after)]
    names = [{table.name for table in found[-1][1].tables} for found in chains]
    differences = []
    for name in sorted(names[0] | names[1]):
        sides = [
            table_chain(found, name) if name in there else None
            for found, there in zip(chains, names, strict=True)
        ]
        differences.append(_table_difference(name, sides[0], sides[1], progress))
    return differences


def _table_difference(
    name: str, before: TableChain | None, after: TableChain | None, progress: Progress
) -> TableDifference:
    found = TableDifference(name)
    sides = [side for side in (before, after) if side is not None]
    windows = sides[0].windows(rows=max(side.num_rows for side in sides))
    widths = [int(side.last.info["table"]["embedding_dim"]) for side in sides]
    if len(set(widths)) > 1:
        raise ValueError(
            f"Table {name!r} has another embedding_dim. Received: {widths[0]} before, {widths[1]} after"
        )
    nothing: Iterator[list[pa.RecordBatch]] = iter([[]] * len(windows))
    streams = [
        nothing if side is None else side.by_window(windows, ["key", "value", "frequency", "version"])
        for side in (before, after)
    ]
    squares = np.zeros(3)
    done = 0
    for old, new in zip(*streams, strict=True):
        one, two = _Rows(old, widths[0]), _Rows(new, widths[0])
        _, left, right = np.intersect1d(one.keys, two.keys, assume_unique=True, return_indices=True)
        delta = two.values[right].astype(np.float64) - one.values[left]
        same = (one.values[left] == two.values[right]).all(axis=1)
        same &= (one.numbers[left] == two.numbers[right]).all(axis=1)
        found.changed += int((~same).sum())
        found.added += len(two.keys) - len(left)
        found.removed += len(one.keys) - len(left)
        found.rows_before = (found.rows_before or 0) + len(one.keys)
        found.rows_after = (found.rows_after or 0) + len(two.keys)
        squares += [_square(one.values), _square(two.values), _square(delta)]
        done += max(len(one.keys), len(two.keys))
        progress(name, done)
    found.norm_before, found.norm_after, found.change_norm = np.sqrt(squares).tolist()
    if before is None:
        found.rows_before = None
    if after is None:
        found.rows_after = None
    return found


class _Rows:
    """The rows of a few buckets as arrays."""

    def __init__(self, batches: Sequence[pa.RecordBatch], dim: int) -> None:
        self.keys: npt.NDArray[np.int64] = _joined(
            [int64_column(batch, "key") for batch in batches], np.int64
        )
        flat = [batch.column("value").flatten().to_numpy(zero_copy_only=False) for batch in batches]
        self.values: npt.NDArray[np.float32] = _joined(flat, np.float32).reshape(-1, dim)
        numbers = [
            np.stack([int64_column(batch, "frequency"), int64_column(batch, "version")], 1)
            for batch in batches
        ]
        self.numbers: npt.NDArray[np.int64] = (
            np.concatenate(numbers) if numbers else np.empty((0, 2), np.int64)
        )


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _square(values: npt.NDArray[Any]) -> float:
    return float((values.astype(np.float64) ** 2).sum())
