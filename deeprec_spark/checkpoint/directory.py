"""Checkpoint directories: begin, commit, find, verify; on local disks and any filesystem that pyarrow or fsspec knows.

<model_dir>/checkpoints/<step, 12 digits>/manifest.json      written last: it commits the rest
                                         /store-….json       what each server says it wrote
                                         /tables/<table>/…   rows, counts, tombstones
                                         /dense/…
A second checkpoint of a step lies in <step>-1, and so on: what is committed is never written over. What compaction
makes lies in <step>-compact-<8 hex digits>: it may run beside saves, which leave such directories alone.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from pyarrow import fs

from deeprec_spark.checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from deeprec_spark.checkpoint.manifest import FileRecord, Manifest
from deeprec_spark.embedding.checksum import Checksum, algorithm_of
from deeprec_spark.embedding.filesystem import (
    delete_directory,
    join,
    list_folders,
    make_directory,
    parent,
    publish,
    redacted,
    resolve,
)

MANIFEST = "manifest.json"
FOLDER = "checkpoints"
_COMPACT = "-compact-"
_NAME = re.compile(rf"(\d{{12}})(?:-([1-9]\d*)|{_COMPACT}[0-9a-f]{{8}})?")
_ABANDONED = timedelta(days=1)
_READ_BYTES = 4 << 20
_VERIFY_THREADS = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A committed checkpoint of a model directory."""

    directory: str
    name: str
    step: int
    created: str


@dataclass(frozen=True)
class Listing:
    """The committed checkpoints of a model directory: the whole ones in order, and by name what is wrong with others.

    Where one with a damaged manifest belongs in the order, nobody knows.
    """

    entries: list[Entry]
    damaged: dict[str, CheckpointCorruptError]


def directory_of(model_dir: str, step: int) -> str:
    """Where the first checkpoint of a step lies."""
    return join(model_dir, FOLDER, f"{step:012d}")


def new_directory(model_dir: str, step: int) -> str:
    """Where the next checkpoint of a step goes: beside those of it that are committed."""
    filesystem, root = resolve(join(model_dir, FOLDER))
    number = 0
    while True:
        name = f"{step:012d}" + (f"-{number}" if number else "")
        if not _exists(filesystem, f"{root}/{name}/{MANIFEST}"):
            return join(model_dir, FOLDER, name)
        number += 1


def compact_directory(model_dir: str, step: int) -> str:
    """Where a compaction goes: no other one has this name, and saves delete it only once nothing is written there."""
    return join(model_dir, FOLDER, f"{step:012d}{_COMPACT}{uuid.uuid4().hex[:8]}")


def begin(directory: str, *, alone: bool = True) -> None:
    """Make an empty directory to save into; what is there, a checkpoint or a save cut short, is deleted.

    Saves cut short beside it go too, if this one is `alone`: one save of a model runs at a time. Compactions may run
    meanwhile: they go if nothing was written there for a day. Files of an earlier save, perhaps by another number of
    servers, must not mix with those of this one.
    """
    filesystem, path = resolve(directory)
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        delete(filesystem, path)
    folder = path.rpartition("/")[0]
    if alone and folder.rpartition("/")[2] == FOLDER:
        for name in _uncommitted(filesystem, folder):
            logger.warning("Deleting a save that was cut short: %s", f"{folder}/{name}")
            delete(filesystem, f"{folder}/{name}")
    make_directory(filesystem, path)


def commit(directory: str, manifest: Manifest) -> None:
    """Write the manifest: until then the directory is no checkpoint.

    One PUT on an object store, elsewhere a file beside its name that is renamed: readers see all of it or nothing.

    Raises:
        CheckpointCorruptError: A file that the manifest names is not there, or has another size.
    """
    check_files(directory, manifest.files, checksums=False)
    filesystem, path = resolve(directory)
    make_directory(filesystem, path)
    publish(filesystem, f"{path}/{MANIFEST}", manifest.to_json())


def entries(model_dir: str) -> list[Entry]:
    """The committed checkpoints in the order of their commits; none where the directory does not exist.

    Not in the order of their numbers: who goes back to an old checkpoint and trains on commits a lower step later.

    Raises:
        CheckpointNotFoundError: The directory cannot be read.
        CheckpointCorruptError: A manifest is damaged, so that the order is unknown; names it.
    """
    found = scan(model_dir)
    for error in found.damaged.values():
        raise error
    return found.entries


