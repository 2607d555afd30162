"""From a user's DataFrame to prepared columns: what a FeatureSpec says, done in Spark.

Prepared columns are dense float32 (or lists of `width` float32), categorical int64, sequences as lists of at
most `max_length` int64 (the reader pads them), labels float32 (class numbers int64). None is ever null. Where the spec
has a grouping, samples come out as groups (see `features.groups`).
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NullType,
    NumericType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from deeprec_spark.features.arrow import DEFAULT_ID, DataError, prepare_batches
from deeprec_spark.features.group_sizes import count_groups, warn_of_small_groups
from deeprec_spark.features.groups import (
    PREPARED_MARK,
    group_rows,
    is_grouped,
    key_columns,
    quoted,
    ungroup_rows,
)
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Grouping, Label

logger = logging.getLogger(__name__)

INTEGER_TYPES = (ByteType, ShortType, IntegerType, LongType)
_LABEL_MEANINGS = {"binary": "in [0, 1]", "regression": "finite", "multiclass": "a class number from 0"}

__all__ = [
    "DEFAULT_ID",
    "DataError",
    "EmptyDataError",
    "LabelError",
    "PREPARED_MARK",
    "PrepareReport",
    "is_prepared",
    "prepare_dataframe",
    "quoted",
]


class EmptyDataError(DataError):
    """A data set without rows."""


class LabelError(DataError):
    """Labels that are null, not finite or out of range."""


@dataclass
class PrepareReport:
    """What preparation met: rows, and for each column the values that its default replaced.

    `null_elements` counts the null elements of sequences; "" and padding, which are left out too, are not counted.
    """

    rows: int = 0
    malformed: int = 0
    nulls: dict[str, int] = field(default_factory=dict)
    null_elements: dict[str, int] = field(default_factory=dict)
    not_finite: dict[str, int] = field(default_factory=dict)

    def log(self) -> None:
        """Log the counts; columns that are null in every row are a warning."""
        logger.info("Prepared %d rows; %d malformed rows were left out", self.rows, self.malformed)
        for name, count in self.nulls.items():
            if count == self.rows:
                logger.warning("Column %r is null in all %d rows: its default stands everywhere", name, count)
            elif count:
                logger.info(
                    "Column %r: %d of %d values were null and took the default", name, count, self.rows
                )
        for name, count in self.null_elements.items():
            if count:
                logger.info("Column %r: %d null elements of lists were left out", name, count)
        for name, count in self.not_finite.items():
            if count:
                logger.warning("Column %r: %d numbers were NaN or infinite and took the default", name, count)

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(asdict(self), indent=2) + "\n"


def prepare_dataframe(
    df: DataFrame,
    spec: FeatureSpec,
    *,
    labels: bool = True,
    keep: Sequence[str] = (),
    drop: str | None = None,
    check: bool = True,
    group: bool = True,
    report: PrepareReport | None = None,
) -> DataFrame:
    """The features (and labels) of `spec`, in its order, made from raw columns of the same names.

    Strings are hashed by Fingerprint64. Null takes the feature's default: a raw value, hashed or transformed
    like any other (0 for dense, "" for strings, -1 for integer ids where the spec names none). NaN and
    infinity in a dense column take the default too. In a sequence null, "" among strings and the padding value
    among integers are no ids: they are left out, and the last `max_length` ids are kept. A null list is empty.

    What has been prepared is not prepared again: hashes would be hashed and logarithms taken twice. Prepared
    columns bear a mark in their metadata, which Spark keeps through Parquet (see `is_prepared`).

    Args:
        df: raw columns; their types must fit the spec's kinds and raw types. Or prepared ones.
        spec: the features and labels.
        labels: prepare the label columns too.
        keep: further columns that pass through unchanged, behind the prepared ones; of groups they are item-level.
        drop: a boolean column; rows where it is true are left out.
        check: count what the defaults replace, check the labels, and refuse an empty data set. It costs one
            pass over the data; without it the result is lazy and nothing is checked but the columns. Groups of fewer
            than two samples on average are a warning.
        group: store samples in groups where the spec has a grouping; False leaves them flat, `key_columns` behind
            the columns to keep, for `group_rows`.
        report: is filled with the counts.

    Returns:
        A DataFrame with the prepared columns, rows in the same order and partitions (groups: by the grouping).

    Raises:
        DataError: a column is missing or has a type that its kind does not take.
        EmptyDataError: no rows (with `check`).
        LabelError: a label is null or not finite, a binary one is outside [0, 1], or a class number is not a
            whole number from 0 (with `check`).

    Example:
        >>> spec = infer_spec(df, feature_cols=["user", "age"], label_cols=["clicked"])
        >>> prepare_dataframe(df, spec).write.parquet("prepared/train")
    """
    chosen_labels = spec.labels if labels else ()
    if is_grouped(df):
        if spec.grouping is None or drop is not None:
            df = ungroup_rows(df)
        else:
            return _grouped_already(df, spec, chosen_labels, keep, check=check, report=report)
    keys = [name for name in key_columns(spec) if name not in keep]
    _check_columns(
        df,
        [
            *spec.feature_names,
            *(label.name for label in chosen_labels),
            *keep,
            *keys,
            *([drop] if drop else []),
        ],
    )
    prepared = is_prepared(df, spec)
    features = [quoted(name) for name in spec.feature_names] if prepared else raw_columns(df, spec)
    if check:
        samples = df.where(~F.col(drop)) if drop else df
        _check(samples, spec, chosen_labels, report, spec.grouping if group else None)
    behind = [*keep, *keys]
    if prepared:
        kept_rows = df.where(~F.col(drop)) if drop else df
        labelled = [quoted(label.name).cast(_label_type(label)).alias(label.name) for label in chosen_labels]
        flat = kept_rows.select(*features, *labelled, *[quoted(name) for name in behind])
    else:
        flat = _prepared_rows(df, spec, features, chosen_labels, behind, drop)
    return group_rows(flat, spec) if group and spec.grouping is not None else flat


def _prepared_rows(
    df: DataFrame,
    spec: FeatureSpec,
    features: Sequence[Column],
    labels: Sequence[Label],
    keep: Sequence[str],
    drop: str | None,
) -> DataFrame:
    # Done on Arrow batches, by the code that serving runs. (As Spark expressions, 40 columns of nested conditions also
    # keep Spark's optimizer busy for a minute.)
    raw = df.select(
        *features,
        *[quoted(label.name).cast("double").alias(label.name) for label in labels],
        *[quoted(name) for name in keep],
        *([F.col(drop)] if drop else []),
    )
    schema = StructType(
        [
            *[
                StructField(feature.name, _prepared_type(feature), False, {PREPARED_MARK: True})
                for feature in spec.features
            ],
            *[StructField(label.name, _label_type(label)) for label in labels],
            *[df.schema[name] for name in keep],
        ]
    )
    return raw.mapInArrow(
        partial(prepare_batches, spec=spec, labels=bool(labels), keep=tuple(keep), drop=drop), schema
    )


def _grouped_already(
    df: DataFrame,
    spec: FeatureSpec,
    labels: Sequence[Label],
    keep: Sequence[str],
    *,
    check: bool,
    report: PrepareReport | None,
) -> DataFrame:
    """The wanted columns of groups; their samples are checked as those of flat data are."""
    names = [*spec.feature_names, *(label.name for label in labels), *keep]
    _check_columns(df, names)
    if check:
        _check(ungroup_rows(df), spec, labels, report)
    return df.select(*[quoted(name) for name in names])


def _check(
    df: DataFrame,
    spec: FeatureSpec,
    labels: Sequence[Label],
    report: PrepareReport | None,
    grouping: Grouping | None = None,
) -> None:
    counted, groups = _count(df, spec.features, labels, grouping)
    if report is not None:
        counted.malformed = report.malformed
        report.__dict__.update(counted.__dict__)
    counted.log()
    if grouping is not None:
        warn_of_small_groups(df, spec, counted.rows, groups)


def is_prepared(df: DataFrame, spec: FeatureSpec) -> bool:
    """Whether `prepare_dataframe` has made the features of this DataFrame, perhaps by way of Parquet.

    Raises:
        DataError: it has made some of them, so that neither all nor none can be prepared.
    """
    marked = [
        name
        for name in spec.feature_names
        if name in df.columns and df.schema[name].metadata.get(PREPARED_MARK, False)
    ]
    if marked and len(marked) < len(spec.features):
        raw = [name for name in spec.feature_names if name not in marked]
        raise DataError(
            f"Some features are prepared already and some are not: give all of them raw, or all prepared. "
            f"Received: prepared {marked}, raw {raw}"
        )
    return bool(marked)


def raw_columns(df: DataFrame, spec: FeatureSpec) -> list[Column]:
    """The features' columns as `arrow.prepare_column` takes them: checked, and cast to their raw types."""
    _check_columns(df, spec.feature_names)
    for feature in spec.features:
        _check_type(feature, df.schema[feature.name].dataType)
    return [quoted(feature.name).cast(_raw_type(feature)).alias(feature.name) for feature in spec.features]


