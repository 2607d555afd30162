"""Save parameters, wherever they are held, as a checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from deeprec_spark.checkpoint.chains import prune
from deeprec_spark.checkpoint.directory import begin, commit, new_directory, read_manifest, scan
from deeprec_spark.checkpoint.manifest import FileRecord, Manifest, ModelRecord, TableRecord
from deeprec_spark.embedding.filesystem import join, parent
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.store import CheckpointFile, TableSpec
from deeprec_spark.features.spec import FeatureSpec

Writer = Callable[[str], Sequence[CheckpointFile]]
"""Writes parameters below a directory: an EmbeddingStore's `save`, or whoever asks the nodes that hold one."""


def save_checkpoint(
    writer: Writer,
    model_dir: str,
    *,
    model: Any,
    tables: Sequence[TableSpec],
    step: int,
    epoch: int = 0,
    optimizer: Optimizer | None = None,
    feature_spec: FeatureSpec | None = None,
    base: str | None = None,
    save_id: str | None = None,
    position: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep_max: int | None = None,
) -> str:
    """Have parameters written, commit them as a checkpoint, and delete old ones.

    Args:
        writer: Writes the files, `store.save` for a full checkpoint of a store.
        model_dir: Where checkpoints lie below; a path or URI.
        model: The built Keras model they belong to, or the record of one.
        tables: The model's tables, as `layers.tables.table_specs` gives them.
        step, epoch: Where training is.
        optimizer: Of the dense parameters.
        feature_spec: How the model's columns are prepared.
        base: The directory of the checkpoint that an incremental one builds on, or its name; None for a full one.
        save_id: What the stores call this save; None makes one up.
        position: Where in the data training is, as JSON.
        training: Learning rates, random state and options, as JSON.
        extra: More JSON for the manifest.
        keep_max: Keep so many full checkpoints and what builds on them; None keeps all.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointNotFoundError: There is no checkpoint `base`.

    Example:
        >>> save_checkpoint(store.save, "/models/ctr", model=model, tables=table_specs(model), step=trainer.step)
        '/models/ctr/checkpoints/000000002500'
    """
    directory = new_directory(model_dir, step)
    base_name = base_id = None
    if base is not None:
        base_name = parent(base)[1] or base
        base_id = read_manifest(join(parent(directory)[0], base_name)).save_id
    begin(directory)
    files = writer(directory)
    manifest = Manifest(
        step=step,
        epoch=epoch,
        created=_now(model_dir),
        kind="full" if base is None else "incremental",
        base=base_name,
        base_id=base_id,
        save_id=save_id or uuid.uuid4().hex,
        position=None if position is None else dict(position),
        training=dict(training or {}),
        tables=tuple(TableRecord.of(table) for table in tables),
        files=tuple(FileRecord.of(file) for file in files),
        model=model if isinstance(model, ModelRecord) else ModelRecord.of(model, optimizer),
        feature_spec=feature_spec,
        extra=dict(extra or {}),
    )
    commit(directory, manifest)
    if keep_max is not None:
        prune(model_dir, keep_max, keep=directory)
    return directory


def _now(model_dir: str) -> str:
    """The time of a commit, later than those before it: they are ordered by it, and clocks differ between hosts."""
    now = datetime.now(timezone.utc)
    if before := scan(model_dir).entries:
        # A manifest need not tell its time.
        last = datetime.fromisoformat(before[-1].created or "0001-01-01T00:00:00+00:00")
        now = max(now, last + timedelta(microseconds=1))
    return now.isoformat(timespec="microseconds")
