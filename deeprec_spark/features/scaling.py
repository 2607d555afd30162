"""Numbers to numbers: scales, bins, differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import Column, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import ArrayType, NumericType
from typing_extensions import Self

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.base_table import Names, as_list
from deeprec_spark.features.numbers import NumberOperators
from deeprec_spark.features.prepare import quoted

Bounds = tuple[Any, Any]  # two numbers, or two lists of numbers for arrays and vectors
Bins = int | Sequence[float]

__all__ = ["ScalingOperators"]


class ScalingOperators(NumberOperators):
    """The part of FeatureTable that scales and cuts numbers."""

    def min_max_scale(
        self, columns: Names, min: float = 0.0, max: float = 1.0
    ) -> tuple[Self, dict[str, Bounds]]:
        """Scale each column linearly to [min, max]; a constant becomes their middle.

        Args:
            columns: numbers (become float), arrays (of double) or vectors, which are scaled at each position.
            min: lower bound.
            max: upper bound.

        Returns:
            The table, and {column: (smallest, largest)} for `transform_min_max_scale`.
        """
        names = self._existing(columns)
        bounds = self._bounds(names)
        return self.transform_min_max_scale(names, bounds, min, max), bounds

    def transform_min_max_scale(
        self, columns: Names, min_max_dict: Mapping[str, Bounds], min: float = 0.0, max: float = 1.0
    ) -> Self:
        """Scale columns by bounds found elsewhere: the same line as in `min_max_scale` with equal min and max.

        Args:
            columns: names; those that min_max_dict lacks stay as they are.
            min_max_dict: {column: (smallest, largest)}.
            min: lower bound.
            max: upper bound.
        """
        made: dict[str, Column] = {}
        for name in self._existing(columns):
            if name not in min_max_dict:
                continue
            low, high = min_max_dict[name]
            if isinstance(self.schema[name].dataType, NumericType):
                made[name] = _line(quoted(name), F.lit(float(low)), F.lit(float(high)), min, max).cast(
                    "float"
                )
                continue
            scaled = _line_by_place(self._as_array(name), low, high, min, max)
            made[name] = array_to_vector(scaled) if self._is_vector(name) else scaled
        return self._replace(made)

    def cut_bins(
        self,
        columns: Names,
        bins: Bins | Mapping[str, Bins],
        labels: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        out_cols: Names | None = None,
        drop: bool = True,
    ) -> Self:
        """Cut numbers into bins: n edges make n + 1 buckets, numbered from 0.

        With edges [0, 6] the buckets are (-inf, 0), [0, 6), [6, inf). NaN gets the number n + 1, or a null
        label; null stays null.

        Args:
            columns: numeric columns.
            bins: edges, or how many even bins to make between smallest and largest value; for all, or by column.
            labels: texts in the place of the numbers, n + 1 of them.
            out_cols: names of the results; None is "<column>_bin".
            drop: drop the column itself.
        """
        names = self._numeric(columns)
        targets = [f"{name}_bin" for name in names] if out_cols is None else as_list(out_cols, "out_cols")
        if len(targets) != len(names):
            raise DataError(f"out_cols must name one column for each. Received: {names} and {targets}")
        made: dict[str, Column] = {}
        for name, target in zip(names, targets, strict=True):
            edges = self._edges(name, bins[name] if isinstance(bins, Mapping) else bins)
            texts = labels[name] if isinstance(labels, Mapping) else labels
            made[target] = _bucket(quoted(name), edges, texts)
        dropped = [name for name, target in zip(names, targets, strict=True) if drop and name != target]
        return self._replace(made).drop(*dropped)

    def difference_lag(
        self,
        columns: Names,
        sort_cols: Names,
        shifts: int | Sequence[int] = 1,
        partition_cols: Names | None = None,
        out_cols: Names | Sequence[Sequence[str]] | None = None,
    ) -> Self:
        """Add the difference to the row that lies `shift` rows before, in the order of sort_cols.

        Args:
            columns: numeric columns.
            sort_cols: the order.
            shifts: one or several.
            partition_cols: rows with equal values here belong together; None: all rows.
            out_cols: one name, a list, or a list for each column; None is "<sort_cols>_diff_lag_<column>_<shift>".
        """
        names, order = self._numeric(columns), self._existing(sort_cols, "sort_cols")
        steps = [shifts] if isinstance(shifts, int) else list(shifts)
        prefix = "_".join(order)
        default = [[f"{prefix}_diff_lag_{name}_{step}" for step in steps] for name in names]
        targets = nested_names(out_cols, default, "out_cols")
        groups = [] if partition_cols is None else self._existing(partition_cols, "partition_cols")
        window = Window.partitionBy(*map(quoted, groups)).orderBy(*map(quoted, order))
        made = {
            target: (quoted(name) - F.lag(quoted(name), step).over(window)).cast(self.schema[name].dataType)
            for name, row in zip(names, targets, strict=True)
            for step, target in zip(steps, row, strict=True)
        }
        return self._replace(made)

    def _bounds(self, names: Sequence[str]) -> dict[str, Bounds]:
        """The smallest and largest values, at each position for arrays, in one job."""
        sizes = self._sizes(
            [name for name in names if not isinstance(self.schema[name].dataType, NumericType)]
        )
        wanted: list[tuple[str, Column]] = []
        for name in names:
            if name in sizes:
                array = self._as_array(name)
                wanted += [(name, F.get(array, place).cast("double")) for place in range(sizes[name])]
            else:
                wanted.append((name, quoted(self._numeric(name)[0]).cast("double")))
        values = self.df.select(*[value.alias(f"v{index}") for index, (_, value) in enumerate(wanted)])
        row = values.agg(
            *[aggregate(F.col(name)) for name in values.columns for aggregate in (F.min, F.max)]
        ).collect()[0]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for index, (name, _) in enumerate(wanted):
            low, high = row[2 * index], row[2 * index + 1]
            if low is None:
                raise DataError(
                    f"Column {name!r} has no value to scale: drop or fill it. Received: only nulls"
                )
            found[name].append((low, high))
        return {
            name: ([low for low, _ in pairs], [high for _, high in pairs]) if name in sizes else pairs[0]
            for name, pairs in found.items()
        }

    def _sizes(self, names: Sequence[str]) -> dict[str, int]:
        if not names:
            return {}
        row = self.df.agg(*[F.max(F.size(self._as_array(name))) for name in names]).collect()[0]
        return {name: max(size or 0, 0) for name, size in zip(names, row, strict=True)}

    def _is_vector(self, name: str) -> bool:
        return (
            self.schema[name].dataType.typeName() == "vector"
            or "vector" in self.schema[name].dataType.simpleString()
        )

    def _as_array(self, name: str) -> Column:
        if isinstance(self.schema[name].dataType, ArrayType):
            return quoted(name)
        if self._is_vector(name):
            return vector_to_array(quoted(name))
        raise DataError(
            f"Column {name!r} must hold numbers, arrays or vectors. "
            f"Received: type {self.schema[name].dataType.simpleString()}"
        )

    def _edges(self, name: str, bins: Bins) -> list[float]:
        if not isinstance(bins, int):
            return [float(edge) for edge in bins]
        low, high = self.get_stats(name, ["min", "max"])[name]
        return [float(edge) for edge in np.linspace(float(low), float(high), bins + 1)]


def nested_names(
    given: Names | Sequence[Sequence[str]] | None, default: list[list[str]], argument: str
) -> list[list[str]]:
    """Names for a grid of results: one, a list along the longer side, or a list of lists; None is the default."""
    rows, columns = len(default), len(default[0]) if default else 0
    if given is None:
        return default
    if isinstance(given, str):
        given = [given]
    if all(isinstance(entry, str) for entry in given):
        flat = [str(entry) for entry in given]
        result = [flat] if rows == 1 else [[entry] for entry in flat]
    else:
        result = [list(entry) for entry in given]
    if len(result) != rows or any(len(row) != columns for row in result):
        raise DataError(f"{argument} must name {rows} times {columns} columns. Received: {given!r}")
    return result


def _number_array(values: Any) -> Column:
    return F.array(*[F.lit(float(value)) for value in np.asarray(values).reshape(-1)])


def _line_by_place(array: Column, low: Any, high: Any, bottom: float, top: float) -> Column:
    lows, highs = _number_array(low), _number_array(high)
    return F.transform(
        array,
        lambda value, place: _line(
            value, F.element_at(lows, place + 1), F.element_at(highs, place + 1), bottom, top
        ),
    )


def _line(value: Column, low: Column, high: Column, bottom: float, top: float) -> Column:
    spread = high - low
    scaled = (value - low) / F.when(spread == 0, F.lit(1.0)).otherwise(spread) * (top - bottom) + bottom
    return F.when(value.isNull(), None).when(spread == 0, (top + bottom) / 2).otherwise(scaled)


def _bucket(value: Column, edges: Sequence[float], texts: Sequence[str] | None) -> Column:
    number = value.cast("double")
    bucket = F.size(F.filter(F.array(*[F.lit(edge) for edge in edges]), lambda edge: edge <= number))
    if texts is None:
        return F.when(F.isnan(number), len(edges) + 1).when(number.isNotNull(), bucket).cast("int")
    if len(texts) != len(edges) + 1:
        raise DataError(
            f"labels must be one more than the edges. Received: {len(texts)} labels, {len(edges)} edges"
        )
    return F.when(
        number.isNotNull() & ~F.isnan(number),
        F.element_at(F.array(*[F.lit(text) for text in texts]), bucket + 1),
    )
