"""The manifest of a checkpoint: what it holds and whose it is. Written last, it commits the checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deeprec_spark.checkpoint.errors import CheckpointMismatchError
from deeprec_spark.embedding.checksum import PATTERN
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.options import EmbeddingVariableOption
from deeprec_spark.embedding.store import CheckpointFile, TableSpec
from deeprec_spark.embedding.table_files import check_spec
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.features.spec import FeatureSpec

logger = logging.getLogger(__name__)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """One file: path relative to the checkpoint, the table it belongs to (None: dense), rows, bytes, checksum."""

    path: str
    table: str | None
    rows: int = Field(ge=0)
    num_bytes: int = Field(ge=0)
    checksum: str = Field(pattern=PATTERN)

    @classmethod
    def of(cls, file: CheckpointFile) -> FileRecord:
        """The record of a file that a store wrote."""
        return cls(
            path=file.path,
            table=file.table,
            rows=file.rows,
            num_bytes=file.num_bytes,
            checksum=file.checksum,
        )


class TableRecord(_Record):
    """One embedding table: its TableSpec as JSON."""

    name: str
    embedding_dim: int = Field(ge=1)
    option: dict[str, Any]
    optimizer: dict[str, Any] | None
    seed: int

    @classmethod
    def of(cls, spec: TableSpec) -> TableRecord:
        """The record of a table."""
        return cls(
            name=spec.name,
            embedding_dim=spec.embedding_dim,
            option=spec.option.to_dict(),
            optimizer=None if spec.optimizer is None else spec.optimizer.to_dict(),
            seed=spec.seed,
        )

    def table_spec(self) -> TableSpec:
        """The table as the store takes it."""
        return TableSpec(
            name=self.name,
            embedding_dim=self.embedding_dim,
            option=EmbeddingVariableOption.from_dict(self.option),
            optimizer=None if self.optimizer is None else Optimizer.from_dict(self.optimizer),
            seed=self.seed,
        )

    @property
    def default_value(self) -> float:
        """What an id without an admitted row reads at inference: the table's `default_value_no_permission`."""
        return float(self.table_spec().option.init_option.default_value_no_permission)


class WeightRecord(_Record):
    """One float weight of the Keras model."""

    path: str
    shape: tuple[int, ...]
    trainable: bool

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        size = 1
        for length in self.shape:
            size *= length
        return size


class ModelRecord(_Record):
    """Whose checkpoint it is: its dense weights, and the Keras config where the model has one.

    `weights` are in the order of the flat vectors that stores keep: the trainable ones, then the state.
    """

    name: str
    weights: tuple[WeightRecord, ...]
    config: dict[str, Any] | None = Field(None, description="keras.saving.serialize_keras_object(model).")
    optimizer: dict[str, Any] | None = Field(None, description="Of the dense weights.")

    @classmethod
    def of(cls, model: Any, optimizer: Optimizer | None = None) -> ModelRecord:
        """The record of a built Keras model; a model that cannot say its config is recorded without one."""
        return cls(
            name=model.name,
            weights=weight_records(model),
            config=model_config(model),
            optimizer=None if optimizer is None else optimizer.to_dict(),
        )

    @property
    def dense_size(self) -> int:
        """Length of the flat vector of trainable weights."""
        return sum(weight.size for weight in self.weights if weight.trainable)

    @property
    def state_size(self) -> int:
        """Length of the flat vector of the other weights, such as moving averages."""
        return sum(weight.size for weight in self.weights if not weight.trainable)