def _raw_type(feature: Feature) -> str:
    element = {"string": "string", "int64": "bigint", "float32": "float"}[feature.raw_type]
    if feature.kind is FeatureKind.DENSE:
        return "float" if feature.width is None else "array<float>"
    return f"array<{element}>" if feature.kind is FeatureKind.SEQUENCE else element


def _prepared_type(feature: Feature) -> DataType:
    if feature.kind is FeatureKind.DENSE:
        return FloatType() if feature.width is None else ArrayType(FloatType(), containsNull=False)
    return ArrayType(LongType(), containsNull=False) if feature.kind is FeatureKind.SEQUENCE else LongType()


def _label_type(label: Label) -> DataType:
    return LongType() if label.kind == "multiclass" else FloatType()


def _check_columns(df: DataFrame, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in df.columns]
    if missing:
        raise DataError(
            f"The data has no column {missing}: check feature_cols and label_cols. Received: columns {df.columns}"
        )


def _check_type(feature: Feature, found: DataType) -> None:
    """Raise a DataError that names the column where its type does not fit."""
    is_list = feature.kind is FeatureKind.SEQUENCE or feature.width is not None
    element: DataType | None = found
    if is_list and not isinstance(found, NullType):
        element = found.elementType if isinstance(found, ArrayType) else None
    accepted: tuple[type[DataType], ...] = (NumericType, BooleanType)
    if feature.kind is not FeatureKind.DENSE:
        accepted = (
            (*INTEGER_TYPES, BooleanType) if feature.raw_type == "int64" else (StringType, *INTEGER_TYPES)
        )
    if element is None or not isinstance(element, (NullType, *accepted)):
        expected = f"array<{feature.raw_type}>" if is_list else feature.raw_type
        raise DataError(
            f"Column {feature.name!r} is {feature.kind.value} and must hold {expected}: cast it, or take it out of "
            f"feature_cols. Received: type {found.simpleString()}"
        )


