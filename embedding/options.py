"""Options of an embedding variable: how rows start, who gets one, who loses it, where they live.

Names and meanings are DeepRec's. Example:

    >>> option = EmbeddingVariableOption(
    ...     filter_option=CounterFilter(filter_freq=3), evict_option=GlobalStepEvict(steps_to_live=10_000)
    ... )
    >>> EmbeddingVariableOption.from_dict(option.to_dict()) == option
    True
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deeprec_spark.embedding._serial import FLOAT32_MAX, Serializable, integer, normalize, require
from deeprec_spark.embedding.policies import (
    CBFFilter,
    CounterFilter,
    EvictOption,
    FilterOption,
    GlobalStepEvict,
    L2WeightEvict,
    ProbabilityFilter,
    TimeEvict,
)
from deeprec_spark.embedding.storage import CacheStrategy, StorageOption, StorageType

__all__ = [
    "CBFFilter",
    "CacheStrategy",
    "Constant",
    "CounterFilter",
    "DynamicDimensionOption",
    "EmbeddingVariableOption",
    "EvictOption",
    "FilterOption",
    "GlobalStepEvict",
    "Initializer",
    "InitializerOption",
    "L2WeightEvict",
    "Normal",
    "ProbabilityFilter",
    "StorageOption",
    "StorageType",
    "TimeEvict",
    "TruncatedNormal",
    "Uniform",
]


class Initializer(Serializable):
    """The start value of a row, a pure function of (table seed, key, position)."""


@dataclass(frozen=True)
class Constant(Initializer):
    """Every element starts as `value`."""

    value: float = 0.0

    def __post_init__(self) -> None:
        normalize(self, numbers=("value",))


@dataclass(frozen=True)
class Uniform(Initializer):
    """Elements start uniformly distributed in [minval, maxval)."""

    minval: float = -0.05
    maxval: float = 0.05

    def __post_init__(self) -> None:
        normalize(self, numbers=("minval", "maxval"))
        require(
            0 <= self.maxval - self.minval <= FLOAT32_MAX,
            "minval must be at most maxval, and their difference a float32.",
            minval=self.minval,
            maxval=self.maxval,
        )


@dataclass(frozen=True)
class Normal(Initializer):
    """Elements start normally distributed."""

    mean: float = 0.0
    stddev: float = 0.05

    def __post_init__(self) -> None:
        normalize(self, numbers=("mean", "stddev"))
        require(
            self.stddev >= 0 and abs(self.mean) + 8 * self.stddev <= FLOAT32_MAX,
            "stddev must be at least 0, and values up to 8 stddev from the mean float32.",
            mean=self.mean,
            stddev=self.stddev,
        )


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Elements start normally distributed, drawn again beyond two standard deviations."""

    mean: float = 0.0
    stddev: float = 0.05

    def __post_init__(self) -> None:
        normalize(self, numbers=("mean", "stddev"))
        require(
            self.stddev >= 0 and abs(self.mean) + 8 * self.stddev <= FLOAT32_MAX,
            "stddev must be at least 0, and values up to 8 stddev from the mean float32.",
            mean=self.mean,
            stddev=self.stddev,
        )


@dataclass(frozen=True)
class InitializerOption(Serializable):
    """How rows start, and what an id reads that has no permission for a row yet."""

    initializer: Initializer = field(default_factory=Uniform)
    default_value_no_permission: float = 0.0

    def __post_init__(self) -> None:
        require(
            isinstance(self.initializer, Initializer),
            "initializer must be Constant, Uniform, Normal or TruncatedNormal.",
            initializer=self.initializer,
        )
        normalize(self, numbers=("default_value_no_permission",))


