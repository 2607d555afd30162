"""Options of an embedding variable: how rows start, who gets one, who loses it, where they live.

Names and meanings are DeepRec's. Example:

    >>> option = EmbeddingVariableOption(
    ...     filter_option=CounterFilter(filter_freq=3), evict_option=GlobalStepEvict(steps_to_live=10_000)
    ... )
    >>> EmbeddingVariableOption.from_dict(option.to_dict()) == option
    True
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from deeprec_spark.embedding._serial import Serializable


def _require(condition: bool, message: str, **received: object) -> None:
    if not condition:
        values = ", ".join(f"{name}={value!r}" for name, value in received.items())
        raise ValueError(f"{message} Received: {values}")


class FilterOption(Serializable):
    """Decides when an id is frequent enough for a row of its own."""


@dataclass(frozen=True)
class CounterFilter(FilterOption):
    """Counts every id exactly; its `filter_freq`-th occurrence, repeats in a batch included, gets the row.

    0 and 1 admit at once. Ids that are not admitted read `default_value_no_permission` and take no update;
    each costs 16 bytes of index.
    """

    filter_freq: int = 0

    def __post_init__(self) -> None:
        _require(
            0 <= self.filter_freq < 2**32,
            "filter_freq must be within [0, 2**32).",
            filter_freq=self.filter_freq,
        )


class EvictOption(Serializable):
    """Decides which rows an eviction pass removes."""


@dataclass(frozen=True)
class GlobalStepEvict(EvictOption):
    """Removes rows without an update for more than `steps_to_live` steps: `step - version > steps_to_live`.

    None keeps all rows. A row that was never updated is stamped by the first pass and not removed.
    """

    steps_to_live: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.steps_to_live is None or self.steps_to_live >= 0,
            "steps_to_live must be None or at least 0.",
            steps_to_live=self.steps_to_live,
        )


class Initializer(Serializable):
    """The start value of a row, a pure function of (table seed, key, position)."""


@dataclass(frozen=True)
class Constant(Initializer):
    """Every element starts as `value`."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _require(math.isfinite(self.value), "value must be finite.", value=self.value)


@dataclass(frozen=True)
class Uniform(Initializer):
    """Elements start uniformly distributed in [minval, maxval)."""

    minval: float = -0.05
    maxval: float = 0.05

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.minval) and math.isfinite(self.maxval) and self.minval <= self.maxval,
            "minval and maxval must be finite, and minval at most maxval.",
            minval=self.minval,
            maxval=self.maxval,
        )


@dataclass(frozen=True)
class Normal(Initializer):
    """Elements start normally distributed."""

    mean: float = 0.0
    stddev: float = 0.05

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.mean) and math.isfinite(self.stddev) and self.stddev >= 0,
            "mean and stddev must be finite, and stddev at least 0.",
            mean=self.mean,
            stddev=self.stddev,
        )


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Elements start normally distributed, drawn again beyond two standard deviations."""

    mean: float = 0.0
    stddev: float = 0.05

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.mean) and math.isfinite(self.stddev) and self.stddev >= 0,
            "mean and stddev must be finite, and stddev at least 0.",
            mean=self.mean,
            stddev=self.stddev,
        )


@dataclass(frozen=True)
class InitializerOption(Serializable):
    """How rows start, and what an id reads that has no permission for a row yet."""

    initializer: Initializer = field(default_factory=Uniform)
    default_value_no_permission: float = 0.0

    def __post_init__(self) -> None:
        _require(
            isinstance(self.initializer, Initializer),
            "initializer must be Constant, Uniform, Normal or TruncatedNormal.",
            initializer=self.initializer,
        )
        _require(
            math.isfinite(self.default_value_no_permission),
            "default_value_no_permission must be finite.",
            default_value_no_permission=self.default_value_no_permission,
        )


class StorageType(str, Enum):
    """Where rows live."""

    DRAM = "DRAM"


@dataclass(frozen=True)
class StorageOption(Serializable):
    """The storage of a table's rows: memory."""

    storage_type: StorageType = StorageType.DRAM

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "storage_type", StorageType(self.storage_type))
        except ValueError:
            known = ", ".join(member.name for member in StorageType)
            raise ValueError(
                f"storage_type must be one of {known}. Received: storage_type={self.storage_type!r}"
            ) from None


@dataclass(frozen=True)
class EmbeddingVariableOption(Serializable):
    """All options of one embedding variable.

    Args:
        filter_option: admission filter; None gives every id a row at its first occurrence.
        evict_option: eviction policy; None never removes a row.
        storage_option: where rows live.
        init_option: how rows start.
    """

    filter_option: FilterOption | None = None
    evict_option: EvictOption | None = None
    storage_option: StorageOption = field(default_factory=StorageOption)
    init_option: InitializerOption = field(default_factory=InitializerOption)

    def __post_init__(self) -> None:
        for name, kind in (
            ("filter_option", FilterOption),
            ("evict_option", EvictOption),
        ):
            value = getattr(self, name)
            _require(
                value is None or isinstance(value, kind),
                f"{name} must be a {kind.__name__}.",
                **{name: value},
            )
        for name, required in (("storage_option", StorageOption), ("init_option", InitializerOption)):
            value = getattr(self, name)
            _require(isinstance(value, required), f"{name} must be a {required.__name__}.", **{name: value})
