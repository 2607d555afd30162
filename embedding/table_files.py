"""The Parquet files of a checkpoint: rows of tables, admission counts, dense vectors.

    tables/<table>/part-<shard>-<k>.parquet      key, frequency, version, value, one list column for each slot;
                                                 time with TimeEvict, blocks with a dynamic dimension
    tables/<table>/filtered-<shard>-<k>.parquet  key, frequency: keys that the admission filter is still counting
    tables/<table>/bloom-<shard>.parquet         bucket, counters of a CBFFilter
    dense/<name>-<shard>.parquet                 value, one column for each slot

Rows are sorted by bucket and written in row groups of bounded size, so neither side holds a table in memory. The
schema metadata says what wrote a file; a row group's range of buckets lets a server skip what it does not hold.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket
from deeprec_spark.embedding.options import CBFFilter
from deeprec_spark.embedding.store import CheckpointFile, TableSpec
from deeprec_spark.embedding.variable import EmbeddingVariable, RowBlock

logger = logging.getLogger(__name__)

GROUP_ROWS = 65536
FILE_ROWS = 1 << 22
METADATA_KEY = b"deeprec_spark"
_GROUPS_KEY = b"deeprec_spark.buckets"

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


def table_directory(name: str) -> str:
    """Directory of a table below the checkpoint; any table name is a legal path."""
    quoted = quote(name, safe="")
    return "tables/" + (quoted.replace(".", "%2E") if quoted.strip(".") == "" else quoted)


def bucket_range(shard_index: int, num_shards: int) -> tuple[int, int]:
    """The buckets [first, last) that one of `num_shards` servers holds."""
    return -(-shard_index * NUM_BUCKETS // num_shards), -(-(shard_index + 1) * NUM_BUCKETS // num_shards)


def write_table(
    root: Path, spec: TableSpec, table: EmbeddingVariable, *, shard_index: int, step: int
) -> list[CheckpointFile]:
    """Write one table's rows and counts below `root`; returns the files, at least one."""
    directory = table_directory(spec.name)
    (root / directory).mkdir(parents=True, exist_ok=True)
    info = {
        "table": spec_to_dict(spec),
        "updates": table.core.updates,
        "calls": table.core.calls,
        "step": step,
    }
    row_keys, filtered_keys, filtered_counts = table.keys()
    files = []
    schema = _row_schema(table)
    for part, start in enumerate(range(0, max(len(row_keys), 1), FILE_ROWS)):
        keys = row_keys[start : start + FILE_ROWS]
        path = f"{directory}/part-{shard_index:05d}-{part:05d}.parquet"
        blocks = (_row_batch(block, schema) for block in table.export(GROUP_ROWS, keys))
        files.append(_write(root, path, spec.name, schema, info, blocks))
    for part, start in enumerate(range(0, len(filtered_keys), FILE_ROWS)):
        keys = filtered_keys[start : start + FILE_ROWS]
        counts = filtered_counts[start : start + FILE_ROWS]
        path = f"{directory}/filtered-{shard_index:05d}-{part:05d}.parquet"
        files.append(_write(root, path, spec.name, _FILTERED_SCHEMA, info, _count_batches(keys, counts)))
    if _bloom_of(spec) is not None:
        path = f"{directory}/bloom-{shard_index:05d}.parquet"
        files.append(_write(root, path, spec.name, _BLOOM_SCHEMA, info, _bloom_batches(table)))
    return files


def read_table(
    root: Path, spec: TableSpec, table: EmbeddingVariable, *, shard_index: int, num_shards: int
) -> None:
    """Replace a table's content by what any number of shards wrote; a ValueError names both sides of a mismatch."""
    directory = root / table_directory(spec.name)
    parts = sorted(directory.glob("part-*.parquet"))
    if not parts:
        raise ValueError(f"The checkpoint has no table {spec.name!r}. Received: no part files in {directory}")
    first, last = bucket_range(shard_index, num_shards)
    table.clear()
    updates = calls = 0
    for path in parts:
        with pq.ParquetFile(path) as source:
            info = _read_info(source, path)
            check_spec(TableSpecDict(info["table"]), spec)
            updates, calls = max(updates, int(info["updates"])), max(calls, int(info["calls"]))
            for batch in _batches_in(source, first, last):
                table.import_rows(_block(batch, table))
    for path in sorted(directory.glob("filtered-*.parquet")):
        with pq.ParquetFile(path) as source:
            for batch in _batches_in(source, first, last):
                table.import_filtered(_int64(batch, "key"), _int64(batch, "frequency"))
    for path in sorted(directory.glob("bloom-*.parquet")):
        with pq.ParquetFile(path) as source:
            _read_bloom(source, _read_info(source, path), spec, table, (first, last))
    table.core.updates, table.core.calls = updates, calls


