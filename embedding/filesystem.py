"""Paths and URIs to a pyarrow filesystem, and how files appear on one: whole or not at all."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pyarrow import fs

logger = logging.getLogger(__name__)

_LOCAL_SCHEMES = ("", "file", "dbfs")
_S3_SCHEMES = ("s3", "s3a", "s3n")
_HDFS_SCHEMES = ("hdfs", "viewfs")
_S3_OPTIONS = ("access_key", "secret_key", "session_token", "region", "scheme", "endpoint_override")
_FLUSH_BYTES = 32 << 20
_DELETE_TRIES = 4
_S3_ATTEMPTS = "DEEPREC_S3_ATTEMPTS"
_DEFAULT_S3_ATTEMPTS = 8
_S3_CONNECT_SECONDS = 10.0
_S3_REQUEST_SECONDS = 60.0


def is_local(location: str) -> bool:
    """Whether `resolve` finds it on a mounted file system; asks no network."""
    return urlsplit(location).scheme in _LOCAL_SCHEMES


def resolve(location: str) -> tuple[Any, str]:
    """The pyarrow filesystem of a path or URI, and the path within it.

    Plain paths and `file:` URIs are local; `dbfs:/x` is Databricks' mount `/dbfs/x`; `s3a:` and `s3n:`, as Spark
    writes them, are `s3:`. Other schemes are what pyarrow knows (gs, abfs, hdfs), or else fsspec where it is installed.

    S3 takes its endpoint and credentials from the URI's query (`?endpoint_override=…&scheme=http&region=…&access_key=…&
    secret_key=…&session_token=…`), else from `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, `AWS_REGION` and the usual
    chain of AWS credentials. Use the environment for secrets, on the driver and on all executors. A request that fails
    is tried `DEEPREC_S3_ATTEMPTS` times (8, over about a minute).

    Example:
        >>> resolve("/data/part.parquet")[1]
        '/data/part.parquet'

    Raises:
        ValueError: nothing here opens the URI; its query is not repeated in the message.
    """
    parts = urlsplit(location)
    if parts.scheme == "dbfs":
        return fs.LocalFileSystem(), f"/dbfs{parts.path}"
    if parts.scheme in ("", "file"):
        return fs.LocalFileSystem(), str(Path(parts.path if parts.scheme else location).absolute())
    if parts.scheme in _S3_SCHEMES:
        return _s3(parts)
    try:
        filesystem, path = fs.FileSystem.from_uri(location)
    except (ValueError, OSError) as error:
        return _fsspec(location, error)
    return filesystem, str(path)


def join(location: str, *names: str) -> str:
    """A path below a path or URI; a query stays at the end.

    Example:
        >>> join("s3://bucket/a?region=eu-west-1", "b", "c")
        's3://bucket/a/b/c?region=eu-west-1'
    """
    start, query = split_query(location)
    return "/".join((start.rstrip("/"), *names)) + query


def parent(location: str) -> tuple[str, str]:
    """The folder that holds a path or URI, and the last name.

    Example:
        >>> parent("s3://bucket/a/b?region=eu-west-1")
        ('s3://bucket/a?region=eu-west-1', 'b')
    """
    start, query = split_query(location)
    folder, _, name = start.rstrip("/").rpartition("/")
    return folder + query, name


def split_query(location: str) -> tuple[str, str]:
    """A path or URI without its query, and the query with its question mark; a plain path has none."""
    if is_local(location):
        return location, ""
    start, question, query = location.partition("?")
    return start, question + query


def redacted(location: str) -> str:
    """The location as it may be shown: without the query and the user of a URI, which can hold secrets.

    Example:
        >>> redacted("s3://key:secret@bucket/a?secret_key=x")
        's3://bucket/a'
    """
    if is_local(location):
        return location
    parts = urlsplit(location)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def renames(filesystem: Any) -> bool:
    """Whether a rename is one step on this filesystem; object stores copy and delete instead."""
    name = str(filesystem.type_name)
    return name in ("local", "hdfs", "viewfs") or name.rpartition("+")[2] in (*_HDFS_SCHEMES, "file", "local")


def make_directory(filesystem: Any, path: str) -> None:
    """Make a directory and those above it; object stores need none."""
    if renames(filesystem):
        filesystem.create_dir(path, recursive=True)


def list_files(filesystem: Any, directory: str, prefix: str, suffix: str) -> list[str]:
    """The paths of the files in a directory by the start and end of their names, sorted; none where it is missing."""
    entries = filesystem.get_file_info(fs.FileSelector(directory, allow_not_found=True))
    return sorted(
        f"{directory}/{entry.base_name}"
        for entry in entries
        if entry.type == fs.FileType.File
        and entry.base_name.startswith(prefix)
        and entry.base_name.endswith(suffix)
    )


def list_folders(filesystem: Any, directory: str) -> list[str]:
    """The names of the folders right below a directory, sorted; none where it is missing.

    pyarrow lists those of Google Cloud Storage only where somebody made them as such: they are read off the files.
    """
    selector = fs.FileSelector(directory, allow_not_found=True, recursive=filesystem.type_name == "gcs")
    names = set()
    for entry in filesystem.get_file_info(selector):
        name, inside, _ = entry.path[len(directory) :].lstrip("/").partition("/")
        if inside or entry.type == fs.FileType.Directory:
            names.add(name)
    return sorted(names)


def delete_directory(filesystem: Any, path: str) -> None:
    """Delete a directory with all in it.

    Object stores over a file system show folders as objects, which cannot go before what they hold: a level a try.
    """
    if not renames(filesystem):
        for _ in range(_DELETE_TRIES):
            with suppress(OSError):
                filesystem.delete_dir(path)
            if filesystem.get_file_info(path).type == fs.FileType.NotFound:
                return
    filesystem.delete_dir(path)


@contextmanager
def open_output(filesystem: Any, path: str) -> Iterator[Any]:
    """A new binary file; when the block ends without an exception its bytes are safe from a crash of the host."""
    if isinstance(filesystem, fs.LocalFileSystem):
        with open(path, "wb", buffering=0) as file:
            with _Flushed(file) as flushed:
                yield flushed
            os.fsync(file.fileno())
        _sync_directory(os.path.dirname(path))
        return
    stream = filesystem.open_output_stream(path)
    try:
        yield stream
    except BaseException:
        # What is left there is no part of a checkpoint: no manifest names it.
        try:
            stream.close()
        except Exception as error:
            logger.info("Closing a file that was given up failed too: %s: %s", path, error)
        raise
    stream.close()


class _Flushed:
    """A file whose bytes go to the disk while more are being written, so that the flush at the end is short."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._since = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._flush: Future[None] | None = None

    def __enter__(self) -> _Flushed:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True)
        if self._flush is not None:
            self._flush.result()

    def write(self, data: Any) -> int:
        view = memoryview(data)
        done = 0
        while done < view.nbytes:
            done += self._file.write(view[done:])
        self._since += done
        if self._since >= _FLUSH_BYTES and (self._flush is None or self._flush.done()):
            self._since = 0
            self._flush = self._pool.submit(os.fdatasync, self._file.fileno())
        return done

    def flush(self) -> None:
        """Nothing is held back."""


