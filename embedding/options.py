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
from typing import TypeVar

from deeprec_spark.embedding._serial import Serializable


def _require(condition: bool, message: str, **received: object) -> None:
    if not condition:
        values = ", ".join(f"{name}={value!r}" for name, value in received.items())
        raise ValueError(f"{message} Received: {values}")


_Member = TypeVar("_Member", bound=Enum)


def _member(kind: type[_Member], name: str, value: object) -> _Member:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.name for member in kind)
        raise ValueError(f"{name} must be one of {known}. Received: {name}={value!r}") from None


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


_COUNTER_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}


@dataclass(frozen=True)
class CBFFilter(FilterOption):
    """Counts ids in a counting Bloom filter: fixed memory, however many rare ids there are.

    The `filter_freq`-th occurrence gets the row. With a probability of about `false_positive_probability` an id is
    admitted too early, because others share its counters; never too late. Counters saturate. An evicted id keeps its
    count and is admitted again at its next occurrence.

    Args:
        filter_freq: occurrences that admit.
        max_element_size: distinct ids that the filter is made for.
        false_positive_probability: within (0, 1).
        counter_type: uint8, uint16, uint32 or uint64; must be able to hold `filter_freq`.
    """

    filter_freq: int = 0
    max_element_size: int = 0
    false_positive_probability: float = 0.01
    counter_type: str = "uint32"

    def __post_init__(self) -> None:
        _require(
            self.counter_type in _COUNTER_BYTES,
            f"counter_type must be one of {sorted(_COUNTER_BYTES)}.",
            counter_type=self.counter_type,
        )
        limit = min(2 ** (8 * self.counter_bytes), 2**32)
        _require(
            0 <= self.filter_freq < limit,
            f"filter_freq must be within [0, {limit}), which {self.counter_type} counters hold.",
            filter_freq=self.filter_freq,
        )
        _require(
            self.max_element_size >= 1,
            "max_element_size must be at least 1.",
            max_element_size=self.max_element_size,
        )
        _require(
            0 < self.false_positive_probability < 1,
            "false_positive_probability must be within (0, 1).",
            false_positive_probability=self.false_positive_probability,
        )

    @property
    def counter_bytes(self) -> int:
        """Bytes of one counter."""
        return _COUNTER_BYTES[self.counter_type]

    @property
    def num_counters(self) -> int:
        """Counters of an ideal filter: ceil(n |ln p| / ln(2)^2)."""
        return math.ceil(
            self.max_element_size * -math.log(self.false_positive_probability) / math.log(2) ** 2
        )

    @property
    def num_hashes(self) -> int:
        """Counters of one id: ceil(|log2 p|)."""
        return math.ceil(-math.log2(self.false_positive_probability))


@dataclass(frozen=True)
class ProbabilityFilter(FilterOption):
    """Admits an id at each occurrence with a fixed probability; no memory for ids that were not drawn.

    The draw is a pure function of (seed, id, number of the training lookup): repeatable, on any number of servers.
    """

    probability: float = 1.0

    def __post_init__(self) -> None:
        _require(
            0 < self.probability <= 1, "probability must be within (0, 1].", probability=self.probability
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


@dataclass(frozen=True)
class TimeEvict(EvictOption):
    """Removes rows without an update for more than `seconds_to_live` seconds of wall-clock time."""

    seconds_to_live: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.seconds_to_live is None or self.seconds_to_live >= 0,
            "seconds_to_live must be None or at least 0.",
            seconds_to_live=self.seconds_to_live,
        )


