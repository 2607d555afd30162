"""Groups that hold hardly more than one sample: seen, explained and warned of."""

from __future__ import annotations

import logging

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses

from deeprec_spark.features.groups import quoted
from deeprec_spark.features.spec import FeatureSpec, Grouping

logger = logging.getLogger(__name__)

WORTHWHILE = 2.0
"""Samples of a group on average, below which storing groups saves next to nothing."""


def count_groups(grouping: Grouping) -> Column:
    """About how many groups there are, as an aggregate of samples in one pass without a shuffle."""
    return F.ceil(
        F.greatest(
            _about([*grouping.by, *grouping.features]), F.count(F.lit(1)) / F.lit(float(grouping.max_items))
        )
    )


def warn_of_small_groups(rows: DataFrame, spec: FeatureSpec, samples: int, groups: int) -> None:
    """Log a warning with the numbers and the remedy where groups hold fewer than two samples on average.

    Args:
        rows: flat samples, with the columns of the grouping; they are read again only where there is something to say.
        spec: with a grouping.
        samples, groups: how many there are.
    """
    grouping = spec.grouping
    if grouping is None or samples == 0 or samples >= WORTHWHILE * groups:
        return
    counts = [_about(grouping.by), *(_about([*grouping.by, name]) for name in grouping.features)]
    keys, *split = rows.agg(*[count.alias(f"count{i}") for i, count in enumerate(counts)]).collect()[0]
    changing = {
        name: found for name, found in zip(grouping.features, split, strict=True) if found > 1.5 * keys
    }
    if changing:
        cause = (
            f"group-level features differ between samples of equal group_by, of which there are about {keys}: "
            + ", ".join(f"{name!r} makes about {found} groups of them" for name, found in changing.items())
            + ". Leave them out of group_features, which makes them item-level, or group by what they are constant in, "
            "such as a request"
        )
    else:
        cause = (
            f"group_by has about {keys} values itself. Group by a column whose values come again, raise max_items if "
            "that is below 2, or store the samples flat (group_by=None)"
        )
    logger.warning(
        "Groups hold %.2f samples on average (%d samples in about %d groups), so storing them in groups saves next to "
        "nothing: %s. Received: group_by=%s, group_features=%s, max_items=%d",
        samples / groups, samples, groups, cause, list(grouping.by), list(grouping.features), grouping.max_items,
    )  # fmt: skip


def _about(names: list[str] | tuple[str, ...]) -> Column:
    return F.approx_count_distinct(F.xxhash64(*[quoted(name) for name in dict.fromkeys(names)]))
