"""Checkpoint directories: commit, find, verify, prune; on local disks and any filesystem that pyarrow knows.

<model_dir>/checkpoints/<step, 12 digits>/manifest.json      written last: it commits the rest
                                         /tables/<table>/…   what the store saved
                                         /dense/…
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyarrow import fs
from pydantic import ValidationError

from deeprec_spark.checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from deeprec_spark.checkpoint.manifest import FileRecord, Manifest
from deeprec_spark.data.filesystem import resolve

MANIFEST = "manifest.json"
_STEP = re.compile(r"\d{12}")
_READ_BYTES = 4 << 20
_VERIFY_THREADS = 4

logger = logging.getLogger(__name__)


def directory_of(model_dir: str, step: int) -> str:
    """Where the checkpoint of a step lies."""
    return f"{model_dir.rstrip('/')}/checkpoints/{step:012d}"


def begin(directory: str) -> None:
    """Make an empty directory to save into; what is there, a checkpoint or a save cut short, is deleted.

    Files of an earlier save, perhaps by another number of servers, must not mix with those of this one.
    """
    filesystem, path = resolve(directory)
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        _delete(filesystem, path)
    filesystem.create_dir(path, recursive=True)


def commit(directory: str, manifest: Manifest) -> None:
    """Write the manifest: until then the directory is no checkpoint.

    It is written beside its name and renamed, which is atomic on file systems; on an object store pyarrow's rename is a
    copy of one object, which is atomic too.
    """
    filesystem, path = resolve(directory)
    filesystem.create_dir(path, recursive=True)
    temporary = f"{path}/.{MANIFEST}.{manifest.fingerprint[:16]}.tmp"
    with filesystem.open_output_stream(temporary) as stream:
        stream.write(manifest.to_json())
    filesystem.move(temporary, f"{path}/{MANIFEST}")


def steps(model_dir: str) -> list[int]:
    """The steps of the committed checkpoints, in the order of their commits; none where the directory does not exist.

    Not in the order of their numbers: who goes back to an old checkpoint and trains on commits a lower step later.

    Raises:
        CheckpointNotFoundError: The directory cannot be read.
    """
    filesystem, root = resolve(f"{model_dir.rstrip('/')}/checkpoints")
    try:
        entries = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
        names = [
            entry.base_name
            for entry in entries
            if entry.type == fs.FileType.Directory and _STEP.fullmatch(entry.base_name)
        ]
        manifests = filesystem.get_file_info([f"{root}/{name}/{MANIFEST}" for name in names])
    except OSError as error:
        raise CheckpointNotFoundError(
            f"Cannot read the checkpoints of a model directory: {error}. Received: model_dir={model_dir!r}"
        ) from error
    committed = [
        int(name) for name, info in zip(names, manifests, strict=True) if info.type == fs.FileType.File
    ]
    return sorted(committed, key=lambda step: (_created(filesystem, f"{root}/{step:012d}/{MANIFEST}"), step))


def latest(model_dir: str) -> str | None:
    """The directory of the checkpoint that was committed last, or None."""
    found = steps(model_dir)
    return directory_of(model_dir, found[-1]) if found else None


def find(path: str) -> str:
    """The checkpoint that a path means: itself, or the newest one of a model directory.

    Raises:
        CheckpointNotFoundError: It is neither.
    """
    filesystem, root = resolve(path)
    try:
        if filesystem.get_file_info(f"{root}/{MANIFEST}").type == fs.FileType.File:
            return path.rstrip("/")
    except OSError as error:
        raise CheckpointNotFoundError(f"Cannot read the checkpoint: {error}. Received: {path!r}") from error
    newest = latest(path)
    if newest is None:
        raise CheckpointNotFoundError(
            f"No checkpoint here: neither {MANIFEST} nor checkpoints/<step>/{MANIFEST} exists. A `fit` that ended "
            f"writes one. Received: {path!r}"
        )
    return newest


def load(path: str, *, verify: bool = True) -> Manifest:
    """Read the manifest of a checkpoint directory and see that its files are there, whole.

    Args:
        path: The checkpoint's directory, or a model directory, whose newest checkpoint is taken.
        verify: Read all files and compare SHA-256; without it only their sizes are compared.

    Raises:
        CheckpointNotFoundError: No committed checkpoint, or unreadable.
        CheckpointCorruptError: The manifest or a file is damaged or missing; names it.

    Example:
        >>> load("/models/ctr").step
        2500
    """
    directory = find(path)
    filesystem, root = resolve(directory)
    location = f"{directory}/{MANIFEST}"
    try:
        with filesystem.open_input_stream(f"{root}/{MANIFEST}") as stream:
            content = stream.read()
    except OSError as error:
        raise CheckpointNotFoundError(
            f"Cannot read the checkpoint: {error}. Received: {location!r}"
        ) from error
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        raise CheckpointCorruptError(
            f"The manifest is damaged or of another version: {error}. Received: {location!r}"
        ) from error
    check_files(directory, manifest.files, checksums=verify)
    return manifest


def check_files(directory: str, files: Iterable[FileRecord], *, checksums: bool = True) -> None:
    """Compare files with their records: size, and SHA-256 with `checksums`.

    Raises:
        CheckpointCorruptError: Names the first file that is missing or differs.
    """
    filesystem, root = resolve(directory)
    files = list(files)
    infos = filesystem.get_file_info([f"{root}/{file.path}" for file in files])
    for file, info in zip(files, infos, strict=True):
        if info.type != fs.FileType.File:
            raise CheckpointCorruptError(
                f"A file of the checkpoint is missing. Received: {directory}/{file.path}"
            )
        if info.size != file.num_bytes:
            raise CheckpointCorruptError(
                f"A file of the checkpoint has {info.size} bytes instead of {file.num_bytes}. "
                f"Received: {directory}/{file.path}"
            )
    if not checksums:
        return

    def check(file: FileRecord) -> None:
        digest = hashlib.sha256()
        with filesystem.open_input_stream(f"{root}/{file.path}") as stream:
            while chunk := stream.read(_READ_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != file.sha256:
            raise CheckpointCorruptError(
                f"A file of the checkpoint is damaged: SHA-256 {digest.hexdigest()} instead of {file.sha256}. "
                f"Received: {directory}/{file.path}"
            )

    with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="verify") as pool:
        for _ in pool.map(check, files):
            pass


def prune(model_dir: str, keep_max: int) -> list[int]:
    """Delete all checkpoints but the last `keep_max` that were committed, and saves cut short below the last one.

    Returns:
        The steps deleted.
    """
    if keep_max < 1:
        raise ValueError(f"keep_max must be at least 1. Received: keep_max={keep_max}")
    filesystem, root = resolve(f"{model_dir.rstrip('/')}/checkpoints")
    committed = steps(model_dir)
    if not committed:
        return []
    keep = set(committed[-keep_max:])
    entries = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
    present = [
        int(entry.base_name)
        for entry in entries
        if entry.type == fs.FileType.Directory and _STEP.fullmatch(entry.base_name)
    ]
    # What is uncommitted and above the last commit may be a save in progress.
    doomed = sorted(
        step for step in present if step not in keep and (step in committed or step < committed[-1])
    )
    for step in doomed:
        _delete(filesystem, f"{root}/{step:012d}")
        logger.info("Deleted checkpoint %012d of %s", step, model_dir)
    return doomed


def copy(source: str, target: str, *, overwrite: bool = False) -> str:
    """Copy a checkpoint, its manifest last, to another directory; both may be paths or URIs.

    Raises:
        CheckpointNotFoundError: `source` is no checkpoint.
        FileExistsError: Something is at `target`, and it is no checkpoint or `overwrite` is not set.
    """
    directory = find(source)
    manifest = load(directory, verify=False)
    origin, root = resolve(directory)
    filesystem, path = resolve(target)
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        committed = filesystem.get_file_info(f"{path}/{MANIFEST}").type == fs.FileType.File
        if not overwrite or not committed:
            reason = "set overwrite" if committed else "it is no checkpoint, and is left alone"
            raise FileExistsError(f"The target of the copy exists: {reason}. Received: {target!r}")
        _delete(filesystem, path)
    for file in manifest.files:
        place = f"{path}/{file.path}"
        filesystem.create_dir(place.rpartition("/")[0], recursive=True)
        fs.copy_files(
            f"{root}/{file.path}", place, source_filesystem=origin, destination_filesystem=filesystem
        )
    commit(target, manifest)
    return target


def _delete(filesystem: fs.FileSystem, path: str) -> None:
    """Delete a checkpoint, its manifest first: a deletion cut short leaves none that looks whole."""
    if filesystem.get_file_info(f"{path}/{MANIFEST}").type == fs.FileType.File:
        filesystem.delete_file(f"{path}/{MANIFEST}")
    filesystem.delete_dir(path)


def _created(filesystem: Any, manifest: str) -> str:
    """When a checkpoint was committed, as its manifest says; "" (the oldest) where that cannot be read.

    The manifest and not the file's own time: copies of a model directory keep the order.
    """
    try:
        with filesystem.open_input_stream(manifest) as stream:
            return str(json.loads(stream.read()).get("created", ""))
    except (OSError, ValueError, AttributeError) as error:
        logger.warning("Cannot read the manifest %s: %s", manifest, error)
        return ""
