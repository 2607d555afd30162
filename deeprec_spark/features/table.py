"""FeatureTable: Friesian's, repaired and extended, in PySpark."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import ArrayType, DataType
from typing_extensions import Self

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.base_table import Names, Table, as_list, scratch_name
from deeprec_spark.features.encoding import EncodingOperators
from deeprec_spark.features.friesian import friesian_class
from deeprec_spark.features.prepare import quoted
from deeprec_spark.features.scaling import ScalingOperators
from deeprec_spark.features.sequences import SequenceOperators
from deeprec_spark.features.string_index import StringIndex
from deeprec_spark.features.targets import TargetCode, TargetOperators
from deeprec_spark.session import current_session
from deeprec_spark.udfs.columns import series_udf

if TYPE_CHECKING:

    class _Friesian:
        """Friesian's class of this name, where BigDL is installed."""
else:
    _Friesian = friesian_class("FeatureTable")

Aggregate = str | Sequence[str] | Mapping[str, str | Sequence[str]]

__all__ = ["FeatureTable", "StringIndex", "Table", "TargetCode"]


class FeatureTable(EncodingOperators, SequenceOperators, ScalingOperators, TargetOperators, _Friesian):
    """A DataFrame with the operators of recommendation features, under Friesian's names.

    It needs no BigDL; where BigDL is installed and Spark is 3, it is a subclass of Friesian's FeatureTable.

    Example:
        >>> table = FeatureTable.read_parquet("clicks")
        >>> table = table.fillna(0, "age").log("price").hash_encode64(["city", "device"])
        >>> table, indices = table.category_encode("brand", freq_limit=10)
        >>> table.df.printSchema()
    """

    @classmethod
    def read_parquet(cls, paths: str | Sequence[str]) -> Self:
        """Read Parquet."""
        return cls(current_session().read.parquet(*as_list(paths, "paths")))

    @classmethod
    def read_json(cls, paths: str | Sequence[str], cols: Names | None = None) -> Self:
        """Read JSON lines; `cols` keeps some columns."""
        df = current_session().read.json(as_list(paths, "paths"))
        return cls(df if cols is None else df.select(*map(quoted, as_list(cols, "cols"))))

    @classmethod
    def read_csv(
        cls,
        paths: str | Sequence[str],
        delimiter: str = ",",
        header: bool = False,
        names: Names | None = None,
        dtype: str | Sequence[str] | Mapping[str, str] | None = None,
    ) -> Self:
        """Read CSV, types found out by Spark.

        Args:
            paths: one or several.
            delimiter: between fields.
            header: the first line of each file has the names.
            names: of all columns.
            dtype: one type for all columns, one for each, or {column: type}.
        """
        df = current_session().read.csv(
            as_list(paths, "paths"), sep=delimiter, header=header, inferSchema=True
        )
        if names is not None:
            given = as_list(names, "names")
            if len(given) != len(df.columns):
                raise DataError(f"names must name {len(df.columns)} columns. Received: {len(given)} names")
            df = df.toDF(*given)
        table = cls(df)
        if dtype is None:
            return table
        if isinstance(dtype, str):
            return table.cast(None, dtype)
        kinds = dtype if isinstance(dtype, Mapping) else dict(zip(df.columns, dtype, strict=True))
        for name, kind in kinds.items():
            table = table.cast(name, kind)
        return table

    @classmethod
    def read_text(cls, paths: str | Sequence[str], col_name: str = "value") -> Self:
        """Read lines of text into one column."""
        return cls(current_session().read.text(as_list(paths, "paths")).toDF(col_name))

    @classmethod
    def from_pandas(cls, pandas_df: pd.DataFrame) -> Self:
        """A table of a pandas DataFrame."""
        with warnings.catch_warnings():
            # Spark 3.5 calls a function that pandas 2 deprecates, and where warnings are errors falls back to rows.
            warnings.filterwarnings("ignore", "is_categorical_dtype", DeprecationWarning)
            return cls(current_session().createDataFrame(pandas_df))

    def apply(
        self, in_col: Names, out_col: str, func: Callable[[Any], Any], dtype: str | DataType = "string"
    ) -> Self:
        """Apply a Python function to each value; slow: prefer the other operators.

        Args:
            in_col: a column, or several, of which func gets a list; their types are not mixed into one.
            out_col: the result's column, replaced if there.
            func: value (or list of values) to value.
            dtype: type of the result.
        """
        if not isinstance(out_col, str):
            raise DataError(f"out_col must be one name. Received: out_col={out_col!r}")
        names = self._existing(in_col, "in_col")
        if isinstance(in_col, str):
            return self._replace({out_col: F.udf(func, dtype)(quoted(in_col))})
        several = F.udf(lambda *values: func(list(values)), dtype)
        return self._replace({out_col: several(*map(quoted, names))})

    def join(
        self,
        table: Table,
        on: Names | None = None,
        how: str = "inner",
        lsuffix: str | None = None,
        rsuffix: str | None = None,
    ) -> Self:
        """Join with another table; suffixes tell apart columns that both have beside those of `on`."""
        if not hasattr(table, "df"):
            raise DataError(f"table must be a Table. Received: {type(table).__name__}")
        keys = [] if on is None else as_list(on, "on")
        shared = [name for name in self.columns if name in table.df.columns and name not in keys]
        left, right = self.df, table.df
        if lsuffix is not None:
            left = left.withColumnsRenamed({name: name + lsuffix for name in shared})
        if rsuffix is not None:
            right = right.withColumnsRenamed({name: name + rsuffix for name in shared})
        return self._clone(left.join(right, keys or None, how))

    def group_by(self, columns: Names = (), agg: Aggregate = "count", join: bool = False) -> Self:
        """Aggregate groups of rows.

        Args:
            columns: of equal values within a group; none: one group.
            agg: a function of Spark's ("max", "count", "collect_list", ...) or several, for all other columns;
                or {column: one or several}.
            join: join the result to the table.
        """
        keys = as_list(columns)
        others = [name for name in self.columns if name not in keys]
        if isinstance(agg, Mapping):
            wanted = [(name, kind) for name, kinds in agg.items() for kind in as_list(kinds, "agg")]
        else:
            wanted = [(name, kind) for kind in as_list(agg, "agg") for name in others]
        grouped = self.df.groupBy(*map(quoted, keys)).agg(*[_aggregate(name, kind) for name, kind in wanted])
        if not join:
            return self._clone(grouped)
        if not keys:
            raise DataError("join=True needs columns to join on. Received: columns=[]")
        return self._clone(self.df.join(grouped, keys, "left"))

    def add_value_features(
        self, columns: Names, dict_tbl: Table, key: str, value: str, default: Any = 0
    ) -> Self:
        """Look up a value for each key, such as the category of each item of a history.

        The new column's name is the old one's with `key` replaced by `value`. Of several values for one key
        one is taken.

        Args:
            columns: keys, or lists (of lists) of keys; 64-bit ids too.
            dict_tbl: has the columns key and value. For lists it is collected on the driver.
            key: its column of keys.
            value: its column of values.
            default: the value for keys that are null or not there.
        """
        names = self._existing(columns)
        pairs = dict_tbl.df.select(quoted(key).alias("key"), quoted(value).alias("value"))
        pairs = pairs.where(F.col("key").isNotNull()).dropDuplicates(["key"])
        kind = pairs.schema["value"].dataType
        table = self
        lists = None
        for name in names:
            target = name.replace(key, value)
            if isinstance(self.schema[name].dataType, ArrayType):
                lists = lists or _list_lookup(pairs, default)
                result_type = _nested_type(self.schema[name].dataType, kind)
                column = series_udf(lists, result_type)(quoted(name))
                table = table._replace({target: column})
                continue
            found, joined_key = scratch_name("value"), scratch_name("key")
            lookup = pairs.select(F.col("key").alias(joined_key), F.col("value").alias(found))
            joined = table.df.join(lookup, quoted(name) == F.col(joined_key), "left")
            filled = F.coalesce(F.col(found), F.lit(default).cast(kind))
            table = table._clone(joined)._replace({target: filled}).drop(found, joined_key)
        return table

    def reindex(self, columns: Names, index_tbls: Table | Sequence[Table]) -> Self:
        """Replace ids by those of `gen_reindex_mapping`; 0 for ids that are not there.

        Args:
            columns: names.
            index_tbls: for each column a table with the columns "<name>" and "<name>_new".
        """
        names = self._existing(columns)
        tables = [index_tbls] if hasattr(index_tbls, "df") else list(index_tbls)
        if len(names) != len(tables):
            raise DataError(
                f"Each column needs one table. Received: {len(names)} columns, {len(tables)} tables"
            )
        result = self
        for name, mapping in zip(names, tables, strict=True):
            old, new = mapping.df.columns[:2]
            target = scratch_name("new")
            pairs = Table(mapping.df.select(quoted(old).alias(name), quoted(new).alias(target)))
            looked_up = result.add_value_features(name, pairs, key=name, value=target)
            result = looked_up._replace({name: quoted(target)}).drop(target)
        return result

    def gen_reindex_mapping(
        self, columns: Names, freq_limit: int | Mapping[str, int] | None = 10
    ) -> FeatureTable | list[FeatureTable]:
        """New ids from 1 by falling frequency, ties by the old id.

        Args:
            columns: names.
            freq_limit: leave out ids rarer than this; for all, or {column: limit}.

        Returns:
            A table with the columns "<name>" and "<name>_new"; a list of them where columns is a list.
        """
        count = scratch_name("count")
        tables = []
        for name in self._existing(columns):
            limit = freq_limit.get(name, 0) if isinstance(freq_limit, Mapping) else freq_limit
            counted = self.df.groupBy(quoted(name)).agg(F.count(quoted(name)).alias(count))
            counted = counted.where(quoted(name).isNotNull() & (F.col(count) >= (limit or 0)))
            order = Window.orderBy(F.col(count).desc(), quoted(name))
            tables.append(
                FeatureTable(counted.select(quoted(name), F.row_number().over(order).alias(f"{name}_new")))
            )
        return tables[0] if isinstance(columns, str) else tables


