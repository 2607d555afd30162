"""Target encoding: categories to the smoothed means of targets, out of fold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import IntegralType
from typing_extensions import Self

from deeprec_spark.embedding.filesystem import resolve
from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.base_table import Names, Table, as_list, scratch_name
from deeprec_spark.features.friesian import friesian_class
from deeprec_spark.features.numbers import NumberOperators
from deeprec_spark.features.output import write_text
from deeprec_spark.features.prepare import quoted
from deeprec_spark.features.scaling import nested_names
from deeprec_spark.session import current_session

if TYPE_CHECKING:

    class _Friesian:
        """Friesian's class of this name, where BigDL is installed."""
else:
    _Friesian = friesian_class("TargetCode")

COUNT = "target_encode_count"
_META_FILE = "_target_code.json"  # Spark's readers pass over names that begin with an underscore

__all__ = ["TargetCode", "TargetOperators"]


class TargetCode(NumberOperators, _Friesian):
    """The encoding of one category, or group of categories.

    Args:
        df: the category's columns, the encoded columns, and `target_encode_count`.
        cat_col: the category's column or columns.
        out_target_mean: {encoded column: (target column, its mean over all)}.
    """

    def __init__(
        self, df: DataFrame, cat_col: str | list[str], out_target_mean: Mapping[str, tuple[str, float]]
    ) -> None:
        super().__init__(df)
        self._existing(cat_col, "cat_col")
        self.cat_col = cat_col
        self.out_target_mean = dict(out_target_mean)

    def _clone(self, df: DataFrame) -> Self:
        return type(self)(df, self.cat_col, self.out_target_mean)

    def rename(self, columns: Mapping[str, str]) -> Self:
        """Rename columns, the category's and encoded ones among them."""
        cat_col = (
            columns.get(self.cat_col, self.cat_col)
            if isinstance(self.cat_col, str)
            else [columns.get(name, name) for name in self.cat_col]
        )
        means = {columns.get(name, name): mean for name, mean in self.out_target_mean.items()}
        return type(self)(Table(self.df).rename(columns).df, cat_col, means)

    def write_parquet(self, path: str, mode: str = "overwrite") -> None:
        """Write the table, and beside its files what `read_parquet` needs."""
        super().write_parquet(path, mode)
        meta = {"cat_col": self.cat_col, "out_target_mean": self.out_target_mean}
        write_text(f"{path}/{_META_FILE}", json.dumps(meta) + "\n")

    @classmethod
    def read_parquet(cls, path: str) -> Self:
        """Read what `write_parquet` wrote."""
        filesystem, local = resolve(f"{path}/{_META_FILE}")
        try:
            with filesystem.open_input_stream(local) as stream:
                meta = json.loads(stream.read())
        except FileNotFoundError as error:
            raise DataError(
                f"{path!r} was not written by TargetCode.write_parquet. Received: no {_META_FILE}"
            ) from error
        means = {name: (target, mean) for name, (target, mean) in meta["out_target_mean"].items()}
        return cls(current_session().read.parquet(path), meta["cat_col"], means)


