"""Paths and URIs to a pyarrow filesystem: see `deeprec_spark.embedding.filesystem`, where they are at home."""

from deeprec_spark.embedding.filesystem import (
    delete_directory,
    is_local,
    join,
    redacted,
    resolve,
    split_query,
)

__all__ = ["delete_directory", "is_local", "join", "redacted", "resolve", "split_query"]