def scan(model_dir: str) -> Listing:
    """The committed checkpoints, with damaged manifests told apart; both empty where the directory does not exist.

    Only a manifest whose checksum is right says when it was committed. Times of files do not: copies have others.

    Raises:
        CheckpointNotFoundError: The directory cannot be read.
    """
    location = join(model_dir, FOLDER)
    filesystem, root = resolve(location)
    try:
        names = _names(filesystem, root)
        infos = filesystem.get_file_info([f"{root}/{name}/{MANIFEST}" for name in names])
    except OSError as error:
        raise CheckpointNotFoundError(
            f"Cannot read the checkpoints of a model directory: {error}. Received: model_dir={redacted(model_dir)!r}"
        ) from error
    found, damaged = [], {}
    for name, info in zip(names, infos, strict=True):
        if info.type != fs.FileType.File:
            continue
        directory = join(location, name)
        try:
            found.append(Entry(directory, name, _step(name), read_manifest(directory).created))
        except CheckpointCorruptError as error:
            damaged[name] = CheckpointCorruptError(
                f"{error}. Without it the order of the checkpoints is unknown: put it back, move the directory away, "
                "or take the last one that is whole (fallback)"
            )
        except CheckpointNotFoundError:
            # Deleted by another process since it was listed, or else unreadable.
            if _exists(filesystem, f"{root}/{name}/{MANIFEST}"):
                raise
    return Listing(sorted(found, key=_order), damaged)


def steps(model_dir: str) -> list[int]:
    """The steps of the committed checkpoints, in the order of their commits; see `entries`."""
    return [entry.step for entry in entries(model_dir)]


def latest(model_dir: str) -> str | None:
    """The directory of the checkpoint that was committed last, or None; raises what `entries` does."""
    found = entries(model_dir)
    return found[-1].directory if found else None


def find(path: str) -> str:
    """The checkpoint that a path means: itself, or the newest one of a model directory.

    Raises:
        CheckpointNotFoundError: It is neither.
        CheckpointCorruptError: A manifest of the model directory is damaged, so that the newest one is unknown.
    """
    filesystem, root = resolve(path)
    try:
        if _exists(filesystem, f"{root}/{MANIFEST}"):
            return join(path)
    except OSError as error:
        raise CheckpointNotFoundError(
            f"Cannot read the checkpoint: {error}. Received: {redacted(path)!r}"
        ) from error
    newest = latest(path)
    if newest is None:
        raise CheckpointNotFoundError(
            f"No checkpoint here: neither {MANIFEST} nor checkpoints/<step>/{MANIFEST} exists. A `fit` that ended "
            f"writes one. Received: {redacted(path)!r}"
        )
    return newest


def load(path: str, *, verify: bool = True) -> Manifest:
    """Read the manifest of a checkpoint directory and see that its own files are there, whole.

    What an incremental checkpoint builds on is not looked at: see `chain`.

    Args:
        path: The checkpoint's directory, or a model directory, whose newest checkpoint is taken.
        verify: Read all files and compare checksums; without it only their sizes are compared.

    Raises:
        CheckpointNotFoundError: No committed checkpoint, or unreadable.
        CheckpointCorruptError: The manifest or a file is damaged or missing; names it.

    Example:
        >>> load("/models/ctr").step
        2500
    """
    directory = find(path)
    manifest = read_manifest(directory)
    check_files(directory, manifest.files, checksums=verify)
    return manifest


def read_manifest(directory: str) -> Manifest:
    """The manifest of a checkpoint directory, without a look at the files; raises what `load` does."""
    filesystem, root = resolve(directory)
    location = redacted(join(directory, MANIFEST))
    try:
        with filesystem.open_input_stream(f"{root}/{MANIFEST}") as stream:
            content = stream.read()
    except OSError as error:
        raise CheckpointNotFoundError(
            f"Cannot read the checkpoint: {error}. Received: {location!r}"
        ) from error
    try:
        return Manifest.from_json(content)
    except ValueError as error:
        raise CheckpointCorruptError(
            f"The manifest is damaged or of another version: {error}. Received: {location!r}"
        ) from error


def check_files(directory: str, files: Iterable[FileRecord], *, checksums: bool = True) -> None:
    """Compare files with their records: size, and content with `checksums`.

    Raises:
        CheckpointCorruptError: Names the first file that is missing or differs.
    """
    for problem in problems(directory, files, checksums=checksums):
        raise CheckpointCorruptError(problem)