@dataclass(frozen=True)
class L2WeightEvict(EvictOption):
    """Removes rows whose value has an L2 norm below `l2_weight_threshold`; -1 keeps all rows."""

    l2_weight_threshold: float = -1.0

    def __post_init__(self) -> None:
        _require(
            self.l2_weight_threshold == -1.0
            or (math.isfinite(self.l2_weight_threshold) and self.l2_weight_threshold > 0),
            "l2_weight_threshold must be above 0, or -1 for none.",
            l2_weight_threshold=self.l2_weight_threshold,
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
    """Where rows live, first tier first."""

    DRAM = "DRAM"
    PMEM_LIBPMEM = "PMEM_LIBPMEM"  # a file: on a DAX mount, or in any directory
    PMEM_MEMKIND = "PMEM_MEMKIND"  # a NUMA node: KMEM-DAX persistent memory, CXL memory
    SSDHASH = "SSDHASH"
    LEVELDB = "LEVELDB"
    DRAM_PMEM = "DRAM_PMEM"
    DRAM_SSDHASH = "DRAM_SSDHASH"
    DRAM_LEVELDB = "DRAM_LEVELDB"
    DRAM_PMEM_SSDHASH = "DRAM_PMEM_SSDHASH"
    HBM = "HBM"
    HBM_DRAM = "HBM_DRAM"
    HBM_DRAM_SSDHASH = "HBM_DRAM_SSDHASH"

    @property
    def tiers(self) -> tuple[str, ...]:
        """The kinds of the tiers, first tier first."""
        names = self.value.split("_") if self.value.startswith(("DRAM", "HBM")) else [self.value]
        return tuple("PMEM_LIBPMEM" if name == "PMEM" else name for name in names)


class CacheStrategy(str, Enum):
    """Which rows stay in the first tier."""

    LFU = "LFU"
    LRU = "LRU"


@dataclass(frozen=True)
class StorageOption(Serializable):
    """The storage of a table's rows.

    Everything is computed on rows of the first tier. Rows that it has no room for move down, the least frequent (LFU)
    or the least recently used (LRU) first; a hit in a lower tier moves a row up again.

    Args:
        storage_type: the tiers.
        storage_path: directory of files; needed by PMEM_LIBPMEM, SSDHASH and LEVELDB tiers, made if absent. The files
            live as long as the process: what must survive is in checkpoints.
        storage_size: bytes of each tier, hard limits. Tiers without a number: 1 GiB, and the last one without limit.
        cache_strategy: LFU or LRU.
        numa_node: for PMEM_MEMKIND; None takes the first of the environment's MEMKIND_DAX_KMEM_NODES.
    """

    storage_type: StorageType = StorageType.DRAM
    storage_path: str | None = None
    storage_size: tuple[int, ...] = ()
    cache_strategy: CacheStrategy = CacheStrategy.LFU
    numa_node: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage_type", _member(StorageType, "storage_type", self.storage_type))
        object.__setattr__(
            self, "cache_strategy", _member(CacheStrategy, "cache_strategy", self.cache_strategy)
        )
        size: object = self.storage_size
        object.__setattr__(
            self, "storage_size", (size,) if isinstance(size, int) else tuple(self.storage_size)
        )
        _require(
            "HBM" not in self.storage_type.tiers,
            "HBM tiers need a GPU and an engine built for it, which this one is not; take DRAM.",
            storage_type=self.storage_type.value,
        )
        needs_path = {"PMEM_LIBPMEM", "SSDHASH", "LEVELDB"} & set(self.storage_type.tiers)
        _require(
            bool(self.storage_path) or not needs_path,
            f"storage_type {self.storage_type.value} needs storage_path, a directory.",
            storage_path=self.storage_path,
        )
        _require(
            self.storage_path is None or bool(needs_path),
            "storage_path has no meaning for a storage_type without files.",
            storage_type=self.storage_type.value,
            storage_path=self.storage_path,
        )
        _require(
            len(self.storage_size) <= len(self.storage_type.tiers)
            and all(size > 0 for size in self.storage_size),
            f"storage_size must have a positive number of bytes for each of the tiers {self.storage_type.tiers}.",
            storage_size=self.storage_size,
        )

    def limits(self) -> tuple[int, ...]:
        """Bytes of each tier; 0 is no limit."""
        count = len(self.storage_type.tiers)
        defaults = (1 << 30,) * (count - 1) + (0,)
        return tuple(self.storage_size) + defaults[len(self.storage_size) :]


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
        _require(1 <= self.block_num <= 16, "block_num must be within [1, 16].", block_num=self.block_num)
        if self.thresholds is not None:
            object.__setattr__(self, "thresholds", tuple(self.thresholds))
            ascending = all(a <= b for a, b in zip(self.thresholds, self.thresholds[1:], strict=False))
            _require(
                len(self.thresholds) == self.block_num - 1
                and ascending
                and all(0 < value < 2**32 for value in self.thresholds),
                "thresholds must be block_num - 1 ascending frequencies.",
                thresholds=self.thresholds,
                block_num=self.block_num,
            )
        _require(self.rank_base > 1, "rank_base must be above 1.", rank_base=self.rank_base)
        _require(0 <= self.decay < 1, "decay must be within [0, 1).", decay=self.decay)
        _require(
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
            _require(
                isinstance(policy, EvictOption), "evict_option must be EvictOptions.", evict_option=policy
            )
        kinds = [type(policy) for policy in self.evict_options]
        _require(
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
            _require(
                (optional and value is None) or isinstance(value, kind),
                f"{name} must be a {kind.__name__}.",
                **{name: value},
            )
        _require(
            self.evict_steps is None or self.evict_steps >= 1,
            "evict_steps must be None or at least 1.",
            evict_steps=self.evict_steps,
        )
        _require(
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