def _aggregate(name: str, kind: str) -> Column:
    function = getattr(F, kind, None)
    if function is None:
        raise DataError(f"agg must name aggregate functions of Spark. Received: {kind!r}")
    column: Column = function("*" if name == "*" else quoted(name))
    return column.alias(f"{kind}({name})")


def _nested_type(kind: DataType, value: DataType) -> DataType:
    return ArrayType(_nested_type(kind.elementType, value)) if isinstance(kind, ArrayType) else value


def _list_lookup(pairs: DataFrame, default: Any) -> Callable[..., Any]:
    """A function that looks up every element of a series of (lists of) lists, whole arrays at a time."""
    table = pa.Table.from_pandas(pairs.toPandas(), preserve_index=False)
    keys = table["key"].to_numpy()
    order = np.argsort(keys, kind="stable")
    lookup = partial(_look_up, keys[order], table["value"].combine_chunks().take(pa.array(order)), default)

    def look_up(lists: pd.Series) -> pd.Series:
        return pd.Series(lookup(pa.array(lists, from_pandas=True)).to_numpy(zero_copy_only=False))

    return look_up


def _look_up(keys: npt.NDArray[Any], values: pa.Array, default: Any, array: pa.Array) -> pa.Array:
    if pa.types.is_list(array.type):
        inner = _look_up(keys, values, default, array.values)
        return pa.ListArray.from_arrays(array.offsets, inner, mask=pc.is_null(array))
    filling = pa.scalar(default, values.type)
    if not len(keys):
        return pa.repeat(filling, len(array))
    known = pc.is_valid(array).to_numpy(zero_copy_only=False)
    wanted = array.fill_null(pa.scalar(keys[0].item() if hasattr(keys[0], "item") else keys[0], array.type))
    wanted = wanted.to_numpy(zero_copy_only=False)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    known = known & (keys[places] == wanted)
    return values.take(pa.array(places, mask=~known)).fill_null(filling)
