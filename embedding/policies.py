"""Admission filters and eviction policies of embedding variables; `options` exports them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deeprec_spark.embedding._serial import Serializable, normalize, require


class FilterOption(Serializable):
    """Decides when an id is frequent enough for a row of its own."""


@dataclass(frozen=True)
class CounterFilter(FilterOption):
    """Counts every id exactly; its `filter_freq`-th occurrence, repeats in a batch included, gets the row.

    0 and 1 admit at once. Ids that are not admitted read `default_value_no_permission` and take no update; each has an
    entry of 16 bytes in the index, which with its free places comes to 20 to 40 bytes.
    """

    filter_freq: int = 0

    def __post_init__(self) -> None:
        normalize(self, integers=("filter_freq",))
        require(
            0 <= self.filter_freq < 2**30,
            "filter_freq must be within [0, 2**30).",
            filter_freq=self.filter_freq,
        )


_COUNTER_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}


@dataclass(frozen=True)
class CBFFilter(FilterOption):
    """Counts ids in a counting Bloom filter: fixed memory, however many rare ids there are.

    The `filter_freq`-th occurrence gets the row. With a probability of about `false_positive_probability` an id is
    admitted too early, because others share its counters; never too late. Counters saturate. An id that is evicted or
    erased keeps its count, which other ids share, and is admitted again at its next occurrence.

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
        require(
            self.counter_type in _COUNTER_BYTES,
            f"counter_type must be one of {sorted(_COUNTER_BYTES)}.",
            counter_type=self.counter_type,
        )
        normalize(self, ("filter_freq", "max_element_size"), ("false_positive_probability",))
        limit = min(2 ** (8 * self.counter_bytes), 2**30)
        require(
            0 <= self.filter_freq < limit,
            f"filter_freq must be within [0, {limit}) with {self.counter_type} counters.",
            filter_freq=self.filter_freq,
        )
        require(
            self.max_element_size >= 1,
            "max_element_size must be at least 1.",
            max_element_size=self.max_element_size,
        )
        require(
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
        normalize(self, numbers=("probability",))
        require(0 < self.probability <= 1, "probability must be within (0, 1].", probability=self.probability)


class EvictOption(Serializable):
    """Decides which rows an eviction pass removes."""


@dataclass(frozen=True)
class GlobalStepEvict(EvictOption):
    """Removes rows without an update for more than `steps_to_live` steps: `step - version > steps_to_live`.

    None keeps all rows. A row that was never updated is stamped by the first pass and not removed.
    """

    steps_to_live: int | None = None

    def __post_init__(self) -> None:
        normalize(self, integers=("steps_to_live",))
        require(
            self.steps_to_live is None or self.steps_to_live >= 0,
            "steps_to_live must be None or at least 0.",
            steps_to_live=self.steps_to_live,
        )


@dataclass(frozen=True)
class TimeEvict(EvictOption):
    """Removes rows without an update for more than `seconds_to_live` seconds of wall-clock time."""

    seconds_to_live: int | None = None

    def __post_init__(self) -> None:
        normalize(self, integers=("seconds_to_live",))
        require(
            self.seconds_to_live is None or self.seconds_to_live >= 0,
            "seconds_to_live must be None or at least 0.",
            seconds_to_live=self.seconds_to_live,
        )


@dataclass(frozen=True)
class L2WeightEvict(EvictOption):
    """Removes rows whose value has an L2 norm below `l2_weight_threshold`; -1 keeps all rows."""

    l2_weight_threshold: float = -1.0

    def __post_init__(self) -> None:
        normalize(self, numbers=("l2_weight_threshold",))
        require(
            self.l2_weight_threshold == -1.0 or self.l2_weight_threshold > 0,
            "l2_weight_threshold must be above 0, or -1 for none.",
            l2_weight_threshold=self.l2_weight_threshold,
        )
