"""The Parquet files of a checkpoint: rows of tables, admission counts, dense vectors; how they are written.

    tables/<table>/part-<shard>-<k>.parquet        key, frequency, version, value (a list), and the bytes of the float32
                                                   of each slot; time with TimeEvict, blocks with a dynamic dimension
    tables/<table>/filtered-<shard>-<k>.parquet    key, frequency: keys that the admission filter is still counting
    tables/<table>/tombstones-<shard>-<k>.parquet  key: what an incremental checkpoint takes away
    tables/<table>/bloom-<shard>.parquet           bucket, counters of a CBFFilter
    dense/<name>-<shard>.parquet                   value, one column for each slot

Rows are sorted by bucket and written in row groups of bounded size, so neither side holds a table in memory. The
schema metadata says what wrote a file; a row group's range of buckets lets a server skip what it does not hold.
Files go to any pyarrow filesystem; their checksum is known when they are written. `table_chain` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from deeprec_spark.embedding.checksum import Checksum
from deeprec_spark.embedding.filesystem import make_directory, open_output
from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket
from deeprec_spark.embedding.options import CBFFilter
from deeprec_spark.embedding.store import CheckpointFile, TableSpec
from deeprec_spark.embedding.variable import EmbeddingVariable, RowBlock

GROUP_ROWS = 65536
FILE_ROWS = 1 << 22
PAGE_BYTES = 1 << 18
"""Of an encoded page. Arrow's 1 MB comes fresh from the system each time: a save took 40 % more processor time."""
METADATA_KEY = b"deeprec_spark"
GROUPS_KEY = b"deeprec_spark.buckets"

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
TableSpecDict = dict[str, Any]


class TableState(Protocol):
    """A table's content of one moment, as `EmbeddingVariable.snapshot` gives it."""

    @property
    def changed_only(self) -> bool: ...
    @property
    def updates(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def rank_refreshes(self) -> int: ...
    @property
    def rank_thresholds(self) -> list[int]: ...
    @property
    def tombstones(self) -> Int64Array: ...

    def blocks(self, rows: int = ...) -> Iterator[RowBlock]: ...
    def filtered(self, rows: int = ...) -> Iterator[tuple[Int64Array, Int64Array]]: ...
    def bloom(self, first: int, last: int) -> npt.NDArray[np.uint8]: ...
    def close(self) -> None: ...


def table_directory(name: str) -> str:
    """Directory of a table below the checkpoint; any table name is a legal path."""
    quoted = quote(name, safe="")
    return "tables/" + (quoted.replace(".", "%2E") if quoted.strip(".") == "" else quoted)


def bucket_range(shard_index: int, num_shards: int) -> tuple[int, int]:
    """The buckets [first, last) that one of `num_shards` servers holds."""
    return -(-shard_index * NUM_BUCKETS // num_shards), -(-(shard_index + 1) * NUM_BUCKETS // num_shards)


def write_table(
    filesystem: Any,
    root: str,
    spec: TableSpec,
    table: EmbeddingVariable,
    state: TableState,
    *,
    shard_index: int,
    step: int,
) -> list[CheckpointFile]:
    """Write one table's rows, counts and (of an incremental state) tombstones below `root`; at least one file.

    Two threads share the work: one takes rows from the table while the other encodes and writes them.
    """
    info = {
        "table": spec_to_dict(spec),
        "updates": state.updates,
        "calls": state.calls,
        "step": step,
        "changed_only": state.changed_only,
    }
    if state.rank_thresholds:
        info["ranks"] = {
            "shard_index": shard_index,
            "refreshes": state.rank_refreshes,
            "thresholds": state.rank_thresholds,
        }
    schema = row_schema(table)
    batches = (row_batch(block, schema) for block in state.blocks(GROUP_ROWS) if len(block))
    writer = TableWriter(filesystem, root, spec.name, info, shard_index=shard_index)
    files = writer.write("part", schema, batches, at_least=1)
    files += writer.write("filtered", FILTERED_SCHEMA, _filtered_batches(state))
    if state.changed_only:
        files += writer.write("tombstones", TOMBSTONES_SCHEMA, _key_batches(state.tombstones))
    if bloom_of(spec) is not None:
        files += writer.write_bloom(_bloom_batches(state))
    return files


class TableWriter:
    """Writes the files of one table and shard; batches must come sorted by bucket."""

    def __init__(
        self, filesystem: Any, root: str, table: str, info: Mapping[str, Any], *, shard_index: int
    ) -> None:
        self._filesystem = filesystem
        self._root = root
        self._table = table
        self._info = info
        self._shard_index = shard_index
        make_directory(filesystem, f"{root}/{table_directory(table)}")

    def write(
        self, kind: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch], *, at_least: int = 0
    ) -> list[CheckpointFile]:
        """Files `<kind>-<shard>-<k>.parquet` of at most FILE_ROWS rows, `at_least` so many."""
        files: list[CheckpointFile] = []
        with ThreadPoolExecutor(1, thread_name_prefix="rows") as pool:
            waiting = _Peekable(_ahead(batches, pool))
            while waiting.peek() is not None or len(files) < at_least:
                name = f"{kind}-{self._shard_index:05d}-{len(files):05d}.parquet"
                files.append(self._write(name, schema, _first_rows(waiting, FILE_ROWS)))
        return files

    def write_bloom(self, batches: Iterator[pa.RecordBatch]) -> list[CheckpointFile]:
        """The file of a Bloom filter's counters; they are mostly zero, so it is compressed."""
        name = f"bloom-{self._shard_index:05d}.parquet"
        return [self._write(name, BLOOM_SCHEMA, batches, compression="ZSTD")]

    def _write(
        self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], compression: str = "NONE"
    ) -> CheckpointFile:
        path = f"{table_directory(self._table)}/{name}"
        return _write(
            self._filesystem, self._root, path, self._table, schema, self._info, batches, compression
        )