def problems(directory: str, files: Iterable[FileRecord], *, checksums: bool = True) -> Iterator[str]:
    """What is wrong with the files of a checkpoint, one sentence for each that is missing or differs."""
    filesystem, root = resolve(directory)
    files = list(files)
    try:
        infos = filesystem.get_file_info([f"{root}/{file.path}" for file in files])
    except OSError as error:
        raise CheckpointNotFoundError(
            f"Cannot read the checkpoint: {error}. Received: {redacted(directory)!r}"
        ) from error
    whole = []
    for file, info in zip(files, infos, strict=True):
        place = redacted(join(directory, file.path))
        if info.type != fs.FileType.File:
            yield f"A file of the checkpoint is missing. Received: {place}"
        elif info.size != file.num_bytes:
            yield (
                f"A file of the checkpoint has {info.size} bytes instead of {file.num_bytes}. Received: {place}"
            )
        else:
            whole.append(file)
    if not checksums:
        return

    def check(file: FileRecord) -> str | None:
        digest = Checksum(algorithm_of(file.checksum))
        place = redacted(join(directory, file.path))
        try:
            with filesystem.open_input_stream(f"{root}/{file.path}") as stream:
                while chunk := stream.read(_READ_BYTES):
                    digest.update(chunk)
        except OSError as error:
            return f"A file of the checkpoint cannot be read: {error}. Received: {place}"
        if str(digest) != file.checksum:
            return (
                f"A file of the checkpoint is damaged: {digest} instead of {file.checksum}. Received: {place}"
            )
        return None

    with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="verify") as pool:
        for found in pool.map(check, whole):
            if found is not None:
                yield found


def delete(filesystem: Any, path: str) -> None:
    """Delete a checkpoint, its manifest first: a deletion cut short leaves none that looks whole."""
    if _exists(filesystem, f"{path}/{MANIFEST}"):
        filesystem.delete_file(f"{path}/{MANIFEST}")
    delete_directory(filesystem, path)


def cut_short(model_dir: str) -> list[str]:
    """The names of the directories of saves that were not committed (or are running); no running compactions."""
    filesystem, root = resolve(join(model_dir, FOLDER))
    return _uncommitted(filesystem, root)


def compacting(model_dir: str) -> list[str]:
    """The names of the directories of compactions that run, or broke off less than a day ago."""
    filesystem, root = resolve(join(model_dir, FOLDER))
    return [
        name for name in _without_manifest(filesystem, root) if not _removable(filesystem, f"{root}/{name}")
    ]


def model_dir_of(directory: str) -> str | None:
    """The model directory that a checkpoint lies in, or None where it is a copy elsewhere."""
    folder, name = parent(directory)
    above, last = parent(folder)
    return above if last == FOLDER and _NAME.fullmatch(name) else None


def _names(filesystem: Any, root: str) -> list[str]:
    return [name for name in list_folders(filesystem, root) if _NAME.fullmatch(name)]


def _uncommitted(filesystem: Any, root: str) -> list[str]:
    return [name for name in _without_manifest(filesystem, root) if _removable(filesystem, f"{root}/{name}")]


def _removable(filesystem: Any, path: str) -> bool:
    """Whether an uncommitted directory is no compaction, or one in which nothing was written for long."""
    if _COMPACT not in path.rpartition("/")[2]:
        return True
    found = [*filesystem.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))]
    found.append(filesystem.get_file_info(path))
    times = [info.mtime for info in found if info.mtime is not None]
    return bool(times) and datetime.now(timezone.utc) - max(times) > _ABANDONED


def _without_manifest(filesystem: Any, root: str) -> list[str]:
    names = _names(filesystem, root)
    infos = filesystem.get_file_info([f"{root}/{name}/{MANIFEST}" for name in names])
    return [name for name, info in zip(names, infos, strict=True) if info.type == fs.FileType.NotFound]


def _step(name: str) -> int:
    return int(name[:12])


def _exists(filesystem: Any, path: str) -> bool:
    return bool(filesystem.get_file_info(path).type == fs.FileType.File)


def _order(entry: Entry) -> tuple[str, int, bool, int, str]:
    # A compacted checkpoint has the time of the one that it is made of, and comes right after it.
    return entry.created, entry.step, _COMPACT in entry.name, len(entry.name), entry.name
