"""Nulls and numbers: fill, clip, log, medians, statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import (
    BooleanType,
    DataType,
    FloatType,
    FractionalType,
    IntegralType,
    NumericType,
    StringType,
)
from typing_extensions import Self

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.base_table import Names, Table, as_list
from deeprec_spark.features.prepare import quoted
from deeprec_spark.session import current_session

_AGGREGATES: dict[str, Callable[[Column], Column]] = {
    "min": F.min,
    "max": F.max,
    "avg": F.avg,
    "sum": F.sum,
    "count": F.count,
}

__all__ = ["NumberOperators"]


class NumberOperators(Table):
    """The part of every table that fills, scales down and sums up its numbers.

    Example:
        >>> table.fillna(0, "age").clip("age", min=0, max=120).log("price").df.show()
    """

    def fillna(self, value: float | int | str | bool, columns: Names | None = None) -> Self:
        """Replace nulls; a column keeps its type and place, and NaN stays NaN.

        Args:
            value: a number, string or boolean.
            columns: None takes every column that can hold the value: for an int the integer columns, for a
                float the numeric ones (integer columns if it is whole), strings for a string, and so on.

        Raises:
            DataError: a named column cannot hold the value.
        """
        if columns is None:
            names = [field.name for field in self.schema if _fills_by_default(value, field.dataType)]
        else:
            names = self._existing(columns)
            for name in names:
                if not _fills(value, self.schema[name].dataType):
                    raise DataError(
                        f"Column {name!r} cannot hold {value!r}: cast the column, or give another value. "
                        f"Received: type {self.schema[name].dataType.simpleString()}"
                    )
        return self._replace(
            {name: F.coalesce(quoted(name), F.lit(value).cast(self.schema[name].dataType)) for name in names}
        )

    def dropna(self, columns: Names | None = None, how: str = "any", thresh: int | None = None) -> Self:
        """Drop rows with nulls in these columns (None: all); `how` and `thresh` as in Spark."""
        names = None if columns is None else self._existing(columns)
        return self._clone(self.df.dropna(how, thresh, names))

    def clip(self, columns: Names, min: float | None = None, max: float | None = None) -> Self:
        """Bring numbers into [min, max]; null stays null, NaN stays NaN, columns keep their types."""
        if min is None and max is None:
            raise DataError("clip needs min or max. Received: min=None, max=None")

        def clipped(name: str) -> Column:
            value, kind = quoted(name), self.schema[name].dataType
            result = value
            if max is not None:
                result = F.when(value > F.lit(max), F.lit(max).cast(kind)).otherwise(result)
            if min is not None:
                result = F.when(value < F.lit(min), F.lit(min).cast(kind)).otherwise(result)
            return (
                F.when(F.isnan(value), value).otherwise(result)
                if isinstance(kind, FractionalType)
                else result
            )

        return self._replace({name: clipped(name) for name in self._numeric(columns)})

    def log(self, columns: Names, clipping: bool = True) -> Self:
        """`ln(max(x, 0) + 1)`, or with `clipping=False` plain `ln(x)`, null where x <= 0.

        float columns stay float, all other numbers become double.
        """

        def logged(name: str) -> Column:
            value = quoted(name).cast("double")
            # greatest() skips nulls: without the condition, null would become ln(1).
            result = (
                F.when(value.isNotNull(), F.log1p(F.greatest(value, F.lit(0.0))))
                if clipping
                else F.log(value)
            )
            return result.cast("float") if isinstance(self.schema[name].dataType, FloatType) else result

        return self._replace({name: logged(name) for name in self._numeric(columns)})

    def add(self, columns: Names, value: float = 1) -> Self:
        """Add a constant to numeric columns."""
        return self._replace({name: quoted(name) + F.lit(value) for name in self._numeric(columns)})

    def median(self, columns: Names | None = None) -> Table:
        """The medians of numeric columns (None: all): a table with the columns column, median.

        Spark's approximate quantile with relative error 0.001; nulls and NaN are left out.
        """
        return self._summary("median", self._medians(columns))

    def fill_median(self, columns: Names | None = None) -> Self:
        """Replace nulls by the column's median, in the column's own type.

        Raises:
            DataError: a column has no value that is not null.
        """
        return self._replace(
            {
                name: F.coalesce(quoted(name), F.lit(value).cast(self.schema[name].dataType))
                for name, value in self._medians(columns).items()
            }
        )

    def get_stats(
        self, columns: Names | None, aggr: str | Sequence[str] | Mapping[str, str | Sequence[str]]
    ) -> dict[str, Any]:
        """Statistics of columns (None: the numeric ones) in one job.

        Args:
            columns: names.
            aggr: "min", "max", "avg", "sum", "count", several of them, or {column: one or several}.

        Returns:
            {column: value}, or a list of values where several are asked for.
        """
        names = self._numeric(columns) if columns is None else self._existing(columns)
        if isinstance(aggr, Mapping) and (missing := [name for name in names if name not in aggr]):
            raise DataError(f"aggr must name an aggregate for {missing}. Received: aggr={aggr!r}")
        wanted = {name: as_list(aggr[name] if isinstance(aggr, Mapping) else aggr, "aggr") for name in names}
        if wrong := sorted({kind for kinds in wanted.values() for kind in kinds} - set(_AGGREGATES)):
            raise DataError(f"aggr must be of {sorted(_AGGREGATES)}. Received: {wrong}")
        pairs = [(name, kind) for name, kinds in wanted.items() for kind in kinds]
        if not pairs:
            return {}
        row = self.df.agg(*[_AGGREGATES[kind](quoted(name)) for name, kind in pairs]).collect()[0]
        found: dict[str, list[Any]] = {name: [] for name in names}
        for (name, _), value in zip(pairs, row, strict=True):
            found[name].append(value)
        return {name: values[0] if len(values) == 1 else values for name, values in found.items()}

    def min(self, columns: Names | None = None) -> Table:
        """The smallest values of numeric columns: a table with the columns column, min (double)."""
        return self._summary("min", self.get_stats(columns, "min"))

    def max(self, columns: Names | None = None) -> Table:
        """The largest values of numeric columns: a table with the columns column, max (double)."""
        return self._summary("max", self.get_stats(columns, "max"))

    def _medians(self, columns: Names | None) -> dict[str, float]:
        names = self._numeric(columns)
        found = self.df.approxQuantile(names, [0.5], 0.001)
        if empty := [name for name, values in zip(names, found, strict=True) if not values]:
            raise DataError(f"Columns without any value have no median: drop them. Received: {empty}")
        return {name: values[0] for name, values in zip(names, found, strict=True)}

    def _summary(self, kind: str, values: Mapping[str, Any]) -> Table:
        rows = [(name, None if value is None else float(value)) for name, value in values.items()]
        return Table(current_session().createDataFrame(rows, f"column string, `{kind}` double"))


def _fills(value: float | int | str | bool, kind: DataType) -> bool:
    if isinstance(value, bool):
        return isinstance(kind, BooleanType)
    if isinstance(value, str):
        return isinstance(kind, StringType)
    if isinstance(kind, IntegralType):
        return float(value).is_integer()
    return isinstance(kind, NumericType)


def _fills_by_default(value: float | int | str | bool, kind: DataType) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return isinstance(kind, IntegralType)
    return _fills(value, kind)