def write_vector(
    filesystem: Any,
    root: str,
    name: str,
    columns: Mapping[str, Float32Array],
    info: Mapping[str, Any],
    *,
    shard_index: int,
) -> CheckpointFile:
    """Write float32 columns of equal length as `dense/<name>-<shard>.parquet`."""
    make_directory(filesystem, f"{root}/dense")
    schema = pa.schema([pa.field(column, pa.float32()) for column in columns])
    batch = pa.record_batch([pa.array(values) for values in columns.values()], schema=schema)
    pieces = (batch.slice(start, 1 << 20) for start in range(0, max(len(batch), 1), 1 << 20))
    path = f"dense/{name}-{shard_index:05d}.parquet"
    return _write(filesystem, root, path, None, schema, info, pieces)


def write_json(filesystem: Any, root: str, name: str, content: Mapping[str, Any]) -> CheckpointFile:
    """Write a small JSON file below `root`."""
    make_directory(filesystem, root)
    with hashing_file(filesystem, f"{root}/{name}") as sink:
        sink.write(json.dumps(content).encode())
    return CheckpointFile(name, None, 0, sink.num_bytes, str(sink.checksum))


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


def check_spec(saved: TableSpecDict, spec: TableSpec, *, values_only: bool = False) -> None:
    """A ValueError that names both sides unless rows saved under one spec can go on under another.

    Dimension (and its blocks), optimizer (learning rate aside), seed, start values and value type must be equal.
    Filter, eviction and storage may change: admitted rows stay admitted, and counted keys are judged anew at their next
    occurrence. With `values_only` only the dimension must be equal.
    """
    wanted = spec_to_dict(spec)
    saved = dict(saved)
    for data in (saved, wanted):
        if data["optimizer"] is None:
            data["optimizer"] = {"type": "SGD", "momentum": 0.0, "nesterov": False}
    pairs = [("embedding_dim", saved["embedding_dim"], wanted["embedding_dim"])]
    if not values_only:
        pairs += [
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


class HashingFile:
    """A binary file that knows the checksum of what was written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.checksum = Checksum()
        self.num_bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.checksum.update(view)
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
def hashing_file(filesystem: Any, path: str) -> Iterator[HashingFile]:
    """A new file, safe from a crash at the end; an OSError names it."""
    try:
        with open_output(filesystem, path) as file:
            yield (sink := HashingFile(file))
            sink.closed = True
    except OSError as error:
        message = f"Cannot write a file of a checkpoint: {error}. Received: {path!r}"
        raise (OSError(error.errno, message) if error.errno else OSError(message)) from error


def _write(
    filesystem: Any,
    root: str,
    path: str,
    table: str | None,
    schema: pa.Schema,
    info: Mapping[str, Any],
    batches: Iterable[pa.RecordBatch],
    compression: str = "NONE",
) -> CheckpointFile:
    rows = 0
    groups: list[tuple[int, int]] = []
    with (
        hashing_file(filesystem, f"{root}/{path}") as sink,
        pq.ParquetWriter(
            sink,
            schema.with_metadata({METADATA_KEY: json.dumps(info).encode()}),
            use_dictionary=False,
            compression=compression,
            write_statistics=False,
            data_page_size=PAGE_BYTES,
        ) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch, row_group_size=max(len(batch), 1))
            rows += len(batch)
            if "key" in schema.names:
                ends = bucket(int64_column(batch, "key")[[0, -1]]) if len(batch) else np.zeros(2, np.int32)
                groups.append((int(ends[0]), int(ends[1])))
        writer.add_key_value_metadata({GROUPS_KEY.decode(): json.dumps(groups)})
    return CheckpointFile(path, table, rows, sink.num_bytes, str(sink.checksum))


# Nothing is null: Parquet then spares a level for each element, which is what its encoding costs most.
FILTERED_SCHEMA = pa.schema(
    [pa.field("key", pa.int64(), nullable=False), pa.field("frequency", pa.int64(), nullable=False)]
)
TOMBSTONES_SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False)])
BLOOM_SCHEMA = pa.schema([pa.field("bucket", pa.int32()), pa.field("counters", pa.binary())])


INTEGERS = ("frequency", "version", "time", "blocks", "rank", "rank_refresh")
"""Columns of rows, those that a table may lack among them."""


def row_schema(table: EmbeddingVariable) -> pa.Schema:
    """The columns of a table's rows."""
    columns = table.core.export_rows(np.empty(0, np.int64))
    integers = [name for name in INTEGERS if name in columns]
    fields = [pa.field(name, pa.int64(), nullable=False) for name in ("key", *integers)]
    # What others read is a list; slots are bytes, which cost a sixth of a list's time to write and to read.
    fields.append(pa.field("value", _list_of(table.embedding_dim), nullable=False))
    fields += [
        pa.field(name, pa.binary(4 * slot.shape[1]), nullable=False)
        for name, slot in columns["slots"].items()
    ]
    return pa.schema(fields)


def row_batch(block: RowBlock, schema: pa.Schema) -> pa.RecordBatch:
    """Rows as a batch of `row_schema`."""
    columns: dict[str, Any] = {"key": block.key, "frequency": block.frequency, "version": block.version}
    columns |= {
        "time": block.time,
        "blocks": block.blocks,
        "rank": block.rank,
        "rank_refresh": block.rank_refresh,
    }
    columns |= {"value": block.value, **block.slots}
    arrays = []
    for field in schema:
        values = columns[field.name]
        arrays.append(pa.array(values) if values.ndim == 1 else matrix_array(values, field.type))
    return pa.record_batch(arrays, schema=schema)


def matrix_array(values: Float32Array, kind: pa.DataType) -> pa.Array:
    """Contiguous float32 `[rows, width]` as a column of lists or of bytes."""
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=kind)
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def matrix_column(batch: pa.RecordBatch, name: str) -> Float32Array:
    """A column of lists or of bytes as float32 `[rows, width]`."""
    column = batch.column(name)
    flat: Float32Array
    if pa.types.is_fixed_size_binary(column.type):
        width = column.type.byte_width // 4
        start = column.offset * width
        flat = np.frombuffer(column.buffers()[1], np.float32)[start : start + len(column) * width]
    else:
        width = column.type.list_size
        flat = column.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), width)


