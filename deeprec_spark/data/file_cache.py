"""FileCache: copies of remote files on a local disk, shared by the processes of a host."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import threading
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import fs

from deeprec_spark.checkpoint.locking import file_lock
from deeprec_spark.embedding.filesystem import is_local, redacted, resolve

logger = logging.getLogger(__name__)

_BLOCK = 8 << 20
_LOCKS = 64
_TEMPORARY = ".part"
# What fsspec's filesystems call the things that change with a file, in small letters without "-" and "_".
_VERSIONS = frozenset(
    ("etag", "generation", "lastmodified", "lastwritetime", "modificationtime", "modify", "mtime", "updated")
)


@dataclass(frozen=True)
class CacheOptions:
    """Where copies go, and how many bytes of them there may be.

    Args:
        directory: a local folder on each host; its processes share it. `~` and `$VARIABLES` are those of the host.
        max_bytes: of all copies together; what was not used for the longest time makes room.
        wait_seconds: how long to wait for another process that fetches the same file, before reading it remotely.
    """

    directory: str
    max_bytes: int = 10 << 30
    wait_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not is_local(self.directory):
            raise ValueError(f"cache_dir must be a local folder. Received: {redacted(self.directory)!r}")
        if self.max_bytes < 1:
            raise ValueError(f"A cache needs room for at least a byte. Received: max_bytes={self.max_bytes}")

    @property
    def folder(self) -> Path:
        """The folder on this host."""
        return Path(os.path.expandvars(os.path.expanduser(self.directory))).absolute()


class FileCache:
    """Opens files by path or URI; remote ones are read from copies, which are made at their first use.

    A copy belongs to one version of a file: its address, size and time of change, or else what the filesystem tells
    versions apart by (an etag, say). It appears by a rename, and its checksum is in its name: a process checks it at
    its first use, drops a damaged one and fetches the file again. What cannot be cached, for want of room or of a
    working disk, or because nothing tells its versions apart, is read remotely. Safe from many threads and processes.

    Example:
        >>> cache = FileCache(CacheOptions("/tmp/cache", max_bytes=1 << 30))
        >>> with cache.open("s3://bucket/part-0.parquet") as file:  # doctest: +SKIP
        ...     table = pq.read_table(file)
        >>> cache.counts()  # doctest: +SKIP
        {'hits': 0, 'misses': 1, 'fetched_bytes': 1048576}
    """

    def __init__(self, options: CacheOptions) -> None:
        self._options = options
        self._folder = options.folder
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._checked: set[str] = set()
        self._warned: set[str] = set()

    def counts(self) -> Mapping[str, int]:
        """What happened so far: hits, misses, fetched_bytes, evicted, damaged, and bypassed (read remotely)."""
        with self._lock:
            return dict(self._counts)

    @contextmanager
    def open(self, location: str) -> Iterator[Any]:
        """A file for random reads: the copy's memory where there is one."""
        filesystem, path = resolve(location)
        if is_local(location):
            with filesystem.open_input_file(path) as file:
                yield file
            return
        copy = self._copy(location, filesystem, path)
        if copy is None:
            self._count("bypassed")
            with filesystem.open_input_file(path) as file:
                yield file
            return
        try:
            with pa.BufferReader(pa.py_buffer(copy)) as reader:
                yield reader
        finally:
            # Whoever still holds rows of it keeps the memory; the last one gives it back.
            with suppress(BufferError):
                copy.close()

    def _copy(self, location: str, filesystem: Any, path: str) -> mmap.mmap | None:
        info = filesystem.get_file_info(path)
        if info.type != fs.FileType.File or not info.size or info.size > self._options.max_bytes:
            return None
        version = _version(filesystem, path, info)
        if version is None:
            self._warn_once(
                str(filesystem.type_name),
                "Files are read remotely: their filesystem tells neither when they changed nor their version, "
                f"so a copy might be an old one. Received: {redacted(location)!r} ({filesystem.type_name})",
            )
            return None
        key = _key(location, info.size, version)
        try:
            found = self._open_copy(key, info.size)
            if found is not None:
                self._count("hits")
                return found
            return self._fetch(key, filesystem, path, info.size)
        except (OSError, TimeoutError) as error:
            self._warn_once("", f"Files are read remotely, for the cache does not work: {error}")
            return None

    def _warn_once(self, about: str, message: str) -> None:
        with self._lock:
            told = about in self._warned
            self._warned.add(about)
        if not told:
            logger.warning("%s", message)

    def _fetch(self, key: str, filesystem: Any, path: str, size: int) -> mmap.mmap | None:
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = self._folder / f"fetch-{int(key[:8], 16) % _LOCKS}.lock"
        with file_lock(lock, self._options.wait_seconds):
            # Another process may have fetched it meanwhile.
            found = self._open_copy(key, size)
            if found is not None:
                self._count("hits")
                return found
            self._count("misses")
            temporary = self._folder / f"{uuid.uuid4().hex}{_TEMPORARY}"
            with self._new_part(temporary, size) as target:
                try:
                    checksum = _download(filesystem, path, target, size)
                    name = f"{key}-{checksum:08x}"
                    # Whoever counts the files meanwhile might see it under neither name.
                    with self._counting():
                        temporary.rename(self._folder / name)
                except BaseException:
                    temporary.unlink(missing_ok=True)
                    raise
            self._count("fetched_bytes", size)
            with self._lock:
                self._checked.add(name)
            return self._open_copy(key, size)

    def _open_copy(self, key: str, size: int) -> mmap.mmap | None:
        """The copy of this version of a file, whole and undamaged; None where there is none."""
        for copy in self._folder.glob(f"{key}-*"):
            try:
                with copy.open("rb") as file:
                    if os.fstat(file.fileno()).st_size != size:
                        raise ValueError(f"{os.fstat(file.fileno()).st_size} bytes instead of {size}")
                    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._check(copy.name, memory)
            except FileNotFoundError:
                continue  # it was evicted just now
            except ValueError as error:
                logger.warning("A damaged copy is fetched again: %s: %s", copy, error)
                self._count("damaged")
                copy.unlink(missing_ok=True)
                continue
            with suppress(FileNotFoundError):
                os.utime(copy)  # it was used last
            return memory
        return None

    def _check(self, name: str, memory: mmap.mmap) -> None:
        """Compare the checksum with the one in the name, once in a process."""
        with self._lock:
            if name in self._checked:
                return
        found = zlib.crc32(memory)
        if f"{found:08x}" != name.rpartition("-")[2]:
            memory.close()
            raise ValueError(f"checksum {found:08x} instead of that of its name")
        with self._lock:
            self._checked.add(name)

    def _new_part(self, path: Path, size: int) -> BinaryIO:
        """A file of so many bytes, locked as long as it is open: a part that nobody holds was left by the dead."""
        # Nobody may see the file before its lock is held, and take it for such a one.
        with self._counting():
            self._make_room(size)
            part = path.open("xb")
            try:
                fcntl.flock(part, fcntl.LOCK_EX)
                # Others see by its size that the room is taken.
                os.ftruncate(part.fileno(), size)
            except BaseException:
                part.close()
                path.unlink(missing_ok=True)
                raise
        return part

    def _make_room(self, size: int) -> None:
        """Delete what the dead left, and, for so many bytes more, what was not used for the longest time."""
        copies = []
        total = size
        for entry in os.scandir(self._folder):
            if entry.name.endswith(".lock"):
                continue
            try:
                if entry.name.endswith(_TEMPORARY) and _is_abandoned(entry.path):
                    os.unlink(entry.path)
                    continue
                status = entry.stat()
            except FileNotFoundError:
                continue
            total += status.st_size
            if not entry.name.endswith(_TEMPORARY):
                copies.append((status.st_mtime_ns, status.st_size, entry.path))
        for _, freed, path in sorted(copies):
            if total <= self._options.max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= freed
            self._count("evicted")
        if total > self._options.max_bytes:
            raise OSError(f"{self._options.max_bytes} bytes are taken by files that are being fetched")

    def _counting(self) -> AbstractContextManager[Any]:
        """Nobody else counts files, or changes how many there are, inside the block."""
        return file_lock(self._folder / "evict.lock", self._options.wait_seconds)

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number


