"""Table: what FeatureTable, StringIndex and TargetCode have in common. Friesian's `Table`, in PySpark."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import pandas as pd
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import (
    DataType,
    NumericType,
    StructType,
)
from typing_extensions import Self

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.prepare import quoted

Names = str | Sequence[str]
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
        >>> Table(df).rename({"uid": "user"}).drop_duplicates("user", sort_cols="time").df.show()
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