def int64_column(batch: pa.RecordBatch, name: str) -> Int64Array:
    """A column as int64 `[rows]`."""
    column: Int64Array = batch.column(name).to_numpy(zero_copy_only=False)
    return column


def bloom_of(spec: TableSpec) -> CBFFilter | None:
    """The table's Bloom filter, if it has one that counts."""
    option = spec.option.filter_option
    return option if isinstance(option, CBFFilter) and option.filter_freq > 1 else None


def _list_of(width: int) -> pa.DataType:
    return pa.list_(pa.field("element", pa.float32(), nullable=False), width)


def _filtered_batches(state: TableState) -> Iterator[pa.RecordBatch]:
    for keys, counts in state.filtered(GROUP_ROWS):
        if len(keys):
            yield pa.record_batch([pa.array(keys), pa.array(counts)], schema=FILTERED_SCHEMA)


def _key_batches(keys: Int64Array) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(keys), GROUP_ROWS):
        yield pa.record_batch([pa.array(keys[start : start + GROUP_ROWS])], schema=TOMBSTONES_SCHEMA)


def _bloom_batches(state: TableState) -> Iterator[pa.RecordBatch]:
    for first in range(0, NUM_BUCKETS, 64):
        counters = state.bloom(first, first + 64)
        used = np.flatnonzero(counters.any(axis=1))
        if len(used):
            values = pa.array([counters[index].tobytes() for index in used], pa.binary())
            yield pa.record_batch([pa.array((used + first).astype(np.int32)), values], schema=BLOOM_SCHEMA)


def _ahead(batches: Iterator[pa.RecordBatch], pool: ThreadPoolExecutor) -> Iterator[pa.RecordBatch]:
    """The same batches, the next one made in the pool while the caller works on this one."""
    coming = pool.submit(next, batches, None)
    try:
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch
    finally:
        coming.cancel()


class _Peekable:
    """An iterator of batches whose next one can be looked at."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._next: pa.RecordBatch | None = next(batches, None)

    def peek(self) -> pa.RecordBatch | None:
        return self._next

    def take(self) -> pa.RecordBatch | None:
        taken, self._next = self._next, None
        if taken is not None:
            self._next = next(self._batches, None)
        return taken


def _first_rows(batches: _Peekable, limit: int) -> Iterator[pa.RecordBatch]:
    """Batches until `limit` rows have come; the one that reaches it is the last."""
    rows = 0
    while rows < limit and (batch := batches.take()) is not None:
        rows += len(batch)
        yield batch