def _key(location: str, size: int, version: str) -> str:
    """A name for this version of a file; secrets of the URI are no part of it."""
    return hashlib.sha256(f"{redacted(location)}\n{size}\n{version}".encode()).hexdigest()[:40]


def _version(filesystem: Any, path: str, info: fs.FileInfo) -> str | None:
    """What changes with the file: its time of change, or what fsspec knows instead; None where nothing is known."""
    if info.mtime_ns is not None:
        return str(info.mtime_ns)
    backend = getattr(getattr(filesystem, "handler", None), "fs", None)
    if backend is None:
        return None
    # pyarrow hands on fsspec's "mtime" alone, which few filesystems have: HDFS says "modification_time".
    found = [
        f"{name}={value}"
        for name, value in sorted(backend.info(path).items())
        if name.lower().translate({ord("-"): None, ord("_"): None}) in _VERSIONS and value is not None
    ]
    return "\n".join(found) or None


def _download(filesystem: Any, path: str, target: Any, size: int) -> int:
    """Copy a file's bytes; their CRC-32. An OSError where there are more or fewer than expected."""
    checksum = done = 0
    with filesystem.open_input_stream(path) as source:
        while block := source.read(_BLOCK):
            target.write(block)
            checksum = zlib.crc32(block, checksum)
            done += len(block)
    target.flush()
    if done != size:
        raise OSError(f"The file changed while it was fetched. Received: {done} bytes of {size}: {path}")
    return checksum


def _is_abandoned(path: str) -> bool:
    """Whether no process holds the lock of a file that is being fetched."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
