"""Categories to numbers: vocabularies, hashes, crosses, one-hot columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import ArrayType, BooleanType
from typing_extensions import Self

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.base_table import Names, as_list, scratch_name
from deeprec_spark.features.numbers import NumberOperators
from deeprec_spark.features.prepare import quoted
from deeprec_spark.features.string_index import StringIndex
from deeprec_spark.udfs import columns as udfs

FreqLimit = int | Mapping[str, int] | None
# Each gives hexadecimal digits, as hashlib's hexdigest does.
_HASHES: dict[str, Callable[[Column], Column]] = {
    "md5": F.md5,
    "sha1": F.sha1,
    "sha224": lambda column: F.sha2(column, 224),
    "sha256": lambda column: F.sha2(column, 256),
    "sha384": lambda column: F.sha2(column, 384),
    "sha512": lambda column: F.sha2(column, 512),
}
_HASH_DIGITS = {"md5": 32, "sha1": 40, "sha224": 56, "sha256": 64, "sha384": 96, "sha512": 128}

__all__ = ["EncodingOperators"]


class EncodingOperators(NumberOperators):
    """The part of FeatureTable that turns categories into numbers."""

    def gen_string_idx(
        self,
        columns: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
        freq_limit: FreqLimit = None,
        order_by_freq: bool = False,
        do_split: bool = False,
        sep: str = ",",
    ) -> StringIndex | list[StringIndex]:
        """Ids from 1 for the values of each column; equal data give equal ids.

        For vocabularies too large to sort on one executor take `hash_encode64`, which needs none.

        Args:
            columns: names, or {"src_cols": names, "col_name": name} for one vocabulary of several columns.
            freq_limit: leave out values rarer than this; for all columns, or {column: limit}.
            order_by_freq: frequent values first; otherwise ids follow the order of the values.
            do_split: split the values at `sep` (a regular expression) first.

        Returns:
            A StringIndex, or a list of them where columns is a list.
        """
        single = isinstance(columns, str | Mapping)
        entries: list[Any] = [columns] if single else list(columns)
        indices = [self._string_index(entry, freq_limit, order_by_freq, do_split, sep) for entry in entries]
        return indices[0] if single else indices

    def _string_index(
        self, entry: str | Mapping[str, Any], freq_limit: FreqLimit, by_freq: bool, do_split: bool, sep: str
    ) -> StringIndex:
        if isinstance(entry, Mapping):
            if "src_cols" not in entry:
                raise DataError(f"A union of columns needs 'src_cols'. Received: {dict(entry)}")
            sources = self._existing(entry["src_cols"], "src_cols")
            name = str(entry.get("col_name", f"{sources[0]}_union"))
        else:
            sources, name = self._existing(entry), entry
        parts = [
            self.df.select(
                (F.explode(F.split(quoted(source), sep)) if do_split else quoted(source)).alias(name)
            )
            for source in sources
        ]
        values = reduce(DataFrame.union, parts)
        limit = freq_limit.get(name, 0) if isinstance(freq_limit, Mapping) else freq_limit
        count = scratch_name("count")
        counted = values.where(quoted(name).isNotNull()).groupBy(name).agg(F.count(F.lit(1)).alias(count))
        if limit:
            counted = counted.where(F.col(count) >= limit)
        order = [F.col(count).desc(), quoted(name)] if by_freq else [quoted(name)]
        numbered = counted.withColumn("id", F.row_number().over(Window.orderBy(*order)))
        return StringIndex(numbered.select(quoted(name), "id"), name)

    def encode_string(
        self,
        columns: Names,
        indices: StringIndex | Mapping[str, int] | Sequence[StringIndex | Mapping[str, int]],
        broadcast: bool = True,
        do_split: bool = False,
        sep: str = ",",
        sort_for_array: bool = False,
        keep_most_frequent: bool = False,
    ) -> Self:
        """Replace values by their ids, each column in its place; unknown values become null (fill them with 0).

        Args:
            columns: names.
            indices: a StringIndex or {value: id} for each column.
            broadcast: send the index to every executor rather than shuffle the table.
            do_split: split the values at `sep` (a regular expression): the result is the list of known ids in
                the order of the values, null where none is known.
            sort_for_array: sort these lists.
            keep_most_frequent: with do_split, take the smallest id: the most frequent value of an index that
                is ordered by frequency.
        """
        names = self._existing(columns)
        # A Friesian StringIndex will do as well as ours: it has a `df` and a `col_name`.
        several: Any = indices
        single = isinstance(indices, Mapping) or hasattr(indices, "df")
        tables: list[Any] = [indices] if single else list(several)
        if len(names) != len(tables):
            raise DataError(
                f"Each column needs one index. Received: {len(names)} columns, {len(tables)} indices"
            )
        result = self.df
        for name, entry in zip(names, tables, strict=True):
            index = StringIndex.from_dict(entry, name) if isinstance(entry, Mapping) else entry
            key, found = scratch_name("key"), scratch_name("id")
            lookup = index.df.select(quoted(index.col_name).alias(key), F.col("id").alias(found))
            lookup = F.broadcast(lookup) if broadcast else lookup
            if do_split:
                ids = _split_ids(result, name, lookup, key, found, sep)
                chosen = F.col(found)
                if keep_most_frequent:
                    chosen = F.array_min(chosen)
                elif sort_for_array:
                    chosen = F.array_sort(chosen)
            else:
                ids = result.join(lookup, quoted(name) == F.col(key), "left")
                chosen = F.col(found)
            result = ids.select(
                *[chosen.alias(name) if column == name else quoted(column) for column in result.columns]
            )
        return self._clone(result)

    def category_encode(
        self,
        columns: Names,
        freq_limit: FreqLimit = None,
        order_by_freq: bool = False,
        do_split: bool = False,
        sep: str = ",",
        sort_for_array: bool = False,
        keep_most_frequent: bool = False,
        broadcast: bool = True,
    ) -> tuple[Self, StringIndex | list[StringIndex]]:
        """`gen_string_idx` and `encode_string` in one; returns the table and the indices."""
        indices = self.gen_string_idx(
            columns, freq_limit=freq_limit, order_by_freq=order_by_freq, do_split=do_split, sep=sep
        )
        encoded = self.encode_string(
            columns,
            indices,
            broadcast=broadcast,
            do_split=do_split,
            sep=sep,
            sort_for_array=sort_for_array,
            keep_most_frequent=keep_most_frequent,
        )
        return encoded, indices

    def filter_by_frequency(self, columns: Names, min_freq: int = 2) -> Self:
        """The records whose values in `columns`, taken together, occur at least `min_freq` times."""
        names = self._existing(columns)
        count = scratch_name("count")
        window = Window.partitionBy(*map(quoted, names))
        counted = self.df.withColumn(count, F.count(F.lit(1)).over(window))
        return self._clone(counted.where(F.col(count) >= min_freq).drop(count))

    def hash_encode(self, columns: Names, bins: int, method: str = "md5") -> Self:
        """Replace values by `int(hash(str(value)), 16) % bins`, as Friesian does; null counts as "None".

        Args:
            columns: strings, integers or booleans; cut decimals into bins first.
            bins: from 1 to 2 ** 31 - 1.
            method: md5, sha1, sha224, sha256, sha384 or sha512.
        """
        if method not in _HASHES:
            raise DataError(f"method must be of {sorted(_HASHES)}. Received: method={method!r}")
        if not 1 <= bins < 2**31:
            raise DataError(f"bins must be from 1 to 2147483647. Received: bins={bins}")
        return self._replace(
            {name: _hash_bin(self._python_text(name), bins, method) for name in self._existing(columns)}
        )

    def hash_encode64(self, columns: Names, out_cols: Names | None = None, default: str = "") -> Self:
        """Hash strings (or lists of strings) to 64 bits with Fingerprint64, which serving and exported graphs repeat.

        No vocabulary, and no bins that would make ids collide. Null is hashed as `default`; null elements of
        lists are left out.

        Args:
            columns: strings or integers, or lists of them.
            out_cols: names of the results; None replaces the columns.
        """
        names = self._existing(columns)
        targets = names if out_cols is None else as_list(out_cols, "out_cols")
        if len(targets) != len(names):
            raise DataError(f"out_cols must name one column for each. Received: {names} and {targets}")
        return self._replace(
            {
                target: udfs.fingerprint64_lists(quoted(name))
                if isinstance(self.schema[name].dataType, ArrayType)
                else udfs.fingerprint64(F.coalesce(quoted(name).cast("string"), F.lit(default)))
                for name, target in zip(names, targets, strict=True)
            }
        )

    def split_column(self, column: str, separator: str, out_col: str | None = None) -> Self:
        """Split multi-valued strings such as "Action|Comedy" into lists; null becomes an empty list."""
        return self._replace({out_col or column: udfs.split(quoted(self._existing(column)[0]), separator)})

    def cross64(self, columns: Sequence[str], out_col: str | None = None) -> Self:
        """Add the 64-bit cross of columns (`udfs.functions.cross64`), named "a_b" unless given."""
        names = self._existing(columns)
        return self._replace({out_col or "_".join(names): udfs.cross64(*map(quoted, names))})

    def cross_hash_encode(
        self,
        cross_columns: Sequence[str] | Sequence[Sequence[str]],
        bin_sizes: int | Sequence[int],
        cross_col_names: str | Sequence[str | None] | None = None,
        method: str = "md5",
        sep: str = "",
    ) -> Self:
        """Add crosses of columns, hashed into bins as Friesian does: its values are joined without separator.

        Args:
            cross_columns: names of one cross, or a list of such lists.
            bin_sizes: the bins of each cross.
            cross_col_names: names of the results; None is "a_b".
            method: as in `hash_encode`.
            sep: a separator keeps ("1", "23") and ("12", "3") apart.
        """
        single = all(isinstance(entry, str) for entry in cross_columns)
        crosses = [list(map(str, cross_columns))] if single else [list(entry) for entry in cross_columns]
        sizes = [bin_sizes] if isinstance(bin_sizes, int) else list(bin_sizes)
        given = [cross_col_names] if isinstance(cross_col_names, str) else cross_col_names
        targets = list(given) if given is not None else [None] * len(crosses)
        if not len(crosses) == len(sizes) == len(targets):
            raise DataError(
                f"cross_columns, bin_sizes and cross_col_names must have one length. "
                f"Received: {len(crosses)}, {len(sizes)} and {len(targets)}"
            )
        table = self
        for names, size, target in zip(crosses, sizes, targets, strict=True):
            if len(names) < 2:
                raise DataError(f"A cross needs at least two columns. Received: {names}")
            parts = [quoted(name).cast("string") for name in table._existing(names)]
            joined = F.concat(*[piece for part in parts for piece in (F.lit(sep), part)][1:])
            name = target or "_".join(names)
            table = table._replace({name: joined}).hash_encode(name, size, method)
        return table

    cross_columns = cross_hash_encode

    def one_hot_encode(
        self,
        columns: Names,
        sizes: int | Sequence[int] | None = None,
        prefix: Names | None = None,
        keep_original_columns: bool = False,
    ) -> Self:
        """Turn ids into columns of 0 and 1, `<prefix>_0`, `<prefix>_1`, ..., in the place of the id's column.

        An id outside [0, size), or null, gives 0 in all of them.

        Args:
            columns: integer columns.
            sizes: how many columns for each; None is the largest id + 1.
            prefix: of the new names; None is the column's name.
            keep_original_columns: keep the ids in front of them.
        """
        names = self._numeric(columns)
        if sizes is None:
            largest = self.get_stats(names, "max")
            counts = [int(largest[name]) + 1 for name in names]
        else:
            counts = [sizes] if isinstance(sizes, int) else list(sizes)
        prefixes = names if prefix is None else as_list(prefix, "prefix")
        if not len(names) == len(counts) == len(prefixes):
            raise DataError(
                f"columns, sizes and prefix must have one length. "
                f"Received: {len(names)}, {len(counts)} and {len(prefixes)}"
            )
        selected: list[Column] = []
        for column in self.columns:
            if column not in names:
                selected.append(quoted(column))
                continue
            place = names.index(column)
            if keep_original_columns:
                selected.append(quoted(column))
            selected += [
                F.coalesce((quoted(column) == value).cast("int"), F.lit(0)).alias(
                    f"{prefixes[place]}_{value}"
                )
                for value in range(counts[place])
            ]
        return self._clone(self.df.select(*selected))

    def get_vocabularies(self, columns: Names) -> dict[str, list[Any]]:
        """The distinct values of each column, on the driver."""
        return {
            name: [row[0] for row in self.df.select(quoted(name)).distinct().collect()]
            for name in self._existing(columns)
        }

    def _python_text(self, name: str) -> Column:
        """What Python's str() makes of the values."""
        text = quoted(name).cast("string")
        if isinstance(self.schema[name].dataType, BooleanType):
            text = F.initcap(text)
        return F.coalesce(text, F.lit("None"))


