"""Checkpoints: the manifest that commits one, and read-only stores over them."""

from deeprec_spark.checkpoint.directory import (
    begin,
    check_files,
    commit,
    copy,
    directory_of,
    find,
    latest,
    load,
    prune,
    steps,
)
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
    "FileRecord",
    "Manifest",
    "ModelRecord",
    "SnapshotStore",
    "TableRecord",
    "WeightRecord",
    "begin",
    "check_files",
    "commit",
    "copy",
    "directory_of",
    "find",
    "latest",
    "load",
    "prune",
    "save_checkpoint",
    "steps",
    "weight_records",
]