@dataclass(frozen=True)
class DynamicDimensionOption(Serializable):
    """A row's dimension grows in blocks with its id's frequency; it never shrinks.

    Lookups are filled up with zeros; gradients of absent blocks are dropped; a new block starts with the values that it
    would have had from the start.

    Args:
        block_num: equal blocks that make `embedding_dim`, 1 to 16.
        thresholds: frequencies that give the second block, the third, ...; ascending. None takes DeepRec's rank rule:
            frequencies decay, and block k goes to the `(p^(n+1-k) - 1) / (p^(n+1) - 1)` most frequent part of the
            ids, where p is `rank_base` and n `block_num`.
        rank_base: p of the rank rule, above 1.
        decay: factor of a frequency from one refresh to the next, within [0, 1).
        refresh_steps: steps from one refresh of ranks to the next.
    """

    block_num: int = 1
    thresholds: tuple[int, ...] | None = None
    rank_base: float = 2.0
    decay: float = 0.9
    refresh_steps: int = 1000

    def __post_init__(self) -> None:
        normalize(self, ("block_num", "refresh_steps"), ("rank_base", "decay"))
        require(1 <= self.block_num <= 16, "block_num must be within [1, 16].", block_num=self.block_num)
        if self.thresholds is not None:
            require(
                isinstance(self.thresholds, (list, tuple)),
                "thresholds must be a sequence of integers.",
                thresholds=self.thresholds,
            )
            whole = tuple(integer(f"thresholds[{i}]", value) for i, value in enumerate(self.thresholds))
            object.__setattr__(self, "thresholds", whole)
            ascending = all(a <= b for a, b in zip(self.thresholds, self.thresholds[1:], strict=False))
            require(
                len(self.thresholds) == self.block_num - 1
                and ascending
                and all(0 < value < 2**30 for value in self.thresholds),
                "thresholds must be block_num - 1 ascending frequencies.",
                thresholds=self.thresholds,
                block_num=self.block_num,
            )
        require(self.rank_base > 1, "rank_base must be above 1.", rank_base=self.rank_base)
        require(0 <= self.decay < 1, "decay must be within [0, 1).", decay=self.decay)
        require(
            self.refresh_steps >= 1, "refresh_steps must be at least 1.", refresh_steps=self.refresh_steps
        )

    @property
    def by_rank(self) -> bool:
        """Whether the rank rule is in force."""
        return self.thresholds is None and self.block_num > 1


@dataclass(frozen=True)
class EmbeddingVariableOption(Serializable):
    """All options of one embedding variable.

    Args:
        filter_option: admission filter; None gives every id a row at its first occurrence.
        evict_option: one eviction policy or several, of which any may remove a row; None never removes one. Policies
            run before a checkpoint is written, at calls, and every `evict_steps` steps if given.
        storage_option: where rows live.
        init_option: how rows start.
        evict_steps: steps from one eviction pass to the next; None leaves it to checkpoints and calls.
        value_dtype: "float32", or "bfloat16": values take half the memory and are rounded stochastically (repeatably);
            slots stay float32.
        dynamic_dimension: dimensions that grow with frequency; None gives all rows all of it.
    """

    filter_option: FilterOption | None = None
    evict_option: EvictOption | tuple[EvictOption, ...] | None = None
    storage_option: StorageOption = field(default_factory=StorageOption)
    init_option: InitializerOption = field(default_factory=InitializerOption)
    evict_steps: int | None = None
    value_dtype: str = "float32"
    dynamic_dimension: DynamicDimensionOption | None = None

    def __post_init__(self) -> None:
        if isinstance(self.evict_option, (list, tuple)):
            object.__setattr__(self, "evict_option", tuple(self.evict_option))
        for policy in self.evict_options:
            require(
                isinstance(policy, EvictOption), "evict_option must be EvictOptions.", evict_option=policy
            )
        kinds = [type(policy) for policy in self.evict_options]
        require(
            len(set(kinds)) == len(kinds),
            "Each kind of eviction may be given once.",
            evict_option=self.evict_option,
        )
        for name, kind, optional in (
            ("filter_option", FilterOption, True),
            ("storage_option", StorageOption, False),
            ("init_option", InitializerOption, False),
            ("dynamic_dimension", DynamicDimensionOption, True),
        ):
            value = getattr(self, name)
            require(
                (optional and value is None) or isinstance(value, kind),
                f"{name} must be a {kind.__name__}.",
                **{name: value},
            )
        normalize(self, integers=("evict_steps",))
        require(
            self.evict_steps is None or self.evict_steps >= 1,
            "evict_steps must be None or at least 1.",
            evict_steps=self.evict_steps,
        )
        require(
            self.evict_steps is None or bool(self.evict_options),
            "evict_steps needs an evict_option: without one, nothing is ever evicted.",
            evict_steps=self.evict_steps,
            evict_option=self.evict_option,
        )
        require(
            self.value_dtype in ("float32", "bfloat16"),
            "value_dtype must be 'float32' or 'bfloat16'.",
            value_dtype=self.value_dtype,
        )

    @property
    def evict_options(self) -> tuple[EvictOption, ...]:
        """The eviction policies, none, one or several."""
        if self.evict_option is None:
            return ()
        return self.evict_option if isinstance(self.evict_option, tuple) else (self.evict_option,)