class Manifest(_Record):
    """All of a checkpoint but the numbers themselves. Those of versions 1 and 2 are read.

    An incremental checkpoint has in its files what changed since `base`, tombstones, and the dense weights whole.
    `position` and `training` belong to what drives the training: where in the data it is, and learning rates, random
    state and options. `extra` is free JSON of the caller.
    """

    format_version: Literal[3] = 3
    step: int = Field(ge=0)
    epoch: int = Field(ge=0)
    created: str = Field("", description="ISO 8601, UTC.")
    kind: Literal["full", "incremental"] = "full"
    base: str | None = Field(None, description="Directory name of the checkpoint that it builds on.")
    base_id: str | None = Field(None, description="save_id of that checkpoint.")
    save_id: str | None = Field(None, description="What the stores called this save; unique.")
    position: dict[str, Any] | None = None
    training: dict[str, Any] = Field(default_factory=dict)
    tables: tuple[TableRecord, ...]
    files: tuple[FileRecord, ...]
    model: ModelRecord
    feature_spec: FeatureSpec | None = None
    extra: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _base_fits_kind(self) -> Manifest:
        if (self.kind == "incremental") != (self.base is not None) or (self.base is None) != (
            self.base_id is None
        ):
            raise ValueError(
                "An incremental checkpoint names the one it builds on, and only it does. "
                f"Received: kind={self.kind!r}, base={self.base!r}, base_id={self.base_id!r}"
            )
        return self

    @property
    def fingerprint(self) -> str:
        """A hash of the whole content: two checkpoints of one fingerprint hold the same numbers."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def table_specs(self) -> list[TableSpec]:
        """The tables as a store takes them."""
        return [table.table_spec() for table in self.tables]

    def files_of(self, table: str | None) -> list[FileRecord]:
        """The files of one table, or of the dense parameters (None)."""
        return [file for file in self.files if file.table == table]

    def table(self, name: str) -> TableRecord:
        """One table's record; a CheckpointMismatchError names the tables that there are."""
        for table in self.tables:
            if table.name == name:
                return table
        raise CheckpointMismatchError(
            "The checkpoint has no such table: it belongs to another model. "
            f"Received: table={name!r}, checkpoint tables={[table.name for table in self.tables]}"
        )

    def to_json(self) -> bytes:
        """The manifest as it is written; `checksum` is the SHA-256 of the rest, so that no byte of it can change."""
        data = self.model_dump(mode="json")
        data["checksum"] = hashlib.sha256(_canonical(data)).hexdigest()
        return _canonical(data)

    @classmethod
    def from_json(cls, content: bytes) -> Manifest:
        """From what `to_json` gave; a ValueError says what is wrong with it."""
        data = json.loads(content)
        if isinstance(data, dict) and data.get("format_version") != 1:
            checksum = data.pop("checksum", None)
            expected = hashlib.sha256(_canonical(data)).hexdigest()
            if checksum != expected or content != _canonical({**data, "checksum": checksum}):
                raise ValueError(f"its checksum is {checksum} and its content's {expected}")
        if isinstance(data, dict) and data.get("format_version") in (1, 2):
            data = _in_this_version(data)
        return cls.model_validate(data)

    def check_model(
        self,
        tables: Sequence[TableSpec],
        weights: Sequence[WeightRecord] | None = None,
        *,
        what: str = "model",
    ) -> None:
        """See that a model is the one of this checkpoint: its tables, and the shapes of its dense weights.

        Names of weights are not compared: Keras numbers layers anew in each process.

        Raises:
            CheckpointMismatchError: Names each difference, model and checkpoint side by side.
        """
        problems = _table_problems({table.name: table for table in self.tables}, tables)
        if weights is not None:
            problems += _weight_problems(self.model.weights, weights)
        if problems:
            raise CheckpointMismatchError(
                f"The checkpoint belongs to another model: {'; '.join(problems)}. Use the model that wrote it, or "
                f"another model_dir. Received: {what} with tables {sorted(table.name for table in tables)}, checkpoint "
                f"of {self.model.name!r} at step {self.step} with tables {sorted(table.name for table in self.tables)}"
            )

    def check_options(
        self,
        tables: Sequence[TableSpec],
        optimizer: Optimizer | None = None,
        *,
        changed_options: bool = False,
    ) -> None:
        """See that training can go on with the options that wrote this checkpoint.

        What rows are made of must be equal: optimizer (learning rate aside), value type, start values, blocks. So must
        filters and eviction, unless `changed_options`, which only says the difference in the log. Where rows are
        stored is free.

        Args:
            tables: of the model, with their optimizers.
            optimizer: of the dense weights; None is not compared.

        Raises:
            CheckpointMismatchError: Names what differs, model and checkpoint side by side.
        """
        saved = {table.name: table for table in self.tables}
        try:
            for spec in tables:
                check_spec(saved[spec.name].model_dump(), spec)
        except ValueError as error:
            raise CheckpointMismatchError(f"{error}. A warm start takes values only") from error
        if optimizer is not None and self.model.optimizer is not None:
            theirs = Optimizer.from_dict(self.model.optimizer)
            if not optimizer.compatible_with(theirs):
                raise CheckpointMismatchError(
                    "The checkpoint's dense weights have another optimizer. A warm start takes values only. "
                    f"Received: {optimizer} in the model, {theirs} in the checkpoint"
                )
        differing = [text for spec in tables for text in _changed_policies(saved[spec.name], spec)]
        if differing and not changed_options:
            raise CheckpointMismatchError(
                "The filter or eviction of a table is another one than its checkpoint's; to go on with the new one, "
                f"set CheckpointOptions(changed_options=True). Received: {'; '.join(differing)}"
            )
        if differing:
            logger.warning("Going on with changed options: %s", "; ".join(differing))

    def check_warm_start(self, tables: Sequence[TableSpec], warm_start: WarmStart) -> None:
        """See that what a warm start asks of this checkpoint is there and fits.

        Raises:
            CheckpointMismatchError: Names what does not fit, model and checkpoint side by side.
        """
        saved = {table.name: table for table in self.tables}
        wanted = {table.name: table for table in tables}
        try:
            for ours, theirs in warm_start.sources(saved, wanted).items():
                check_spec(saved[theirs].model_dump(), wanted[ours], values_only=warm_start.values_only)
        except ValueError as error:
            raise CheckpointMismatchError(str(error)) from error


