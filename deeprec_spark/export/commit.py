"""Put a finished directory in its place, so that a reader never sees half of it."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs

from deeprec_spark.embedding.filesystem import redacted, resolve

_COMMIT_FILE = "saved_model.pb"


@contextmanager
def committed_directory(location: str, *, overwrite: bool) -> Iterator[Path]:
    """A directory to write into; it appears at `location` when the block ends without an exception.

    On a local disk it is written beside its place and renamed. On an object store, which has no rename of folders, its
    files are uploaded, `saved_model.pb` last, without which no loader takes the folder for a model.

    Raises:
        FileExistsError: Something is at `location` and `overwrite` is not set, or it is no SavedModel.
    """
    filesystem, path = resolve(location)
    _check_free(filesystem, path, location, overwrite)
    if isinstance(filesystem, fs.LocalFileSystem):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
        folder.mkdir()
    else:
        folder = Path(tempfile.mkdtemp(prefix="deeprec-spark-export-"))
    try:
        yield folder
        if isinstance(filesystem, fs.LocalFileSystem):
            _rename(folder, Path(path))
        else:
            _upload(folder, filesystem, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_free(filesystem: fs.FileSystem, path: str, location: str, overwrite: bool) -> None:
    if filesystem.get_file_info(path).type == fs.FileType.NotFound:
        return
    entries = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True)) if overwrite else []
    names = {entry.base_name for entry in entries}
    if not overwrite:
        raise FileExistsError(
            f"The folder to export to exists: remove it, or set overwrite. Received: {redacted(location)!r}"
        )
    if names and _COMMIT_FILE not in names:
        raise FileExistsError(
            "The folder to overwrite holds no SavedModel; it is left alone. "
            f"Received: {redacted(location)!r} with {sorted(names)}"
        )


def _rename(folder: Path, target: Path) -> None:
    if not target.exists():
        os.rename(folder, target)
        return
    replaced = target.parent / f".{target.name}.{uuid.uuid4().hex}.old"
    os.rename(target, replaced)
    os.rename(folder, target)
    shutil.rmtree(replaced)


def _upload(folder: Path, filesystem: fs.FileSystem, path: str) -> None:
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        filesystem.delete_dir(path)
    local = fs.LocalFileSystem()
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for file in sorted(files, key=lambda file: file.name == _COMMIT_FILE):
        target = f"{path}/{file.relative_to(folder).as_posix()}"
        filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        fs.copy_files(str(file), target, source_filesystem=local, destination_filesystem=filesystem)