class TargetOperators(Table):
    """The part of FeatureTable that encodes categories by targets."""

    def target_encode(
        self,
        cat_cols: Names | Sequence[Sequence[str]],
        target_cols: Names,
        target_mean: Mapping[str, float] | None = None,
        smooth: float = 20,
        kfold: int = 2,
        fold_seed: int | None = None,
        fold_col: str = "__fold__",
        drop_cat: bool = False,
        drop_fold: bool = True,
        out_cols: Names | Sequence[Sequence[str]] | None = None,
    ) -> tuple[Self, list[TargetCode]]:
        """Add the mean of each target within each category, smoothed: `(sum + mean * smooth) / (count + smooth)`.

        With folds, a row's sum and count leave out its own fold, so that its target does not leak. A category
        that is null, or lies in one fold only, gets the target's overall mean.

        Args:
            cat_cols: a column, several, or groups of columns that form one category together.
            target_cols: numeric columns.
            target_mean: the overall means; None computes them.
            smooth: weight of the overall mean, in rows.
            kfold: number of folds, 1 for none.
            fold_seed: draws the folds at random; None numbers the rows of each partition.
            fold_col: a column of folds that is used if there, else made.
            drop_cat: drop the categories' columns.
            drop_fold: drop the column of folds.
            out_cols: names of the results, one for each category and target; None is "<category>_te_<target>".

        Returns:
            The table, and for each category its TargetCode over all rows, for `encode_target` on other tables.
        """
        if not isinstance(kfold, int) or kfold < 1:
            raise DataError(f"kfold must be a whole number from 1. Received: kfold={kfold!r}")
        groups = [cat_cols] if isinstance(cat_cols, str) else list(cat_cols)
        categories = [as_list(group, "cat_cols") for group in groups]
        for category in categories:
            self._existing(category, "cat_cols")
        targets = self._numeric(target_cols)
        default = [["_".join(category) + f"_te_{target}" for target in targets] for category in categories]
        outs = nested_names(out_cols, default, "out_cols")
        means = self._means(targets, target_mean)
        result = self._with_folds(kfold, fold_seed, fold_col)
        made: dict[str, Column] = {}
        codes = []
        for group, category, names in zip(groups, categories, outs, strict=True):
            keys = [quoted(name) for name in category]
            known = F.lit(True)
            for key in keys:
                known = known & key.isNotNull()
            whole = Window.partitionBy(*keys)
            for target, name in zip(targets, names, strict=True):
                total, count = _sum(target).over(whole), F.count(F.lit(1)).over(whole)
                if kfold > 1:
                    fold = Window.partitionBy(*keys, quoted(fold_col))
                    total, count = total - _sum(target).over(fold), count - F.count(F.lit(1)).over(fold)
                code = _smoothed(total, count, means[target], smooth)
                made[name] = F.when(known & (count > 0), code).otherwise(F.lit(means[target]))
            encoded = self.df.groupBy(*keys).agg(
                F.count(F.lit(1)).alias(COUNT),
                *[
                    _smoothed(_sum(target), F.count(F.lit(1)), means[target], smooth).alias(name)
                    for target, name in zip(targets, names, strict=True)
                ],
            )
            chosen = {name: (target, means[target]) for target, name in zip(targets, names, strict=True)}
            codes.append(TargetCode(encoded, group if isinstance(group, str) else category, chosen))
        encoded_table = result._replace(made)
        dropped = [name for category in categories for name in category] if drop_cat else []
        if drop_fold and kfold > 1:
            dropped.append(fold_col)
        return encoded_table.drop(*dropped), codes

    def encode_target(
        self,
        targets: TargetCode | Sequence[TargetCode],
        target_cols: Names | None = None,
        drop_cat: bool = True,
    ) -> Self:
        """Add the encodings that `target_encode` found on another table; unknown categories get the overall mean.

        Args:
            targets: one or several.
            target_cols: only the encodings of these targets; None: all.
            drop_cat: drop the categories' columns.
        """
        codes = [targets] if isinstance(targets, TargetCode) else list(targets)
        wanted = None if target_cols is None else as_list(target_cols, "target_cols")
        table = self
        for code in codes:
            names = self._existing(code.cat_col, "TargetCode.cat_col")
            chosen = {
                name: mean
                for name, (target, mean) in code.out_target_mean.items()
                if wanted is None or target in wanted
            }
            found = {name: scratch_name("code") for name in chosen}
            keys = {name: scratch_name("key") for name in names}
            lookup = code.df.select(
                *[quoted(name).alias(key) for name, key in keys.items()],
                *[quoted(name).alias(hidden) for name, hidden in found.items()],
            )
            condition = [quoted(name) == F.col(key) for name, key in keys.items()]
            joined = table.df.join(lookup, condition, "left").drop(*keys.values())
            table = (
                table._clone(joined)
                ._replace(
                    {name: F.coalesce(F.col(found[name]), F.lit(mean)) for name, mean in chosen.items()}
                )
                .drop(*found.values())
            )
        if drop_cat:
            table = table.drop(*[name for code in codes for name in as_list(code.cat_col)])
        return table

    def _means(self, targets: Sequence[str], given: Mapping[str, float] | None) -> dict[str, float]:
        if given is not None:
            if missing := [name for name in targets if name not in given]:
                raise DataError(f"target_mean lacks {missing}. Received: target_mean={dict(given)}")
            return {name: float(given[name]) for name in targets}
        row = self.df.agg(*[F.avg(quoted(name)) for name in targets]).collect()[0]
        if empty := [name for name, mean in zip(targets, row, strict=True) if mean is None]:
            raise DataError(f"Targets without any value have no mean. Received: {empty}")
        return {name: float(mean) for name, mean in zip(targets, row, strict=True)}

    def _with_folds(self, kfold: int, seed: int | None, fold_col: str) -> Self:
        if kfold == 1:
            return self
        if fold_col in self.columns:
            kind = self.schema[fold_col].dataType
            if not isinstance(kind, IntegralType):
                raise DataError(
                    f"fold_col {fold_col!r} must be an integer. Received: type {kind.simpleString()}"
                )
            return self
        fold = F.monotonically_increasing_id() % kfold if seed is None else F.floor(F.rand(seed) * kfold)
        return self._replace({fold_col: fold.cast("int")})


def _sum(target: str) -> Column:
    return F.sum(F.coalesce(quoted(target).cast("double"), F.lit(0.0)))


def _smoothed(total: Column, count: Column, mean: float, smooth: float) -> Column:
    return (total + F.lit(mean * smooth)) / F.nullif(count + F.lit(float(smooth)), F.lit(0.0))