def _in_this_version(data: dict[str, Any]) -> dict[str, Any]:
    """A manifest of version 1 or 2 as one of this version: files had their SHA-256 under that name."""
    files = [dict(file) for file in data.get("files", [])]
    for file in files:
        if "sha256" in file:
            file["checksum"] = f"sha256:{file.pop('sha256')}"
    return {**data, "files": files, "format_version": 3}


def _canonical(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


def weight_records(model: Any) -> tuple[WeightRecord, ...]:
    """The float weights of a built Keras model: the trainable ones in model order, then the others."""
    return tuple(
        WeightRecord(path=variable.path, shape=tuple(variable.shape), trainable=trainable)
        for trainable, variables in ((True, model.trainable_weights), (False, model.non_trainable_weights))
        for variable in variables
        if "float" in str(variable.dtype)
    )


def model_config(model: Any) -> dict[str, Any] | None:
    """The model's Keras config as JSON, or None where it has none (a subclassed model without get_config)."""
    import keras

    try:
        config: dict[str, Any] = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    except (NotImplementedError, TypeError, ValueError):
        return None
    return config


_POLICIES = ("filter_option", "evict_option", "evict_steps")


def _changed_policies(saved: TableRecord, spec: TableSpec) -> list[str]:
    theirs, ours = saved.model_dump()["option"], spec.option.to_dict()
    return [
        f"table {spec.name!r} has {name} {ours.get(name)} in the model and {theirs.get(name)} in the checkpoint"
        for name in _POLICIES
        if ours.get(name) != theirs.get(name)
    ]


def _table_problems(saved: Mapping[str, TableRecord], tables: Sequence[TableSpec]) -> list[str]:
    only_saved = sorted(set(saved) - {table.name for table in tables})
    problems = [f"table {name!r} is in the checkpoint only" for name in only_saved]
    for table in tables:
        record = saved.get(table.name)
        if record is None:
            problems.append(f"table {table.name!r} is in the model only")
        elif record.embedding_dim != table.embedding_dim:
            problems.append(
                f"table {table.name!r} has embedding_dim {table.embedding_dim} in the model and "
                f"{record.embedding_dim} in the checkpoint"
            )
    return problems


def _weight_problems(saved: Sequence[WeightRecord], weights: Sequence[WeightRecord]) -> list[str]:
    if len(saved) != len(weights):
        return [f"the model has {len(weights)} dense weights and the checkpoint {len(saved)}"]
    return [
        f"dense weight {mine.path!r} has shape {mine.shape} in the model and {theirs.shape} "
        f"({theirs.path!r}) in the checkpoint"
        for mine, theirs in zip(weights, saved, strict=True)
        if mine.shape != theirs.shape or mine.trainable != theirs.trainable
    ]
