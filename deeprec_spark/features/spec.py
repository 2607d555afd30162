"""FeatureSpec: the contract between feature preparation, training, export and serving."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

RawType = Literal["float32", "int64", "string"]


class FeatureKind(str, Enum):
    """How a column enters a model."""

    DENSE = "dense"  # one float32, or a vector of `width`
    CATEGORICAL = "categorical"  # one int64 id
    SEQUENCE = "sequence"  # a list of int64 ids, padded to `max_length`


class Feature(BaseModel):
    """One prepared column and how it came from the raw one.

    `raw_type` is what a caller of the deployed model gives: strings are hashed by Fingerprint64 (inside the
    exported graph too), int64 ids are taken as they are, numbers pass `transform`. Null takes `default`,
    a raw value that goes through hashing or transformation like any other. In a sequence null, "" (strings)
    and the padding value (raw int64 ids) are no ids: they are left out, then the last `max_length` are kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: FeatureKind
    raw_type: RawType
    default: float | int | str | None = None
    transform: Literal["none", "log1p"] = "none"
    table: str | None = Field(None, description="Embedding table; features that name one table share it.")
    embedding_dim: int | None = Field(None, ge=1)
    width: int | None = Field(None, ge=1, description="Length of a dense vector column; None is a scalar.")
    max_length: int | None = Field(None, ge=1, description="Sequences keep their last `max_length` ids.")
    padding_value: int = Field(-1, description="Fills a sequence up to max_length; never a real id.")
    group: Literal["user", "item", "context"] = Field("context", description="The tower it belongs to.")

    @model_validator(mode="after")
    def _check(self) -> Feature:
        if self.kind is FeatureKind.SEQUENCE and self.max_length is None:
            raise ValueError(f"Sequence feature {self.name!r} needs max_length. Received: max_length=None")
        if self.kind is FeatureKind.DENSE and self.raw_type == "string":
            raise ValueError(
                f"Dense feature {self.name!r} must be a number: raw_type float32 or int64. "
                "Received: raw_type='string'"
            )
        if self.kind is not FeatureKind.DENSE and self.raw_type == "float32":
            raise ValueError(
                f"Feature {self.name!r} holds ids: raw_type must be int64 or string. "
                "Received: raw_type='float32'"
            )
        return self

    @property
    def table_name(self) -> str:
        """The embedding table that this feature reads."""
        return self.table or self.name


class Label(BaseModel):
    """One label column: float32, or int64 class numbers where `kind` is multiclass."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["binary", "regression", "multiclass"] = "binary"


class FeatureSpec(BaseModel):
    """The columns of a prepared data set, in model order.

    Example:
        >>> spec = FeatureSpec(
        ...     features=[Feature(name="user", kind="categorical", raw_type="int64")],
        ...     labels=[Label(name="label")],
        ... )
        >>> FeatureSpec.model_validate_json(spec.model_dump_json()) == spec
        True
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    features: tuple[Feature, ...]
    labels: tuple[Label, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> FeatureSpec:
        names = [feature.name for feature in self.features] + [label.name for label in self.labels]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"Column names must be unique. Received: repeated names {repeated}")
        return self

    def of_kind(self, *kinds: FeatureKind) -> tuple[Feature, ...]:
        """The features of these kinds, in order."""
        return tuple(feature for feature in self.features if feature.kind in kinds)

    @property
    def feature_names(self) -> list[str]:
        """Column names of the features, in order."""
        return [feature.name for feature in self.features]

    @property
    def label_names(self) -> list[str]:
        """Column names of the labels, in order."""
        return [label.name for label in self.labels]

    def save(self, path: str | Path) -> None:
        """Write the spec as JSON."""
        Path(path).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> FeatureSpec:
        """Read a spec that `save` wrote; a ValidationError names what does not fit."""
        return cls.model_validate_json(Path(path).read_text(encoding="utf-8"))