def _is_finite(number: Column) -> Column:
    return number.isNotNull() & ~F.isnan(number) & (F.abs(number) != math.inf)


def _count(
    df: DataFrame, features: Sequence[Feature], labels: Sequence[Label], grouping: Grouping | None
) -> tuple[PrepareReport, int]:
    """Count rows, nulls, bad numbers and (about) groups, and check vectors and labels, in one job."""
    wanted = [
        *(counter for feature in features for counter in _feature_counters(feature, df.schema)),
        *(counter for label in labels for counter in _label_counters(label)),
    ]
    groups = F.lit(0) if grouping is None else count_groups(grouping)
    counters = [F.count(F.lit(1)), groups, *[column for _, _, column in wanted]]
    rows, num_groups, *values = df.agg(*counters).collect()[0]
    if not rows:
        raise EmptyDataError(
            f"The data set has no rows: check the path or filter. Received: columns {df.columns}"
        )
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for (kind, name, _), value in zip(wanted, values, strict=True):
        found[kind][name] = value or 0
    for feature in features:
        if wrong := found["width"].get(feature.name):
            raise DataError(
                f"Every vector of dense column {feature.name!r} must have width {feature.width}. "
                f"Received: {wrong} of {rows} rows of another width"
            )
    for label in labels:
        if wrong := found["label"][label.name]:
            low, high = found["min"][label.name], found["max"][label.name]
            raise LabelError(
                f"Label {label.name!r} ({label.kind}) must be {_LABEL_MEANINGS[label.kind]} and not null: fix or "
                f"drop these rows, or give it another label_kind. "
                f"Received: {wrong} bad of {rows} rows, range {low} to {high}"
            )
    report = PrepareReport(
        rows=rows, nulls=found["null"], null_elements=found["elements"], not_finite=found["not_finite"]
    )
    return report, int(num_groups)


Counter = tuple[str, str, Column]  # what is counted, in which column, how


def _feature_counters(feature: Feature, schema: StructType) -> Iterator[Counter]:
    raw = quoted(feature.name)
    yield "null", feature.name, _count_if(raw.isNull())
    if feature.width is not None:
        yield "width", feature.name, _count_if(raw.isNotNull() & (F.size(raw) != feature.width))
        bad = F.filter(raw, lambda x: ~_is_finite(x.cast("float")))  # null elements too
        yield "not_finite", feature.name, _count_elements(bad)
    elif feature.kind is FeatureKind.SEQUENCE:
        yield "elements", feature.name, _count_elements(F.filter(raw, lambda x: x.isNull()))
    elif feature.kind is FeatureKind.DENSE and isinstance(
        schema[feature.name].dataType, FloatType | DoubleType
    ):
        yield "not_finite", feature.name, _count_if(raw.isNotNull() & ~_is_finite(raw.cast("float")))


def _label_counters(label: Label) -> Iterator[Counter]:
    number = quoted(label.name).cast("double")
    valid = _is_finite(number)
    if label.kind == "binary":
        valid = valid & (number >= 0) & (number <= 1)
    elif label.kind == "multiclass":
        valid = valid & (number >= 0) & (number == F.floor(number))
    yield "label", label.name, _count_if(~F.coalesce(valid, F.lit(False)))
    yield "min", label.name, F.min(number)
    yield "max", label.name, F.max(number)


def _count_if(condition: Column) -> Column:
    return F.sum(F.when(condition, 1).otherwise(0))


def _count_elements(lists: Column) -> Column:
    return F.sum(F.when(lists.isNotNull(), F.size(lists)))  # the size of null is -1