def write_vector(
    root: Path, name: str, columns: Mapping[str, Float32Array], info: Mapping[str, Any], *, shard_index: int
) -> CheckpointFile:
    """Write float32 columns of equal length as `dense/<name>-<shard>.parquet`."""
    (root / "dense").mkdir(parents=True, exist_ok=True)
    schema = pa.schema([pa.field(column, pa.float32()) for column in columns])
    batch = pa.record_batch([pa.array(values) for values in columns.values()], schema=schema)
    pieces = (batch.slice(start, 1 << 20) for start in range(0, max(len(batch), 1), 1 << 20))
    return _write(root, f"dense/{name}-{shard_index:05d}.parquet", None, schema, info, pieces)


def read_vector(root: Path, name: str) -> tuple[dict[str, Float32Array], dict[str, Any]] | None:
    """The whole vector that any number of shards wrote, by column, and its metadata; None where there is none."""
    paths = sorted((root / "dense").glob(f"{name}-*.parquet"))
    parts = []
    for path in paths:
        with pq.ParquetFile(path) as source:
            parts.append((_read_info(source, path), source.read()))
    if not parts:
        return None
    parts.sort(key=lambda part: int(part[0]["start"]))
    expected = 0
    for info, data in parts:
        if int(info["start"]) != expected:
            raise ValueError(
                f"Dense file for elements from {expected} on is missing. Received: {[p.name for p in paths]}"
            )
        expected += data.num_rows
    info = parts[0][0]
    if expected != int(info["total"]):
        raise ValueError(
            f"Dense files hold {expected} elements of {info['total']}. Received: {[p.name for p in paths]}"
        )
    merged = pa.concat_tables([data for _, data in parts])
    columns = {
        column: np.ascontiguousarray(merged.column(column).to_numpy(), dtype=np.float32)
        for column in merged.column_names
    }
    return columns, info


TableSpecDict = dict[str, Any]
_FIXED_OPTIONS = ("init_option", "value_dtype", "dynamic_dimension")


def spec_to_dict(spec: TableSpec) -> TableSpecDict:
    """A table's description as JSON values."""
    return {
        "name": spec.name,
        "embedding_dim": spec.embedding_dim,
        "option": spec.option.to_dict(),
        "optimizer": None if spec.optimizer is None else spec.optimizer.to_dict(),
        "seed": spec.seed,
    }


def check_spec(saved: TableSpecDict, spec: TableSpec) -> None:
    """A ValueError that names both sides unless rows saved under one spec can go on under another.

    Dimension (and its blocks), optimizer (learning rate aside), seed, start values and value type must be equal.
    Filter, eviction and storage may change: admitted rows stay admitted, and counted keys are judged anew at their next
    occurrence.
    """
    wanted = spec_to_dict(spec)
    for data in (saved, wanted):
        if data["optimizer"] is None:
            data["optimizer"] = {"type": "SGD", "momentum": 0.0, "nesterov": False}
    pairs = [
        ("embedding_dim", saved["embedding_dim"], wanted["embedding_dim"]),
        ("optimizer", _without_rate(saved["optimizer"]), _without_rate(wanted["optimizer"])),
        ("seed", saved["seed"], wanted["seed"]),
        *((name, saved["option"][name], wanted["option"][name]) for name in _FIXED_OPTIONS),
    ]
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise ValueError(
                f"Table {spec.name!r} of the checkpoint has another {name} than the table to restore. "
                f"Received: {name}={theirs} in the checkpoint, {ours} in the table"
            )


def _without_rate(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in optimizer.items() if key != "learning_rate"}


