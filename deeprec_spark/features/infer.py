"""A FeatureSpec inferred from the types of a DataFrame's columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    FractionalType,
    NumericType,
    StringType,
)

from deeprec_spark.features.prepare import DEFAULT_ID, INTEGER_TYPES, DataError, prepare_dataframe, quoted
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label

__all__ = ["infer_spec", "prepare_dataframe"]


def infer_spec(
    df: DataFrame,
    feature_cols: Sequence[str],
    label_cols: Sequence[str] = (),
    *,
    label_kind: Literal["binary", "regression", "multiclass"] = "binary",
    max_length: int | Mapping[str, int] = 50,
    group_by: Sequence[str] | None = None,
    group_features: Sequence[str] | None = None,
) -> FeatureSpec:
    """Decide each feature's kind by its column's type.

    | column type | feature |
    |---|---|
    | tinyint, smallint, int, bigint, boolean | categorical, id as it is |
    | string | categorical, hashed |
    | float, double, decimal | dense |
    | array of integers | sequence, ids as they are |
    | array of strings | sequence, hashed |
    | array of floats | dense vector; its width is that of the first row, which a small job reads |

    Args:
        df: the raw columns.
        feature_cols: columns in model order.
        label_cols: numeric or boolean columns.
        label_kind: of all labels: binary ones lie in [0, 1], multiclass ones are class numbers from 0,
            regressions are any finite number.
        max_length: of sequences, for all or by column; 50 where a column is not named.
        group_by: columns, features or not, whose equal values make a group (a user, a request); None: no groups.
        group_features: features that are stored and looked up once for a group.

    Raises:
        DataError: a column is missing, or its type has no defined meaning (timestamps, maps, ...); the
            message names it and what to cast it to.

    Example:
        >>> infer_spec(df, ["user", "country", "age"], ["clicked"]).of_kind(FeatureKind.DENSE)
        (Feature(name='age', kind=<FeatureKind.DENSE: 'dense'>, raw_type='float32', ...),)
    """
    if not feature_cols:
        raise DataError(
            f"feature_cols must name at least one column. Received: feature_cols={list(feature_cols)}"
        )
    missing = [name for name in [*feature_cols, *label_cols] if name not in df.columns]
    if missing:
        raise DataError(
            f"The data has no column {missing}: check feature_cols and label_cols. Received: columns {df.columns}"
        )
    lengths = max_length if isinstance(max_length, Mapping) else dict.fromkeys(feature_cols, max_length)
    features = [
        _feature(name, df.schema[name].dataType, lengths.get(name, 50), partial(_first_width, df, name))
        for name in feature_cols
    ]
    for name in label_cols:
        found = df.schema[name].dataType
        if not isinstance(found, NumericType | BooleanType):
            raise DataError(
                f"Label {name!r} must be a number or boolean: cast it. Received: type {found.simpleString()}"
            )
    labels = [Label(name=name, kind=label_kind) for name in label_cols]
    spec = FeatureSpec(features=tuple(features), labels=tuple(labels))
    return spec.grouped(group_by, group_features) if group_by else spec


def _first_width(df: DataFrame, name: str) -> int:
    column = quoted(name)
    first = df.where(column.isNotNull()).select(F.size(column)).first()
    if first is None or first[0] < 1:
        raise DataError(
            f"The width of dense vector column {name!r} cannot be told: give a FeatureSpec with its width. "
            f"Received: {'no row that is not null' if first is None else 'an empty vector in the first row'}"
        )
    return int(first[0])


def _feature(name: str, found: DataType, max_length: int, width: Callable[[], int]) -> Feature:
    if isinstance(found, (*INTEGER_TYPES, BooleanType)):
        return Feature(name=name, kind=FeatureKind.CATEGORICAL, raw_type="int64", default=DEFAULT_ID)
    if isinstance(found, StringType):
        return Feature(name=name, kind=FeatureKind.CATEGORICAL, raw_type="string", default="")
    if isinstance(found, FractionalType):
        return Feature(name=name, kind=FeatureKind.DENSE, raw_type="float32", default=0.0)
    if isinstance(found, ArrayType) and isinstance(found.elementType, (*INTEGER_TYPES, StringType)):
        raw_type: Literal["string", "int64"] = (
            "string" if isinstance(found.elementType, StringType) else "int64"
        )
        return Feature(name=name, kind=FeatureKind.SEQUENCE, raw_type=raw_type, max_length=max_length)
    if isinstance(found, ArrayType) and isinstance(found.elementType, FractionalType):
        return Feature(name=name, kind=FeatureKind.DENSE, raw_type="float32", default=0.0, width=width())
    raise DataError(
        f"Column {name!r} has a type that no feature has: cast it to int, string (categorical), double (dense) or an "
        f"array of ints or strings (sequence); times, for example, with unix_timestamp(). "
        f"Received: type {found.simpleString()}"
    )
