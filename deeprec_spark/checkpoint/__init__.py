"""Checkpoints: the manifest that commits one, and read-only stores over them."""

from deeprec_spark.checkpoint.chains import base_of, chain, copy, load_chain, prune
from deeprec_spark.checkpoint.directory import (
    Entry,
    Listing,
    begin,
    check_files,
    commit,
    directory_of,
    entries,
    find,
    latest,
    load,
    new_directory,
    problems,
    read_manifest,
    scan,
    steps,
)
from deeprec_spark.checkpoint.embeddings import read_embeddings
from deeprec_spark.checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from deeprec_spark.checkpoint.manifest import (
    FileRecord,
    Manifest,
    ModelRecord,
    TableRecord,
    WeightRecord,
    weight_records,
)
from deeprec_spark.checkpoint.saving import save_checkpoint
from deeprec_spark.checkpoint.snapshot import SnapshotStore

__all__ = [
    "CheckpointCorruptError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "Entry",
    "FileRecord",
    "Listing",
    "Manifest",
    "ModelRecord",
    "SnapshotStore",
    "TableRecord",
    "WeightRecord",
    "base_of",
    "begin",
    "chain",
    "check_files",
    "commit",
    "copy",
    "directory_of",
    "entries",
    "find",
    "latest",
    "load",
    "load_chain",
    "new_directory",
    "problems",
    "prune",
    "read_embeddings",
    "read_manifest",
    "save_checkpoint",
    "scan",
    "steps",
    "weight_records",
]