class _HashingFile:
    """A binary file that knows the SHA-256 of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.sha256.update(view)
        self.num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._file.flush()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


@contextmanager
def hashing_file(path: Path) -> Iterator[_HashingFile]:
    """A new file, flushed to the disk at the end."""
    with path.open("wb") as file:
        yield (sink := _HashingFile(file))
        file.flush()
        os.fsync(file.fileno())
        sink.closed = True


def _write(
    root: Path,
    path: str,
    table: str | None,
    schema: pa.Schema,
    info: Mapping[str, Any],
    batches: Iterator[pa.RecordBatch],
) -> CheckpointFile:
    rows = 0
    groups: list[tuple[int, int]] = []
    with (
        hashing_file(root / path) as sink,
        pq.ParquetWriter(
            sink,
            schema.with_metadata({METADATA_KEY: json.dumps(info).encode()}),
            use_dictionary=False,
            compression="NONE",
            write_statistics=False,
        ) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch, row_group_size=max(len(batch), 1))
            rows += len(batch)
            if "key" in schema.names:
                ends = bucket(_int64(batch, "key")[[0, -1]]) if len(batch) else np.zeros(2, np.int32)
                groups.append((int(ends[0]), int(ends[1])))
        writer.add_key_value_metadata({_GROUPS_KEY.decode(): json.dumps(groups)})
    return CheckpointFile(path, table, rows, sink.num_bytes, sink.sha256.hexdigest())


_FILTERED_SCHEMA = pa.schema([pa.field("key", pa.int64()), pa.field("frequency", pa.int64())])


def _row_schema(table: EmbeddingVariable) -> pa.Schema:
    columns = table.core.export_rows(np.empty(0, np.int64))
    integers = [name for name in ("frequency", "version", "time", "blocks") if name in columns]
    fields = [pa.field(name, pa.int64()) for name in ("key", *integers)]
    widths = {"value": table.embedding_dim} | {name: slot.shape[1] for name, slot in columns["slots"].items()}
    fields += [pa.field(name, pa.list_(pa.float32(), width)) for name, width in widths.items()]
    return pa.schema(fields)


def _row_batch(block: RowBlock, schema: pa.Schema) -> pa.RecordBatch:
    columns: dict[str, Any] = {"key": block.key, "frequency": block.frequency, "version": block.version}
    columns |= {"time": block.time, "blocks": block.blocks, "value": block.value, **block.slots}
    arrays = []
    for field in schema:
        values = columns[field.name]
        if pa.types.is_fixed_size_list(field.type):
            values = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), field.type.list_size)
        arrays.append(pa.array(values) if isinstance(values, np.ndarray) else values)
    return pa.record_batch(arrays, schema=schema)


def _count_batches(keys: Int64Array, counts: Int64Array) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(keys), GROUP_ROWS):
        part = slice(start, start + GROUP_ROWS)
        yield pa.record_batch([pa.array(keys[part]), pa.array(counts[part])], schema=_FILTERED_SCHEMA)


def _read_info(source: pq.ParquetFile, path: Path) -> dict[str, Any]:
    metadata = source.schema_arrow.metadata or {}
    if METADATA_KEY not in metadata:
        raise ValueError(
            f"Not a checkpoint file: its schema has no {METADATA_KEY.decode()} metadata. Received: {path}"
        )
    info: dict[str, Any] = json.loads(metadata[METADATA_KEY])
    return info


def _batches_in(source: pq.ParquetFile, first: int, last: int) -> Iterator[pa.RecordBatch]:
    """The rows whose bucket is within [first, last), a row group at a time."""
    metadata = source.metadata.metadata or {}
    groups = json.loads(metadata[_GROUPS_KEY]) if _GROUPS_KEY in metadata else None
    for index in range(source.num_row_groups):
        if groups is not None and (groups[index][1] < first or groups[index][0] >= last):
            continue
        data = source.read_row_group(index).combine_chunks()
        for batch in data.to_batches():
            places = bucket(_int64(batch, "key"))
            inside = (places >= first) & (places < last)
            yield batch if inside.all() else batch.filter(pa.array(inside))


def _int64(batch: pa.RecordBatch, name: str) -> Int64Array:
    column: Int64Array = batch.column(name).to_numpy(zero_copy_only=False)
    return column


def _block(batch: pa.RecordBatch, table: EmbeddingVariable) -> RowBlock:
    def matrix(name: str) -> Float32Array:
        flat: Float32Array = batch.column(name).flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(len(batch), -1 if len(batch) else table.embedding_dim)

    names = batch.schema.names
    return RowBlock(
        key=_int64(batch, "key"),
        frequency=_int64(batch, "frequency"),
        version=_int64(batch, "version"),
        value=matrix("value"),
        slots={name: matrix(name) for name in table.optimizer.slot_names()},
        time=_int64(batch, "time") if "time" in names else None,
        blocks=_int64(batch, "blocks") if "blocks" in names else None,
    )


_BLOOM_SCHEMA = pa.schema([pa.field("bucket", pa.int32()), pa.field("counters", pa.binary())])


def _bloom_of(spec: TableSpec) -> CBFFilter | None:
    option = spec.option.filter_option
    return option if isinstance(option, CBFFilter) and option.filter_freq > 1 else None


def _bloom_batches(table: EmbeddingVariable) -> Iterator[pa.RecordBatch]:
    for first in range(0, NUM_BUCKETS, 64):
        counters = table.core.export_bloom(first, first + 64)
        used = np.flatnonzero(counters.any(axis=1))
        if len(used):
            values = pa.array([counters[index].tobytes() for index in used], pa.binary())
            yield pa.record_batch([pa.array((used + first).astype(np.int32)), values], schema=_BLOOM_SCHEMA)


def _read_bloom(
    source: pq.ParquetFile,
    info: Mapping[str, Any],
    spec: TableSpec,
    table: EmbeddingVariable,
    own: tuple[int, int],
) -> None:
    now, then = _bloom_of(spec), info["table"]["option"]["filter_option"]
    geometry = ("max_element_size", "false_positive_probability", "counter_type")
    if now is None or any(then[name] != getattr(now, name) for name in geometry):
        logger.warning(
            "Table %r has another filter than its checkpoint (%s): counting starts anew", spec.name, then
        )
        return
    for batch in source.iter_batches():
        for index, counters in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            if own[0] <= index < own[1]:
                table.core.import_bloom(index, counters.as_py())