def publish(filesystem: Any, path: str, content: bytes) -> None:
    """Write a small file that appears whole or not at all: one PUT on object stores, else by a rename."""
    if not renames(filesystem):
        with open_output(filesystem, path) as stream:
            stream.write(content)
        return
    folder, _, name = path.rpartition("/")
    temporary = f"{folder}/.{name}.{uuid.uuid4().hex[:16]}.tmp"
    with open_output(filesystem, temporary) as stream:
        stream.write(content)
    if isinstance(filesystem, fs.LocalFileSystem):
        os.replace(temporary, path)
        _sync_directory(folder)
    else:
        filesystem.move(temporary, path)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _s3(parts: SplitResult) -> tuple[Any, str]:
    options = dict(parse_qsl(parts.query))
    unknown = sorted(set(options) - set(_S3_OPTIONS))
    if unknown:
        raise ValueError(
            f"The query of an s3 URI takes {', '.join(_S3_OPTIONS)}. Received: {unknown} in "
            f"{redacted(parts.geturl())!r}"
        )
    if parts.username:
        options.setdefault("access_key", unquote(parts.username))
        options.setdefault("secret_key", unquote(parts.password or ""))
    bucket = parts.netloc.rpartition("@")[2]
    if not bucket:
        raise ValueError(
            f"An s3 URI names a bucket: s3://bucket/folder. Received: {redacted(parts.geturl())!r}"
        )
    if "endpoint_override" not in options:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            url = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
            options |= {"endpoint_override": url.netloc, "scheme": url.scheme}
    if "region" not in options:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region is None and "endpoint_override" in options:
            region = "us-east-1"
        options["region"] = region or _region_of(bucket)
    path = f"{bucket}{parts.path}".rstrip("/")
    credentials = tuple(
        os.environ.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")
    )
    attempts = int(os.environ.get(_S3_ATTEMPTS) or _DEFAULT_S3_ATTEMPTS)
    return _s3_filesystem(tuple(sorted(options.items())), credentials, attempts), path


