"""Save parameters, wherever they are held, as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Protocol

from deeprec_spark.checkpoint.directory import begin, commit, directory_of, prune
from deeprec_spark.checkpoint.manifest import FileRecord, Manifest, ModelRecord, TableRecord
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.store import CheckpointFile, TableSpec
from deeprec_spark.features.spec import FeatureSpec


class Saver(Protocol):
    """What can write parameters: an EmbeddingStore, or whoever asks the nodes that hold one."""

    def save(self, directory: str) -> Sequence[CheckpointFile]:
        """Write every table, the dense parameters, all slots and the step below `directory`."""


def save_checkpoint(
    store: Saver,
    model_dir: str,
    *,
    model: Any,
    tables: Sequence[TableSpec],
    step: int,
    epoch: int = 0,
    optimizer: Optimizer | None = None,
    feature_spec: FeatureSpec | None = None,
    extra: Mapping[str, Any] | None = None,
    keep_max: int | None = None,
) -> str:
    """Save a store's tables and dense parameters, commit them, and delete old checkpoints.

    Args:
        store: What holds the parameters.
        model_dir: Where checkpoints lie below; a path or URI.
        model: The built Keras model they belong to.
        tables: The model's tables, as `layers.tables.table_specs` gives them.
        step, epoch: Where training is.
        optimizer: Of the dense parameters.
        feature_spec: How the model's columns are prepared.
        extra: More JSON for the manifest.
        keep_max: Keep so many checkpoints; None keeps all.

    Returns:
        The checkpoint's directory.

    Example:
        >>> save_checkpoint(store, "/models/ctr", model=model, tables=table_specs(model), step=trainer.step)
        '/models/ctr/checkpoints/000000002500'
    """
    directory = directory_of(model_dir, step)
    begin(directory)
    files = store.save(directory)
    manifest = Manifest(
        step=step,
        epoch=epoch,
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        tables=tuple(TableRecord.of(table) for table in tables),
        files=tuple(FileRecord.of(file) for file in files),
        model=ModelRecord.of(model, optimizer),
        feature_spec=feature_spec,
        extra=dict(extra or {}),
    )
    commit(directory, manifest)
    if keep_max is not None:
        prune(model_dir, keep_max)
    return directory
