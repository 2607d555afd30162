"""Table: what FeatureTable, StringIndex and TargetCode have in common. Friesian's `Table`, in PySpark."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import pandas as pd
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import (
    BooleanType,
    DataType,
    FloatType,
    FractionalType,
    IntegralType,
    NumericType,
    StringType,
    StructType,
)
from typing_extensions import Self

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.prepare import quoted
from deeprec_spark.session import current_session

Names = str | Sequence[str]
_AGGREGATES: dict[str, Callable[[Column], Column]] = {
    "min": F.min,
    "max": F.max,
    "avg": F.avg,
    "sum": F.sum,
    "count": F.count,
}
_CAST_NAMES = {"str": "string", "bool": "boolean", "integer": "int", "long": "bigint", "short": "smallint"}

__all__ = ["Names", "Table", "as_list", "scratch_name"]


def as_list(names: Names | None, argument: str = "columns") -> list[str]:
    """One name or several as a list; a DataError where it is None or holds something else."""
    if isinstance(names, str):
        return [names]
    if names is None or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{argument} must be a column name or a list of names. Received: {argument}={names!r}"
        )
    return list(names)


def scratch_name(purpose: str) -> str:
    """A column name that no user has: helper columns must not hide or drop one of theirs."""
    return f"__{purpose}_{uuid.uuid4().hex[:12]}__"


class Table:
    """A DataFrame with the operators of recommendation features. Methods return new tables.

    Example:
        >>> Table(df).fillna(0, "age").clip("age", min=0, max=120).df.show()
    """

    df: DataFrame

    def __init__(self, df: DataFrame) -> None:
        self.df = df

    def _clone(self, df: DataFrame) -> Self:
        return type(self)(df)

    def __getattr__(self, name: str) -> Column:
        # Only where no attribute is found: table.age is the column, as in Friesian.
        if name.startswith("_") or name == "df":
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        if name not in self.df.columns:
            raise AttributeError(f"The table has no column {name!r}. Received: columns {self.df.columns}")
        return quoted(name)

    # Structure

    @property
    def schema(self) -> StructType:
        """The schema of the DataFrame."""
        return self.df.schema

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return self.df.columns

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        """Names and types of the columns."""
        return self.df.dtypes

    def to_spark_df(self) -> DataFrame:
        """The DataFrame."""
        return self.df

    def col(self, name: str) -> Column:
        """The column of this name."""
        return quoted(name)

    def select(self, *cols: Any) -> Self:
        """Only these columns."""
        if not cols:
            raise DataError("select needs at least one column. Received: none")
        return self._clone(self.df.select(*cols))

    def drop(self, *cols: str) -> Self:
        """Without these columns; names that are not there are ignored."""
        return self._clone(self.df.drop(*cols))

    def rename(self, columns: Mapping[str, str]) -> Self:
        """Rename columns: {old: new}."""
        if not isinstance(columns, Mapping):
            raise DataError(f"columns must be a dict of old to new names. Received: columns={columns!r}")
        return self._clone(
            self.df.select(*[quoted(name).alias(columns.get(name, name)) for name in self.columns])
        )

    def append_column(self, name: str, column: Column) -> Self:
        """Add a column."""
        return self._clone(self.df.withColumn(name, column))

    def merge_cols(self, columns: Names, target: str) -> Self:
        """Put the values of these columns into one array column, in their place."""
        names = self._existing(columns)
        return self._clone(
            self.df.withColumn(target, F.array(*map(quoted, names))).drop(*set(names) - {target})
        )

    def cast(self, columns: Names | None, dtype: str | DataType) -> Self:
        """Cast columns (None: all) to a type: "string", "int", "long", "float", "decimal(10,2)", ... or a DataType."""
        names = self.columns if columns is None else self._existing(columns)
        kind = _CAST_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        return self._replace({name: quoted(name).cast(kind) for name in names})

    # Rows

    def compute(self) -> Self:
        """Run the plan."""
        self.df.count()
        return self

    def size(self) -> int:
        """The number of rows."""
        return self.df.count()

    def show(self, n: int = 20, truncate: bool | int = True) -> None:
        """Print the first rows."""
        self.df.show(n, truncate)

    def collect(self) -> list[Row]:
        """All rows on the driver."""
        return self.df.collect()

    def to_pandas(self) -> pd.DataFrame:
        """All rows on the driver, as pandas."""
        return self.df.toPandas()

    def to_list(self, column: str) -> list[Any]:
        """All values of a column on the driver."""
        return [row[0] for row in self.df.select(quoted(self._existing(column)[0])).collect()]

    def to_dict(self) -> dict[str, list[Any]]:
        """All columns on the driver: {name: values}."""
        rows = self.df.collect()
        return {name: [row[index] for row in rows] for index, name in enumerate(self.columns)}

    def limit(self, num: int) -> Self:
        """The first `num` rows."""
        return self._clone(self.df.limit(num))

    def filter(self, condition: str | Column) -> Self:
        """The rows that meet the condition."""
        return self._clone(self.df.filter(condition))

    def distinct(self) -> Self:
        """Without repeated rows."""
        return self._clone(self.df.distinct())

    def sample(self, fraction: float, replace: bool = False, seed: int | None = None) -> Self:
        """A random part of the rows."""
        return self._clone(self.df.sample(replace, fraction, seed))

    def random_split(self, weights: Sequence[float], seed: int | None = None) -> list[Self]:
        """Split the rows at random, by weights."""
        return [self._clone(part) for part in self.df.randomSplit(list(weights), seed)]

    split = random_split

    def sort(self, *cols: Any, **kwargs: Any) -> Self:
        """Sort by columns; `ascending=` as in Spark."""
        if not cols:
            raise DataError("sort needs at least one column. Received: none")
        return self._clone(self.df.sort(*cols, **kwargs))

    order_by = sort

    def subtract(self, other: Table) -> Self:
        """The distinct rows that `other` has not."""
        return self._clone(self.df.subtract(other.df))

    def intersect(self, other: Table) -> Self:
        """The distinct rows that `other` has too."""
        return self._clone(self.df.intersect(other.df))

    def concat(self, tables: Table | Sequence[Table], mode: str = "inner", distinct: bool = False) -> Self:
        """The rows of `tables`, then this one's.

        Args:
            tables: one or several.
            mode: "inner" keeps the columns that all have, "outer" all columns, null where a table lacks one.
            distinct: without repeated rows.
        """
        if mode not in ("inner", "outer"):
            raise DataError(f"mode must be 'inner' or 'outer'. Received: mode={mode!r}")
        others = [tables] if hasattr(tables, "df") else list(tables)
        frames: list[DataFrame] = [*[table.df for table in others], self.df]
        if mode == "inner":
            shared = [name for name in frames[0].columns if all(name in frame.columns for frame in frames)]
            frames = [frame.select(*map(quoted, shared)) for frame in frames]
        united = reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), frames)
        return self._clone(united.distinct() if distinct else united)

    def drop_duplicates(
        self, subset: Names | None = None, sort_cols: Names | None = None, keep: str = "min"
    ) -> Self:
        """One row of those that agree in `subset` (None: all columns).

        Args:
            subset: the columns to compare.
            sort_cols: decide which row stays; None keeps any.
            keep: the row with the smallest ("min") or largest ("max") values of sort_cols.
        """
        names = self.columns if subset is None else self._existing(subset)
        if sort_cols is None:
            return self._clone(self.df.dropDuplicates(names))
        if keep not in ("min", "max"):
            raise DataError(f"keep must be 'min' or 'max'. Received: keep={keep!r}")
        order = [
            quoted(name).desc() if keep == "max" else quoted(name).asc() for name in self._existing(sort_cols)
        ]
        rank, row = scratch_name("rank"), scratch_name("row")
        window = Window.partitionBy(*map(quoted, names)).orderBy(*order, row)
        ranked = self.df.withColumn(row, F.monotonically_increasing_id()).withColumn(
            rank, F.row_number().over(window)
        )
        return self._clone(ranked.where(F.col(rank) == 1).drop(rank, row))

    # Partitions

    def repartition(self, num_partitions: int) -> Self:
        """Shuffle the rows into this many partitions."""
        return self._clone(self.df.repartition(num_partitions))

    def coalesce(self, num_partitions: int) -> Self:
        """Merge partitions into this many."""
        return self._clone(self.df.coalesce(num_partitions))

    def get_partition_row_number(self) -> Self:
        """The number of rows in each partition: columns partitionId, count."""
        return self._clone(
            self.df.withColumn("partitionId", F.spark_partition_id()).groupBy("partitionId").count()
        )

    def ordinal_shuffle_partition(self, seed: int | None = None) -> Self:
        """Shuffle the rows within each partition."""
        order = scratch_name("order")
        return self._clone(self.df.withColumn(order, F.rand(seed)).sortWithinPartitions(order).drop(order))

    def broadcast(self) -> None:
        """Mark this table as small enough to be broadcast in joins."""
        self.df = F.broadcast(self.df)

    def cache(self) -> Self:
        """Keep the rows in memory once computed."""
        self.df.cache()
        return self

    def uncache(self) -> Self:
        """Undo `cache`."""
        if self.df.is_cached:
            self.df.unpersist()
        return self

    # Nulls and numbers

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

    # Output

    def write_parquet(self, path: str, mode: str = "overwrite") -> None:
        """Write Parquet."""
        self.df.write.parquet(path, mode=mode)

    def write_csv(
        self,
        path: str,
        delimiter: str = ",",
        mode: str = "overwrite",
        header: bool = True,
        num_partitions: int | None = None,
    ) -> None:
        """Write CSV, into `num_partitions` files if given."""
        df = self.df.repartition(num_partitions) if num_partitions else self.df
        df.write.csv(path, mode=mode, header=header, sep=delimiter)

    # Helpers of this and the other tables

    def _existing(self, columns: Names | None, argument: str = "columns") -> list[str]:
        names = as_list(columns, argument)
        if missing := [name for name in names if name not in self.df.columns]:
            raise DataError(f"The table has no column {missing}. Received: columns {self.df.columns}")
        return names

    def _numeric(self, columns: Names | None) -> list[str]:
        if columns is None:
            return [field.name for field in self.schema if isinstance(field.dataType, NumericType)]
        names = self._existing(columns)
        for name in names:
            if not isinstance(self.schema[name].dataType, NumericType):
                raise DataError(
                    f"Column {name!r} must be numeric: cast it first. "
                    f"Received: type {self.schema[name].dataType.simpleString()}"
                )
        return names

    def _replace(self, columns: Mapping[str, Column]) -> Self:
        """The table with new content in these columns, each in its place; new names come last."""
        kept = [columns[name].alias(name) if name in columns else quoted(name) for name in self.columns]
        added = [column.alias(name) for name, column in columns.items() if name not in self.columns]
        return self._clone(self.df.select(*kept, *added))

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