def _hash_bin(text: Column, bins: int, method: str) -> Column:
    """The hexadecimal number modulo bins, four digits at a time: 128 bits and more are too wide for a long."""
    digits = _HASHES[method](F.encode(text, "UTF-8"))
    remainder = F.lit(0).cast("bigint")
    for start in range(1, _HASH_DIGITS[method] + 1, 4):
        part = F.conv(F.substring(digits, start, 4), 16, 10).cast("bigint")
        remainder = (remainder * 65_536 + part) % F.lit(bins)
    return remainder.cast("int")


def _split_ids(df: DataFrame, name: str, lookup: DataFrame, key: str, found: str, sep: str) -> DataFrame:
    """df with the list `found` of the known ids of each row's values, in their order; null where none is known."""
    row, place, value = scratch_name("row"), scratch_name("place"), scratch_name("value")
    # One pass: the row's other columns travel with its values, since a row number joined back to a second
    # evaluation of the same plan need not mean the same row.
    others = scratch_name("others")
    numbered = df.select(
        F.monotonically_increasing_id().alias(row),
        F.struct(*[quoted(column) for column in df.columns]).alias(others),
        F.split(quoted(name), sep).alias(value),
    )
    # In a step of its own: beside a generator, the row number would be that of the generated rows.
    numbered = numbered.select(row, others, F.posexplode_outer(value).alias(place, value))
    joined = numbered.join(lookup, F.col(value) == F.col(key), "left")
    event = F.when(F.col(found).isNotNull(), F.struct(F.col(place), F.col(found)))
    grouped = joined.groupBy(row).agg(
        F.first(others).alias(others), F.array_sort(F.collect_list(event)).alias(found)
    )
    ids = F.transform(F.col(found), lambda entry: entry[found])
    return grouped.select(f"{others}.*", F.when(F.size(found) > 0, ids).alias(found))
