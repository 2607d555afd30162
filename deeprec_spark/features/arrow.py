"""A FeatureSpec applied to Arrow batches: what Spark runs on executors and serving runs on requests.

This module imports no pyspark. Columns of the same name as a feature hold its raw values; what comes out is
what the reader of training data and the model take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.udfs import functions

DEFAULT_ID = -1  # the raw value that a null integer id takes where the spec names none

__all__ = ["DEFAULT_ID", "DataError", "prepare_batch", "prepare_batches", "prepare_column"]


class DataError(ValueError):
    """Data that cannot be prepared; the message names the column and the remedy."""


def prepare_batches(
    batches: Iterable[pa.RecordBatch],
    *,
    spec: FeatureSpec,
    labels: bool = True,
    keep: Sequence[str] = (),
    drop: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """`prepare_batch` over a stream; rows where the boolean column `drop` is true are left out."""
    for batch in batches:
        chosen = batch.filter(pc.invert(batch.column(drop))) if drop else batch
        yield prepare_batch(chosen, spec, labels=labels, keep=keep)


def prepare_batch(
    batch: pa.RecordBatch, spec: FeatureSpec, *, labels: bool = True, keep: Sequence[str] = ()
) -> pa.RecordBatch:
    """The prepared columns of raw ones, in the spec's order: features, labels, then those to keep.

    Args:
        batch: raw columns `[n]`.
        spec: the features and labels.
        labels: prepare the labels too.
        keep: further columns that pass through unchanged.

    Raises:
        DataError: a dense vector of another width, or a type that does not fit.

    Example:
        >>> batch = pa.record_batch({"country": ["de", None], "clicks": [3.0, float("nan")]})
        >>> prepare_batch(batch, spec, labels=False)["clicks"].to_pylist()
        [1.3862943649291992, 0.0]
    """
    arrays = [prepare_column(batch.column(feature.name), feature) for feature in spec.features]
    names = spec.feature_names
    if labels:
        arrays += [_label(batch.column(label.name), label) for label in spec.labels]
        names = names + spec.label_names
    arrays += [batch.column(name) for name in keep]
    return pa.RecordBatch.from_arrays(arrays, names=[*names, *keep])


def prepare_column(raw: pa.Array, feature: Feature) -> pa.Array:
    """One feature's prepared column `[n]` of its raw values `[n]`; no nulls come out."""
    try:
        if feature.kind is FeatureKind.DENSE:
            return _vectors(raw, feature) if feature.width is not None else _dense(raw, feature)
        if feature.kind is FeatureKind.SEQUENCE:
            return _sequence(raw, feature)
        if feature.raw_type == "string":
            texts = functions.as_text(raw)
            return _ids(texts.fill_null(pa.scalar(_default_text(feature), texts.type)), feature)
        return raw.cast(pa.int64()).fill_null(DEFAULT_ID if feature.default is None else int(feature.default))
    except (TypeError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"Column {feature.name!r} does not fit its feature ({feature.kind.value}, {feature.raw_type}): {error}. "
            f"Received: type {raw.type}"
        ) from error


def dense_default(feature: Feature) -> float:
    """The finite raw value that stands for null, NaN and infinity in a dense column."""
    default = 0.0 if feature.default is None else float(feature.default)
    if not math.isfinite(default):
        raise DataError(f"Dense feature {feature.name!r} needs a finite default. Received: default={default}")
    return default


def _dense(raw: pa.Array, feature: Feature) -> pa.FloatArray:
    return pa.array(_finite(raw, feature), type=pa.float32())


def _finite(raw: pa.Array, feature: Feature) -> npt.NDArray[np.float32]:
    numbers = raw.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    finite = np.where(np.isfinite(numbers), numbers, np.float32(dense_default(feature)))
    if feature.transform == "log1p":
        return functions.log1p_array(finite)
    return finite


def _vectors(raw: pa.Array, feature: Feature) -> pa.ListArray:
    width = feature.width or 1
    valid = pc.is_valid(raw).to_numpy(zero_copy_only=False)
    lengths = pc.list_value_length(raw).drop_null()
    if len(lengths) and (pc.min(lengths).as_py() != width or pc.max(lengths).as_py() != width):
        raise DataError(
            f"Every vector of dense column {feature.name!r} must have width {width}. "
            f"Received: widths {pc.min(lengths)} to {pc.max(lengths)}"
        )
    vectors = np.full((len(raw), width), np.nan, np.float32)
    vectors[valid] = (
        raw.flatten().cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False).reshape(-1, width)
    )
    values = _dense(pa.array(vectors.reshape(-1)), feature)
    return pa.ListArray.from_arrays(pa.array(np.arange(len(raw) + 1, dtype=np.int32) * width), values)


def _sequence(raw: pa.Array, feature: Feature) -> pa.ListArray:
    """What is no id left out, then the last `max_length` kept, hashed where the raw values are strings.

    Null, "" among strings and the padding value among integers are no ids, as in an exported graph. A hash that
    happens to equal the padding value is one.
    """
    if pa.types.is_null(raw.type):
        raw = raw.cast(pa.list_(pa.string() if feature.raw_type == "string" else pa.int64()))
    elements = pc.list_flatten(raw)
    if feature.raw_type == "string":
        elements = functions.as_text(elements)
        known = pc.greater(pc.binary_length(elements), 0).fill_null(False)
    else:
        elements = elements.cast(pa.int64())
        known = pc.not_equal(elements, pa.scalar(feature.padding_value, pa.int64())).fill_null(False)
    rows = pc.list_parent_indices(raw).filter(known).to_numpy(zero_copy_only=False).astype(np.int64)
    elements = elements.filter(known)
    lengths = np.bincount(rows, minlength=len(raw))
    from_end = np.cumsum(lengths)[rows] - np.arange(len(rows))  # 1 for the last of its row
    last = from_end <= (feature.max_length or 0)
    offsets = np.zeros(len(raw) + 1, np.int32)
    np.cumsum(np.minimum(lengths, feature.max_length or 0), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), _ids(elements.filter(pa.array(last)), feature))


def _ids(values: pa.Array, feature: Feature) -> pa.Int64Array:
    if feature.raw_type == "string":
        return functions.fingerprint64(values)
    return values.cast(pa.int64())


def _default_text(feature: Feature) -> str:
    return "" if feature.default is None else str(feature.default)


def _label(raw: pa.Array, label: Label) -> pa.Array:
    return raw.cast(pa.int64() if label.kind == "multiclass" else pa.float32(), safe=False)
