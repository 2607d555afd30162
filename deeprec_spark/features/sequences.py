"""Histories, negative samples, and lists of one length. Every random choice is a function of seed and row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import ArrayType, DataType, IntegralType, MapType
from typing_extensions import Self

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.base_table import Names, Table, scratch_name
from deeprec_spark.features.prepare import quoted

__all__ = ["SequenceOperators"]


class SequenceOperators(Table):
    """The part of FeatureTable that makes sequences and samples."""

    def add_hist_seq(
        self,
        cols: Names,
        user_col: str,
        sort_col: str = "time",
        min_len: int = 1,
        max_len: int = 100,
        num_seqs: int = 2147483647,
    ) -> Self:
        """Add for each event what its user did before: `<col>_hist_seq`, oldest first.

        Args:
            cols: the columns to collect, of any type (64-bit ids too).
            user_col: whose events belong together.
            sort_col: the order of events; those of one moment are ordered by the other columns, so that equal
                data give equal sequences.
            min_len: events with fewer before them are dropped, at least a user's first.
            max_len: longest sequence; the latest events stay.
            num_seqs: keep only the last so many events of each user.
        """
        names = self._existing(cols, "cols")
        self._existing([user_col, sort_col], "user_col and sort_col")
        if not 1 <= min_len <= max_len:
            raise DataError(
                f"min_len must be from 1 to max_len. Received: min_len={min_len}, max_len={max_len}"
            )
        order = [quoted(name) for name in [sort_col, *names, *self._sortable({user_col, sort_col, *names})]]
        user = Window.partitionBy(quoted(user_col)).orderBy(*order)
        before = user.rowsBetween(-max_len, -1)
        place, left = scratch_name("place"), scratch_name("left")
        later = Window.partitionBy(quoted(user_col)).orderBy(*[column.desc() for column in order])
        result = self.df.select(
            *map(quoted, self.columns),
            # Within a struct, since collect_list leaves out nulls: an unknown item is an event still.
            *[
                _unwrapped(F.collect_list(F.struct(quoted(name).alias("v"))).over(before)).alias(
                    f"{name}_hist_seq"
                )
                for name in names
            ],
            F.row_number().over(user).alias(place),
            *([F.row_number().over(later).alias(left)] if num_seqs < 2147483647 else []),
        ).where(F.col(place) > min_len)
        if num_seqs < 2147483647:
            result = result.where(F.col(left) <= num_seqs)
        return self._clone(result.drop(place, left))

    def add_negative_samples(
        self,
        item_size: int,
        item_col: str = "item",
        label_col: str = "label",
        neg_num: int = 1,
        seed: int | None = None,
    ) -> Self:
        """Behind each record (label 1), put `neg_num` copies with another item (label 0).

        Args:
            item_size: items are 1 to item_size - 1; a negative is drawn evenly from those that are not the
                record's own.
            item_col: an integer column, 64-bit too.
            label_col: is added or replaced.
            neg_num: negatives for each record.
            seed: the same seed draws the same items for the same record; None draws a seed.
        """
        self._check_items(item_size, neg_num, item_col, self.schema[self._existing(item_col)[0]].dataType)
        copy = scratch_name("copy")
        start = _seed_column(seed, self._sortable(set()))
        copies = self.df.select(
            *map(quoted, self.columns), F.explode(F.sequence(F.lit(0), F.lit(neg_num))).alias(copy)
        )
        item = quoted(item_col)
        negative = _other_item(item, item_size, F.xxhash64(start, F.col(copy)))
        is_copy = F.col(copy) > 0
        columns = {
            item_col: F.when(is_copy, negative.cast(self.schema[item_col].dataType)).otherwise(item),
            label_col: F.when(is_copy, 0).otherwise(1),
        }
        return self._clone(copies)._replace(columns).drop(copy)

    def add_neg_hist_seq(
        self, item_size: int, item_history_col: str, neg_num: int, seed: int | None = None
    ) -> Self:
        """Add `neg_<item_history_col>`: for each item of a history, a list of `neg_num` other items.

        Args:
            item_size: items are 1 to item_size - 1.
            item_history_col: lists of integers, 64-bit too.
            neg_num: negatives for each item.
            seed: as in `add_negative_samples`.
        """
        kind = self.schema[self._existing(item_history_col)[0]].dataType
        element = kind.elementType if isinstance(kind, ArrayType) else None
        self._check_items(item_size, neg_num, item_history_col, element)
        start = _seed_column(seed, self._sortable(set()))

        def negatives(item: Column, place: Column) -> Column:
            # pyspark's stubs take no None for `cast`, but _check_items has refused columns without an element type.
            return F.transform(
                F.sequence(F.lit(1), F.lit(neg_num)),
                lambda copy: _other_item(item, item_size, F.xxhash64(start, place, copy)).cast(element),  # type: ignore[arg-type]
            )

        return self._replace({f"neg_{item_history_col}": F.transform(quoted(item_history_col), negatives)})

    def mask(self, mask_cols: Names, seq_len: int = 100) -> Self:
        """Add `<col>_mask`: 1 for each element of the list, then 0 up to seq_len."""

        def marks(name: str) -> Column:
            known = F.least(F.coalesce(F.size(quoted(name)), F.lit(0)), F.lit(seq_len))
            known = F.greatest(known, F.lit(0))  # size(null) is -1
            return F.concat(F.array_repeat(F.lit(1), known), F.array_repeat(F.lit(0), seq_len - known))

        return self._replace({f"{name}_mask": marks(name) for name in self._lists(mask_cols, "mask_cols")})

    def pad(
        self,
        cols: Names,
        seq_len: int = 100,
        mask_cols: Names | None = None,
        mask_token: float | str = 0,
    ) -> Self:
        """Bring lists to one length: the last seq_len elements stay, `mask_token` fills up behind them.

        A null or empty list becomes seq_len tokens. Lists of lists are filled up with lists of tokens as long
        as the row's first.

        Args:
            cols: columns of lists, with elements of any type.
            seq_len: the length.
            mask_cols: columns for which `mask` is added first.
            mask_token: in the type of the elements.
        """
        table = self if mask_cols is None else self.mask(mask_cols, seq_len)
        return table._replace(
            {
                name: _padded(quoted(name), table.schema[name].dataType, seq_len, mask_token)
                for name in self._lists(cols, "cols")
            }
        )

    def sample_listwise(
        self,
        columns: Names,
        num_sampled_list: int,
        num_sampled_item: int,
        random_seed: int | None = None,
        replace: bool = True,
    ) -> Self:
        """Sample lists from lists: each row becomes num_sampled_list rows of num_sampled_item elements.

        The columns of a row have one length and are sampled at the same places, each place once. Rows with
        fewer elements are dropped.

        Args:
            columns: columns of lists.
            num_sampled_list: rows made of each row.
            num_sampled_item: elements of each list.
            random_seed: as in `add_negative_samples`.
            replace: replace the columns, or add `sampled_<col>`.

        Raises:
            DataError: the lists of a row differ in length (found when the rows are computed, as Spark's error).
        """
        names = self._lists(columns, "columns")
        size = F.size(quoted(names[0]))
        for name in names[1:]:
            message = f"sample_listwise needs lists of one length: {names[0]!r} and {name!r} differ"
            size = F.when(F.size(quoted(name)) == size, size).otherwise(
                F.raise_error(F.lit(message)).cast("int")
            )
        copy, places = scratch_name("copy"), scratch_name("places")
        start = _seed_column(random_seed, self._sortable(set()))
        drawn = F.slice(
            F.array_sort(
                F.transform(
                    F.sequence(F.lit(0), size - 1),
                    lambda place: F.struct(
                        F.xxhash64(start, F.col(copy), place).alias("h"), place.alias("p")
                    ),
                )
            ),
            1,
            num_sampled_item,
        )
        sampled = (
            self.df.where(size >= num_sampled_item)
            .select(
                *map(quoted, self.columns),
                F.explode(F.sequence(F.lit(1), F.lit(num_sampled_list))).alias(copy),
            )
            .select(*map(quoted, self.columns), drawn.alias(places))
        )

        def chosen(name: str) -> Column:
            return F.transform(F.col(places), lambda entry: F.element_at(quoted(name), entry["p"] + 1))

        columns_made = {name if replace else f"sampled_{name}": chosen(name) for name in names}
        return self._clone(sampled)._replace(columns_made).drop(places)

    def _lists(self, columns: Names, argument: str) -> list[str]:
        names = self._existing(columns, argument)
        for name in names:
            if not isinstance(self.schema[name].dataType, ArrayType):
                raise DataError(
                    f"Column {name!r} must hold lists. Received: type {self.schema[name].dataType.simpleString()}"
                )
        return names

    def _sortable(self, without: set[str]) -> list[str]:
        """The columns that Spark can compare and hash."""
        return [
            field.name for field in self.schema if field.name not in without and not _has_map(field.dataType)
        ]

    def _check_items(self, item_size: int, neg_num: int, name: str, kind: DataType | None) -> None:
        if not isinstance(kind, IntegralType):
            raise DataError(
                f"Items must be integers: column {name!r} is not. "
                f"Received: type {self.schema[name].dataType.simpleString()}"
            )
        if item_size < 3 or neg_num < 1:
            raise DataError(
                f"Negatives need at least two items (item_size 3) and neg_num 1. "
                f"Received: item_size={item_size}, neg_num={neg_num}"
            )


def _unwrapped(events: Column) -> Column:
    return F.transform(events, lambda event: event["v"])


def _seed_column(seed: int | None, names: Sequence[str]) -> Column:
    """A number for each row, made of the seed and the row's content: it does not change with the partitions."""
    start = random.getrandbits(62) if seed is None else seed
    return F.xxhash64(F.lit(start).cast("bigint"), *map(quoted, names))


def _other_item(item: Column, item_size: int, chance: Column) -> Column:
    """An item of 1 to item_size - 1 other than `item`, evenly."""
    inside = item.between(1, item_size - 1)
    drawn = F.pmod(chance, F.when(inside, item_size - 2).otherwise(item_size - 1).cast("bigint")) + 1
    return F.when(inside & (drawn >= item), drawn + 1).otherwise(drawn)


def _padded(column: Column, kind: DataType, length: int, token: Any) -> Column:
    assert isinstance(kind, ArrayType)
    element = kind.elementType
    known = F.coalesce(column, F.array().cast(kind))
    size = F.size(known)
    last = F.slice(known, F.greatest(size - length, F.lit(0)) + 1, length)
    if isinstance(element, ArrayType):
        width = F.greatest(F.coalesce(F.size(F.get(known, 0)), F.lit(0)), F.lit(0))
        filling = F.array_repeat(F.lit(token).cast(element.elementType), width)
    else:
        filling = F.lit(token).cast(element)
    return F.concat(last, F.array_repeat(filling, F.greatest(length - size, F.lit(0))))


def _has_map(kind: DataType) -> bool:
    if isinstance(kind, MapType):
        return True
    if isinstance(kind, ArrayType):
        return _has_map(kind.elementType)
    return any(_has_map(field.dataType) for field in getattr(kind, "fields", []))
