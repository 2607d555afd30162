"""The feature functions on Spark columns; each equals its namesake in `functions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import ArrayType, DataType, FloatType, LongType

from deeprec_spark.udfs import functions

__all__ = ["bucketize", "cross64", "fingerprint64", "fingerprint64_lists", "log1p", "register_udfs", "split"]


def fingerprint64(column: Column | str) -> Column:
    """Hash a string column to 64 bits; integers are hashed as their decimal digits. Null gives null."""
    hashed: Column = _fingerprint64_udf()(_column(column).cast("string"))
    return hashed


def fingerprint64_lists(column: Column | str) -> Column:
    """Hash a column of lists of strings; null elements are dropped, a null list becomes an empty one."""
    hashed: Column = _fingerprint64_lists_udf()(_column(column).cast("array<string>"))
    return hashed


def cross64(*columns: Column | str) -> Column:
    """The hash of the columns' texts joined by `functions.SEPARATOR`; a null in any of them gives null."""
    if len(columns) < 2:
        raise ValueError(f"A cross needs at least two columns. Received: {len(columns)}")
    parts: list[Column] = []
    for column in columns:
        parts += [F.lit(functions.SEPARATOR), _column(column).cast("string")]
    return fingerprint64(F.concat(*parts[1:]))


def bucketize(column: Column | str, boundaries: Sequence[float]) -> Column:
    """The bucket of each number, from 0: how many boundaries are less than or equal to it. Null, NaN: null."""
    edges = functions.check_boundaries(boundaries)
    number = _column(column).cast("double")
    below = F.size(F.filter(F.array(*[F.lit(float(edge)) for edge in edges]), lambda edge: edge <= number))
    return F.when(number.isNotNull() & ~F.isnan(number), below.cast("long"))


def log1p(column: Column | str) -> Column:
    """`ln(1 + max(x, 0))` as float32; null and NaN give null."""
    number = _column(column).cast("double")
    logged = F.log1p(F.greatest(number, F.lit(0.0)))
    return F.when(number.isNotNull() & ~F.isnan(number), logged).cast("float")


def split(column: Column | str, separator: str) -> Column:
    """Split multi-valued strings at a plain separator; empty parts are dropped, null gives an empty list."""
    parts = F.split(_column(column), "\\Q" + separator + "\\E", -1)
    return F.coalesce(F.filter(parts, lambda part: part != ""), F.array().cast("array<string>"))


def register_udfs(spark: SparkSession) -> list[str]:
    """Register the functions for Spark SQL: `fingerprint64`, `cross64`, `bucketize`, `log1p_clipped`.

    In SQL, `cross64` takes strings (cast numbers first), and `bucketize` takes its boundaries as an array of
    doubles: `bucketize(age, array(18D, 25D, 35D))`. As in Python, boundaries that are null, empty, hold a null or do
    not ascend are an error.

    Returns:
        The registered names.

    Example:
        >>> register_udfs(spark)
        ['fingerprint64', 'cross64', 'bucketize', 'log1p_clipped']
        >>> spark.sql("SELECT fingerprint64('a')").first()[0]
        -5528939962900187677
    """
    registered = {
        "fingerprint64": _fingerprint64_udf(),
        "cross64": _cross64_udf(),
        "bucketize": _bucketize_udf(),
        "log1p_clipped": _log1p_udf(),
    }
    for name, function in registered.items():
        spark.udf.register(name, function)
    return list(registered)


def _column(column: Column | str) -> Column:
    return F.col(column) if isinstance(column, str) else column


def _long_series(array: pa.Int64Array) -> pd.Series[Any]:
    mask = array.is_null().to_numpy(zero_copy_only=False)
    values = array.fill_null(0).to_numpy(zero_copy_only=False)
    return pd.Series(pd.arrays.IntegerArray(np.array(values), np.array(mask)))


def series_udf(function: Callable[..., Any], result: DataType) -> Any:
    """`pandas_udf`, whose overloads know no function of a variable number of series."""
    make: Any = F.pandas_udf
    return make(function, result)


# Made when first asked for: a pandas_udf made at import needs pyspark's type parser for nothing.
@cache
def _fingerprint64_udf() -> Any:
    def fingerprint64(values: pd.Series) -> pd.Series:
        return _long_series(functions.fingerprint64(values))

    return series_udf(fingerprint64, LongType())


@cache
def _fingerprint64_lists_udf() -> Any:
    def fingerprint64_lists(values: pd.Series) -> pd.Series:
        lists = functions.fingerprint64_lists(pa.array(values, type=pa.list_(pa.string()), from_pandas=True))
        return pd.Series(lists.to_numpy(zero_copy_only=False))

    return series_udf(fingerprint64_lists, ArrayType(LongType()))


@cache
def _cross64_udf() -> Any:
    def cross64(*values: pd.Series) -> pd.Series:
        for position, column in enumerate(values):
            # Nullable integers reach a pandas UDF as floats: their digits would be wrong in silence.
            if column.dtype != object:
                raise TypeError(
                    f"cross64 takes strings in SQL: write cast(column AS string). "
                    f"Received: {column.dtype} as argument {position + 1}"
                )
        return _long_series(functions.cross64(*values))

    return series_udf(cross64, LongType())


def _boundaries_key(boundaries: Any) -> bytes:
    """Boundaries as the bytes of their float64 values, null elements as NaN; a null array is a ValueError."""
    if boundaries is None:
        raise ValueError("bucketize needs an array of ascending boundaries. Received: boundaries=NULL")
    return np.array(boundaries, dtype=np.float64).tobytes()


@cache
def _bucketize_udf() -> Any:
    def bucketize(values: pd.Series, boundaries: pd.Series) -> pd.Series:
        numbers = pd.to_numeric(values).to_numpy(dtype=np.float64, na_value=np.nan)
        if not len(numbers):
            return pd.Series([], dtype="Int64")
        below = np.zeros(len(numbers), np.int64)
        # Rows of one list of boundaries, which as a rule are all rows, are done together.
        keys = np.array([_boundaries_key(each) for each in boundaries], dtype=object)
        codes, distinct = pd.factorize(keys)
        for code, key in enumerate(distinct):
            rows = codes == code
            edges = functions.check_boundaries(np.frombuffer(key, np.float64))
            below[rows] = np.searchsorted(edges, numbers[rows], side="right")
        return pd.Series(pd.arrays.IntegerArray(below, np.isnan(numbers)))

    return series_udf(bucketize, LongType())


@cache
def _log1p_udf() -> Any:
    def log1p_clipped(values: pd.Series) -> pd.Series:
        return pd.Series(functions.log1p(pd.to_numeric(values)).to_numpy(zero_copy_only=False))

    return series_udf(log1p_clipped, FloatType())
