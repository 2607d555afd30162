"""Samples of one user or request as one row, a group, with its items in lists; and back.

flat                                   grouped by user, with the group-level features user and age
user │ age │ item │ label              user │ age │ item      │ label
   1 │  30 │   10 │     0                 1 │  30 │ [10, 11]  │ [0, 1]
   1 │  30 │   11 │     1                 2 │  50 │ [10]      │ [1]
   2 │  50 │   10 │     1
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.spec import FeatureSpec

PREPARED_MARK = "deeprec_spark.prepared"
"""Key in the metadata of a column that `prepare_dataframe` made."""
GROUPED_MARK = "deeprec_spark.items"
"""Key in the metadata of a column that holds a list with one value for each item of a group."""

__all__ = [
    "GROUPED_MARK",
    "PREPARED_MARK",
    "group_rows",
    "is_grouped",
    "key_columns",
    "quoted",
    "ungroup_rows",
]


def quoted(name: str) -> Column:
    """The column of exactly this name, dots included."""
    return F.col("`" + name.replace("`", "``") + "`")


def is_grouped(df: DataFrame) -> bool:
    """Whether the rows of this DataFrame are groups that `group_rows` made, perhaps by way of Parquet."""
    return bool(_item_columns(df))


def key_columns(spec: FeatureSpec) -> list[str]:
    """The raw columns that say which samples belong together and are no features."""
    if spec.grouping is None:
        return []
    return [name for name in spec.grouping.by if name not in spec.feature_names]


def group_rows(prepared: DataFrame, spec: FeatureSpec) -> DataFrame:
    """Group prepared samples by the spec's grouping.

    Samples that agree in `grouping.by` and in all group-level features make a group; one of more than `max_items`
    becomes several. Equal data give equal groups, their items in the same order. All samples of a group pass through
    one task, which sorts them on disk where memory is short; no more than `max_items` are one row.

    Args:
        prepared: the features, `key_columns(spec)`, and any others (labels, weights), which are item-level.
        spec: with a grouping.

    Returns:
        The group-level features, then lists of all else but the key columns; columns in the order of `prepared`.

    Raises:
        DataError: a column of the grouping is missing.
    """
    grouping = spec.grouping
    if grouping is None:
        raise DataError("The spec says nothing of groups: make it with FeatureSpec.grouped. Received: None")
    keys = key_columns(spec)
    missing = [name for name in (*grouping.by, *grouping.features) if name not in prepared.columns]
    if missing:
        raise DataError(f"The data lack columns to group by: {missing}. Received: columns {prepared.columns}")
    by = [*keys, *(feature.name for feature in spec.group_features)]
    by += [name for name in grouping.by if name not in by]
    by_features = [name for name in by if name not in (*keys, *grouping.features)]
    items = [name for name in prepared.columns if name not in by or name in by_features]
    # Numbered, because fields of a struct whose names have dots cannot be told apart from fields of fields.
    key_names = [f"key{index}" for index in range(len(by))]
    rows = prepared.select(
        *[quoted(name).alias(key) for name, key in zip(by, key_names, strict=True)],
        F.struct(*[quoted(name).alias(f"f{index}") for index, name in enumerate(items)]).alias("item"),
    )
    # Cut before they are collected: a key of very many samples (that of unknown users) is many rows, which can spill,
    # but would be one list, which must fit into memory.
    number = F.row_number().over(Window.partitionBy(*key_names).orderBy("item")) - 1
    numbered = rows.withColumn("part", F.floor(number / F.lit(grouping.max_items)))
    split = numbered.groupBy(*key_names, "part").agg(F.sort_array(F.collect_list("item")).alias("items"))
    # One order for equal data, and a mixed one.
    ordered = split.sortWithinPartitions(F.xxhash64(*key_names), *key_names, "part")
    made = []
    for name in prepared.columns:
        marks = prepared.schema[name].metadata
        if name in items:
            place = f"f{items.index(name)}"
            made.append(F.col("items").getField(place).alias(name, metadata={**marks, GROUPED_MARK: True}))
        elif name not in keys:
            made.append(F.col(key_names[by.index(name)]).alias(name, metadata=marks))
    return ordered.select(*made)


def ungroup_rows(df: DataFrame) -> DataFrame:
    """One row for each sample again, in the order of the groups; a DataFrame without groups as it is."""
    items = _item_columns(df)
    if not items:
        return df
    numbered = [f"f{index}" for index in range(len(items))]
    others = [name for name in df.columns if name not in items]
    kept = [f"g{index}" for index in range(len(others))]
    renamed = df.select(
        *[quoted(name).alias(new) for name, new in zip(others, kept, strict=True)],
        *[quoted(name).alias(new) for name, new in zip(items, numbered, strict=True)],
    )
    rows = renamed.select(*kept, F.explode(F.arrays_zip(*numbered)).alias("item"))
    made = []
    for name in df.columns:
        marks = {key: value for key, value in df.schema[name].metadata.items() if key != GROUPED_MARK}
        source = (
            F.col("item").getField(numbered[items.index(name)])
            if name in items
            else F.col(kept[others.index(name)])
        )
        made.append(source.alias(name, metadata=marks))
    return rows.select(*made)


def _item_columns(df: DataFrame) -> Sequence[str]:
    return [field.name for field in df.schema.fields if field.metadata.get(GROUPED_MARK, False)]
