"""Arrow columns to the arrays of a batch, by FeatureSpec; vectorised, no loop over rows.

flat       user: int64    item: int64          seen: list<int64>          label: float
grouped    user: int64    item: list<int64>    seen: list<list<int64>>    label: list<float>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deeprec_spark.data.batch import Batch, Groups
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec

_FLOAT32: np.dtype[Any] = np.dtype(np.float32)
_INT64: np.dtype[Any] = np.dtype(np.int64)


def required_columns(spec: FeatureSpec, *, labels: bool, sample_weight: str | None = None) -> list[str]:
    """The columns that `decode` reads."""
    names = spec.feature_names + (spec.label_names if labels else [])
    return [*names, sample_weight] if sample_weight else names


def decode(
    table: pa.Table, spec: FeatureSpec, *, labels: bool = True, sample_weight: str | None = None
) -> Batch:
    """All rows of an Arrow table as one Batch.

    Args:
        table: prepared columns: no nulls, ids as integers, dense values as numbers.
        spec: the columns, their kinds, lengths and padding. With a grouping, they may be grouped or flat.
        labels: read the label columns too.
        sample_weight: name of the weight column, if any.

    Raises:
        ValueError: a column is missing, holds nulls, has a type that its kind does not take, or has another number of
            items in a group than other columns.
    """
    missing = [
        name
        for name in required_columns(spec, labels=labels, sample_weight=sample_weight)
        if name not in table.column_names
    ]
    if missing:
        raise ValueError(
            f"The data has no column {missing}: check feature_cols and label_cols, or prepare the data "
            f"again. Received: columns {table.column_names}"
        )
    columns = {name: table.column(name) for name in table.column_names}
    groups = _ungroup(columns, spec, labels=labels, sample_weight=sample_weight)
    return Batch(
        features={feature.name: _decode_feature(columns[feature.name], feature) for feature in spec.features},
        labels=_decode_labels(columns, spec) if labels else {},
        sample_weight=_numbers(columns[sample_weight], sample_weight, _FLOAT32) if sample_weight else None,
        groups=groups,
        group_index=spec.grouping.index if spec.grouping else None,
    )


def projected(spec: FeatureSpec, columns: Sequence[str]) -> FeatureSpec:
    """The spec without the features that a model does not take, so that they are not read.

    With a grouping at least one item-level feature stays, of which a group's size is seen, and one group-level one.
    """
    used = [feature.name for feature in spec.features if feature.name in set(columns)]
    grouping = spec.grouping
    if grouping is not None:
        for level in (spec.item_features, spec.group_features):
            if not any(feature.name in used for feature in level):
                # One number for each sample is the least to read.
                used.append(
                    min(level, key=lambda one: one.kind is FeatureKind.SEQUENCE or one.width is not None).name
                )
        kept = tuple(name for name in grouping.features if name in used)
        grouping = grouping.model_copy(update={"features": kept})
    features = tuple(feature for feature in spec.features if feature.name in used)
    return FeatureSpec(features=features, labels=spec.labels, grouping=grouping)


def is_grouped(schema: pa.Schema, spec: FeatureSpec) -> bool:
    """Whether these columns hold groups of samples: their item-level features are lists of what samples have."""
    if spec.grouping is None:
        return False
    feature = spec.item_features[0]
    kind = schema.field(feature.name).type
    if feature.kind is FeatureKind.SEQUENCE or feature.width is not None:
        return _is_list(kind) and _is_list(kind.value_type)
    return _is_list(kind)


def pad_sequences(
    offsets: npt.NDArray[np.int64], values: npt.NDArray[np.int64], max_length: int, padding_value: int
) -> npt.NDArray[np.int64]:
    """Lists to int64 `[rows, max_length]`: the last `max_length` values of each, padding behind them.

    Args:
        offsets: int64 `[rows + 1]`; row r holds `values[offsets[r]:offsets[r + 1]]`.
        values: int64 `[total]`.

    Example:
        >>> pad_sequences(np.array([0, 0, 3]), np.array([7, 8, 9]), 2, -1).tolist()
        [[-1, -1], [8, 9]]
    """
    ends = offsets[1:]
    starts = np.maximum(offsets[:-1], ends - max_length)
    positions = starts[:, None] + np.arange(max_length)
    inside = positions < ends[:, None]
    if not len(values):
        return np.full(inside.shape, padding_value, np.int64)
    return np.where(inside, values[np.where(inside, positions, 0)], np.int64(padding_value))


def _decode_feature(column: pa.ChunkedArray, feature: Feature) -> npt.NDArray[Any]:
    if feature.kind is FeatureKind.CATEGORICAL:
        return _numbers(column, feature.name, _INT64)
    if feature.kind is FeatureKind.DENSE and feature.width is None:
        return _numbers(column, feature.name, _FLOAT32)
    lists = _lists(column, feature.name)
    offsets = np.asarray(lists.offsets, dtype=np.int64)
    # `flatten` drops what lies before the first offset of a sliced array, so offsets start at 0 with it.
    offsets = offsets - offsets[0]
    if feature.kind is FeatureKind.SEQUENCE:
        values = _numbers(pa.chunked_array([lists.flatten()]), feature.name, _INT64)
        assert feature.max_length is not None  # the spec demands it of sequences
        return pad_sequences(offsets, values, feature.max_length, feature.padding_value)
    lengths = np.diff(offsets)
    if len(lengths) and (lengths != feature.width).any():
        raise ValueError(
            f"Every value of the dense vector column {feature.name!r} must have width {feature.width}. "
            f"Received: a value of width {int(lengths[lengths != feature.width][0])}"
        )
    values = _numbers(pa.chunked_array([lists.flatten()]), feature.name, _FLOAT32)
    return values.reshape(len(lengths), feature.width or 1)


def _ungroup(
    columns: dict[str, pa.ChunkedArray], spec: FeatureSpec, *, labels: bool, sample_weight: str | None
) -> Groups | None:
    """Put the samples of grouped item-level columns in place of their lists; None where columns are flat."""
    names = [feature.name for feature in spec.item_features]
    schema = pa.schema([(name, column.type) for name, column in columns.items()])
    if spec.grouping is None or not is_grouped(schema, spec):
        return None
    names += [*(spec.label_names if labels else []), *([sample_weight] if sample_weight else [])]
    sizes: npt.NDArray[np.int64] | None = None
    for name in names:
        lists = _lists(columns[name], name)
        offsets = np.asarray(lists.offsets, dtype=np.int64)
        found = offsets[1:] - offsets[:-1]
        if sizes is None:
            sizes = found
        elif not np.array_equal(found, sizes):
            raise ValueError(
                f"All item-level columns of a group must have as many items, but {name!r} and {names[0]!r} differ: "
                f"prepare the data again. Received: {int(found.sum())} and {int(sizes.sum())} items in all"
            )
        columns[name] = pa.chunked_array([lists.flatten()])
    assert sizes is not None  # a grouping has at least one item-level feature
    return Groups(frozenset(spec.grouping.features), sizes)


def _decode_labels(
    columns: Mapping[str, pa.ChunkedArray], spec: FeatureSpec
) -> Mapping[str, npt.NDArray[Any]]:
    return {
        label.name: _numbers(
            columns[label.name],
            label.name,
            _INT64 if label.kind == "multiclass" else _FLOAT32,
        )
        for label in spec.labels
    }


def _numbers(column: pa.ChunkedArray, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if column.null_count:
        raise ValueError(
            f"Column {name!r} holds {column.null_count} nulls: prepare it (FeatureTable.fillna), or give "
            f"the DataFrame itself to the Estimator, which fills the defaults. Received: type {column.type}"
        )
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif pa.types.is_decimal(kind) and dtype.kind == "f":
        column = column.cast(pa.float64())
    elif not (pa.types.is_integer(kind) or (pa.types.is_floating(kind) and dtype.kind == "f")):
        wanted = "integers" if dtype.kind == "i" else "numbers"
        hint = "; data that were prepared in groups need the spec beside them" if _is_list(kind) else ""
        raise ValueError(f"Column {name!r} must hold {wanted}{hint}. Received: type {kind}")
    array: npt.NDArray[Any] = column.to_numpy()
    if kind == pa.uint64() and dtype.kind == "i":
        return array.view(np.int64)
    return np.ascontiguousarray(array, dtype=dtype)


def _lists(column: pa.ChunkedArray, name: str) -> pa.LargeListArray:
    kind = column.type
    if not _is_list(kind):
        raise ValueError(f"Column {name!r} must hold lists. Received: type {kind}")
    if column.null_count:
        raise ValueError(
            f"Column {name!r} holds {column.null_count} null lists: make them empty lists first. "
            f"Received: type {kind}"
        )
    combined = column.cast(pa.large_list(kind.value_type)).combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        combined = pa.concat_arrays(combined.chunks) if combined.num_chunks else pa.array([], combined.type)
    if pc.any(pc.is_null(combined.flatten())).as_py():
        raise ValueError(
            f"Lists of column {name!r} hold nulls: drop them first. Received: "
            f"{combined.flatten().null_count} null elements"
        )
    return combined


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
