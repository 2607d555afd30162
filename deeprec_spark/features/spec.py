"""FeatureSpec: the contract between feature preparation, training, export and serving."""

from __future__ import annotations

from collections.abc import Sequence
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


class Grouping(BaseModel):
    """How samples are stored: those of one user or request as one row, a group, with its items in lists.

    A group is made of samples that agree in the raw columns `by` and in all group-level `features`, so a value that is
    stored once for a group is that of each of its samples. All other features, labels and weights are item-level.

    `index` is the column, not stored, that says of each sample which group of its batch it belongs to: a model that
    computes a part of itself once for each group takes it as an input (see `layers.ExpandGroups`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: tuple[str, ...] = Field(min_length=1, description="Raw columns whose equal values make a group.")
    features: tuple[str, ...] = Field(min_length=1, description="Features that are stored once for a group.")
    max_items: int = Field(256, ge=1, description="Larger groups are stored as several.")
    index: str = Field("group_index", min_length=1, description="Column of each sample's group in its batch.")


class FeatureSpec(BaseModel):
    """The columns of a prepared data set, in model order.

    With `grouping`, samples are stored in groups, and models made of the spec compute group-level parts once for each
    group. Data that are not grouped fit the same spec: each sample is then a group of its own.

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
    grouping: Grouping | None = None

    @model_validator(mode="after")
    def _check(self) -> FeatureSpec:
        names = [feature.name for feature in self.features] + [label.name for label in self.labels]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"Column names must be unique. Received: repeated names {repeated}")
        if self.grouping is not None:
            self._check_grouping(self.grouping)
        return self

    def _check_grouping(self, grouping: Grouping) -> None:
        unknown = [name for name in grouping.features if name not in self.feature_names]
        if unknown:
            raise ValueError(
                f"Group-level features must be features of the spec: {self.feature_names}. Received: {unknown}"
            )
        if grouping.index in self.feature_names + self.label_names:
            raise ValueError(
                "The grouping's index column needs a name that no feature or label has. "
                f"Received: index={grouping.index!r}"
            )
        if not self.item_features:
            raise ValueError(
                "A group needs at least one item-level feature. "
                f"Received: all features are group-level: {list(grouping.features)}"
            )

    def of_kind(self, *kinds: FeatureKind) -> tuple[Feature, ...]:
        """The features of these kinds, in order."""
        return tuple(feature for feature in self.features if feature.kind in kinds)

    @property
    def group_features(self) -> tuple[Feature, ...]:
        """The features that have one value for each group, in order; none without a grouping."""
        names = self.grouping.features if self.grouping else ()
        return tuple(feature for feature in self.features if feature.name in names)

    @property
    def item_features(self) -> tuple[Feature, ...]:
        """The features that have one value for each sample, in order; all without a grouping."""
        names = self.grouping.features if self.grouping else ()
        return tuple(feature for feature in self.features if feature.name not in names)

    @property
    def sample_column(self) -> str | None:
        """A column of which each sample has one number, by which stored samples can be counted; None: count rows."""
        if self.grouping is None:
            return None
        single = [
            feature.name
            for feature in self.item_features
            if feature.kind is not FeatureKind.SEQUENCE and feature.width is None
        ]
        return next(iter([*single, *self.label_names]), None)

    def grouped(
        self, by: Sequence[str], features: Sequence[str] | None = None, *, max_items: int = 256
    ) -> FeatureSpec:
        """The spec for data that are stored in groups.

        Args:
            by: raw columns whose equal values make a group, such as a user's or a request's id.
            features: stored once for a group; None takes those of group "user".
            max_items: larger groups are stored as several.

        Raises:
            ValueError: no feature is group-level, or all are.

        Example:
            >>> spec.grouped(["user"]).group_features
            (Feature(name='user', ...), Feature(name='age', ...))
        """
        names = [feature.name for feature in self.features if feature.group == "user"]
        chosen = tuple(names if features is None else features)
        if not chosen:
            raise ValueError(
                "No feature is stored once for a group: name them (group_features), or give features the group "
                f"'user' in the spec. Received: group_by={list(by)}, group_features={features}"
            )
        grouping = Grouping(by=tuple(by), features=chosen, max_items=max_items)
        return FeatureSpec(features=self.features, labels=self.labels, grouping=grouping)

    def with_columns(self, features: Sequence[Feature], labels: Sequence[Label]) -> FeatureSpec:
        """A spec of these of its features and of these labels; without a grouping that would be of no use to it."""
        grouping = self.grouping
        if grouping is not None:
            names = tuple(feature.name for feature in features if feature.name in grouping.features)
            both = bool(names) and len(names) < len(features)
            grouping = grouping.model_copy(update={"features": names}) if both else None
        return FeatureSpec(features=tuple(features), labels=tuple(labels), grouping=grouping)

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