@lru_cache(maxsize=64)
def _region_of(bucket: str) -> str:
    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError as error:
        raise ValueError(
            f"Cannot find the region of the bucket: set AWS_REGION. Received: {bucket!r} ({error})"
        ) from error


@lru_cache(maxsize=16)
def _s3_filesystem(
    options: tuple[tuple[str, str], ...], credentials: tuple[str | None, ...], attempts: int
) -> Any:
    """One client for equal options; the environment's credentials are part of the question, not handed on."""
    del credentials
    return fs.S3FileSystem(
        **dict(options),
        connect_timeout=_S3_CONNECT_SECONDS,
        request_timeout=_S3_REQUEST_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=attempts),
        # A small file is one PUT, which commits it; without this it would be a multipart upload.
        allow_delayed_open=True,
    )


def _fsspec(location: str, cause: Exception) -> tuple[Any, str]:
    scheme = urlsplit(location).scheme
    try:
        if scheme in _HDFS_SCHEMES:
            return _hdfs(location)
        import fsspec.core

        backend, path = fsspec.core.url_to_fs(location)
        return fs.PyFileSystem(fs.FSSpecHandler(backend)), str(path).rstrip("/")
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(
            "The location must be a local path or a URI that pyarrow (s3, gs, abfs, hdfs with libhdfs, dbfs) or an "
            f"installed fsspec filesystem can open. Received: {redacted(location)!r} (pyarrow: "
            f"{_without(location, cause)}; fsspec: {_without(location, error)})"
        ) from None


def _hdfs(location: str) -> tuple[Any, str]:
    """HDFS by a client without a JVM, for hosts without libhdfs.

    Arrow reads such a file by calling Python in threads of its own. One that still does when the interpreter ends
    aborts the process ("terminate called without an active exception"): Python ends the thread inside C++ code that
    cannot be unwound. Only data set scans that were left before their end have such reads; here every read is waited
    for, and every file closed.
    """
    parts = urlsplit(location)
    backend = _hdfs_client(parts.scheme, parts.hostname, parts.port, os.getpid())
    return fs.PyFileSystem(fs.FSSpecHandler(backend)), parts.path.rstrip("/") or "/"


@lru_cache(maxsize=64)
def _hdfs_client(scheme: str, host: str | None, port: int | None, process: int) -> Any:
    """One client for each name node and process.

    The cache keeps a parent's client alive in a forked child too, where fsspec's own cache would drop it: to end the
    client's threads, which a child does not have, takes for ever.
    """
    from hdfs_native.fsspec import HdfsFileSystem, ViewfsFileSystem

    kind = ViewfsFileSystem if scheme == "viewfs" else HdfsFileSystem
    return kind(host=host, port=port, skip_instance_cache=True)


def _without(location: str, error: Exception) -> str:
    """An error's text without the URI, whose query may hold secrets."""
    return str(error).replace(location, redacted(location))
