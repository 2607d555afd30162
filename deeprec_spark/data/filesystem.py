"""Paths and URIs to a pyarrow filesystem."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs


def is_local(location: str) -> bool:
    """Whether `resolve` finds it on a mounted file system; asks no network."""
    return urlsplit(location).scheme in ("", "file", "dbfs")


def resolve(location: str) -> tuple[Any, str]:
    """The pyarrow filesystem of a path or URI, and the path within it.

    Plain paths and `file:` URIs are local; `dbfs:/x` is Databricks' mount `/dbfs/x`; `s3a:` and `s3n:`, as Spark
    writes them, are `s3:`; every other scheme is what pyarrow knows (s3, gs, abfs, hdfs).

    Example:
        >>> resolve("/data/part.parquet")[1]
        '/data/part.parquet'

    Raises:
        ValueError: pyarrow has no filesystem for the URI's scheme.
    """
    parts = urlsplit(location)
    if parts.scheme == "dbfs":
        return fs.LocalFileSystem(), f"/dbfs{parts.path}"
    if parts.scheme in ("", "file"):
        return fs.LocalFileSystem(), str(Path(parts.path if parts.scheme else location).absolute())
    uri = f"s3{location[3:]}" if parts.scheme in ("s3a", "s3n") else location
    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
    except (ValueError, OSError) as error:
        raise ValueError(
            "The location must be a local path or a URI that pyarrow can open (s3, gs, abfs, hdfs, dbfs). "
            f"Received: {location!r} ({error})"
        ) from error
    return filesystem, str(path)
