"""The sorted, memory-mappable form of a checkpoint that SnapshotStore reads, built once on a host.

<cache>/<manifest fingerprint>-<boot>/<table>.keys.npy     int64 [rows], ascending
                                     /<table>.values.npy   float32 [rows, dim]
                                     /dense.npy, state.npy
<cache>/<manifest fingerprint>-<boot>.lock

Files are not flushed to the disk, so they hold for one boot of the host: another boot sorts anew.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from deeprec_spark.checkpoint.chains import load_chain, table_chain
from deeprec_spark.checkpoint.errors import CheckpointCorruptError
from deeprec_spark.checkpoint.locking import file_lock
from deeprec_spark.checkpoint.manifest import FileRecord, Manifest, TableRecord
from deeprec_spark.embedding.filesystem import redacted, resolve
from deeprec_spark.embedding.store import Float32Array, Int64Array
from deeprec_spark.embedding.table_chain import TableChain
from deeprec_spark.embedding.table_files import int64_column

logger = logging.getLogger(__name__)

KEPT_SNAPSHOTS = 3
_BATCH_ROWS = 131_072


@dataclass(frozen=True)
class SortedRows:
    """Rows of one table: int64 `[rows]` ascending keys without repeats, float32 `[rows, dim]` values; memory maps."""

    keys: Int64Array
    values: Float32Array


@contextmanager
def prepared(path: str, manifest: Manifest, cache: Path, lock_timeout: float) -> Iterator[Path]:
    """The folder of a checkpoint's sorted files, made if it is not there; nobody deletes it inside the block.

    Raises:
        CheckpointCorruptError: A file of the checkpoint is missing or damaged.
        TimeoutError: Another process works on it for longer than `lock_timeout` seconds.
    """
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    if cache.stat().st_uid != os.getuid():
        raise PermissionError(
            "The cache folder belongs to another user, who could change what predictions read: set "
            f"DEEPREC_SPARK_CACHE or cache_dir. Received: {str(cache)!r}"
        )
    folder = cache / f"{manifest.fingerprint}-{_boot()}"
    with file_lock(cache / f"{folder.name}.lock", lock_timeout):
        if folder.is_dir():
            os.utime(folder)
        else:
            _build(folder, path, manifest)
        yield folder
    _drop_old(cache, folder)


def open_table(folder: Path, table: str) -> SortedRows:
    """Map the sorted rows of a table."""
    keys, values = _table_files(folder, table)
    return SortedRows(_open(keys), _open(values))


def open_dense(folder: Path) -> tuple[Float32Array, Float32Array]:
    """Map the dense parameters and the state."""
    return _open(folder / "dense.npy"), _open(folder / "state.npy")


def _build(folder: Path, path: str, manifest: Manifest) -> None:
    logger.info("Sorting the tables of %s into %s", redacted(path), folder)
    found = load_chain(path, verify=True)
    building = folder.parent / f"{folder.name}.{uuid.uuid4().hex}.building"
    building.mkdir()
    try:
        for table in manifest.tables:
            _write_table(building, path, table, table_chain(found, table.name))
        _write_vector(building / "dense.npy", path, manifest, "part-", manifest.model.dense_size)
        _write_vector(building / "state.npy", path, manifest, "state-", manifest.model.state_size)
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_table(folder: Path, path: str, table: TableRecord, rows_of: TableChain) -> None:
    """Two passes: the keys decide where each row goes, then the values are written there batch by batch."""
    parts = [int64_column(batch, "key") for batch in rows_of.rows(columns=["key"])]
    keys = np.concatenate(parts) if parts else np.empty(0, np.int64)
    order = np.argsort(keys, kind="stable")
    keys_file, values_file = _table_files(folder, table.name)
    ascending = keys[order]
    if len(ascending) > 1 and (ascending[1:] == ascending[:-1]).any():
        repeated = int(ascending[1:][ascending[1:] == ascending[:-1]][0])
        raise CheckpointCorruptError(
            f"Table {table.name!r} of the checkpoint holds a key twice. Received: key={repeated}, {redacted(path)}"
        )
    np.save(keys_file, ascending)
    del ascending, keys, parts
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    del order
    shape = (len(position), table.embedding_dim)
    values = _create(values_file, shape)
    start = 0
    for batch in rows_of.rows(columns=["key", "value"]):
        column = batch.column("value")
        rows = column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
        if len(column) and rows.shape[1] != table.embedding_dim:
            raise CheckpointCorruptError(
                f"Rows of table {table.name!r} have {rows.shape[1]} elements instead of {table.embedding_dim}. "
                f"Received: {redacted(path)}"
            )
        values[position[start : start + len(rows)]] = rows
        start += len(rows)


def _write_vector(target: Path, path: str, manifest: Manifest, prefix: str, size: int) -> None:
    files = [file for file in manifest.files_of(None) if file.path.startswith(f"dense/{prefix}")]
    files.sort(key=_name)  # by shard: each holds the elements after those of the one before it
    parts = [column.to_numpy(zero_copy_only=False) for column in _column(path, files, "value")]
    vector = np.concatenate(parts) if parts else np.empty(0, np.float32)
    if len(vector) != size:
        raise CheckpointCorruptError(
            f"The checkpoint holds {len(vector)} dense numbers ({prefix}*) and its manifest says {size}. "
            f"Received: {redacted(path)}"
        )
    np.save(target, np.ascontiguousarray(vector, np.float32))


def _name(file: FileRecord) -> str:
    return file.path.rpartition("/")[2]


def _column(path: str, files: list[FileRecord], name: str) -> Iterator[Any]:
    filesystem, root = resolve(path)
    for file in files:
        with pq.ParquetFile(f"{root}/{file.path}", filesystem=filesystem) as parquet:
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=[name]):
                yield batch.column(0)


def _table_files(folder: Path, table: str) -> tuple[Path, Path]:
    name = quote(table, safe="")
    return folder / f"{name}.keys.npy", folder / f"{name}.values.npy"


def _create(path: Path, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    if shape[0] == 0:  # nothing can be mapped
        empty = np.empty(shape, np.float32)
        np.save(path, empty)
        return empty
    array: npt.NDArray[np.float32] = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    # A full disk is an OSError here; met while writing to the map, it would kill the process by SIGBUS.
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _boot() -> str:
    identity = Path("/proc/sys/kernel/random/boot_id")
    return identity.read_text().strip().replace("-", "")[:12] if identity.exists() else "0"


def _open(path: Path) -> npt.NDArray[Any]:
    # An empty array cannot be mapped, and a header is all that there is to read.
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r" if shape[0] else None, allow_pickle=False)
    return array


def _drop_old(cache: Path, current: Path) -> None:
    """Delete what was used longest ago, and what a killed process left half built.

    Whoever has a deleted file mapped keeps it until it closes it.
    """
    folders = [entry for entry in cache.iterdir() if entry.is_dir()]
    complete = sorted(
        (entry for entry in folders if not entry.suffix), key=lambda entry: entry.stat().st_mtime
    )
    half_built = [entry for entry in folders if entry.suffix == ".building"]
    for folder in [*complete[:-KEPT_SNAPSHOTS], *half_built]:
        if folder == current:
            continue
        try:
            with file_lock(cache / f"{folder.name.partition('.')[0]}.lock", timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        except TimeoutError:
            logger.info("Kept an old snapshot that another process is opening: %s", folder)
