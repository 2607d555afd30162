"""Paths and URIs to a pyarrow filesystem: see `deeprec_spark.embedding.filesystem`, where they are at home."""

from deeprec_spark.embedding.filesystem import is_local, resolve

__all__ = ["is_local", "resolve"]
