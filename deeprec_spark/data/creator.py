"""Data creators: what a user's function yields, written as prepared Parquet."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from deeprec_spark.embedding.filesystem import resolve
from deeprec_spark.features.labels import LabelKind, LabelKinds, check_labels
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label

WEIGHT_COLUMN = "sample_weight"
"""Where the third element of a creator's `(x, y, sample_weight)` goes."""

DataCreator = Callable[[dict[str, Any], int], Any]
Arrays = dict[str, npt.NDArray[Any]]


class Shard(NamedTuple):
    """What was written of a shard.

    `spec` is the FeatureSpec of the arrays as JSON and `file` the name of the Parquet file, both "" where the shard has
    no batch; `weighted` says whether the rows have a sample weight (column `sample_weight`).
    """

    spec: str
    rows: int
    weighted: bool
    file: str


def write_shard(
    creator: DataCreator,
    config: dict[str, Any],
    batch_size: int,
    *,
    shard: int,
    num_shards: int,
    location: str,
    feature_cols: Sequence[str] | None = None,
    label_cols: Sequence[str] | None = None,
    max_batches: int | None = None,
    label_kinds: LabelKinds | None = None,
) -> Shard:
    """Run a data creator and write this shard's batches as one Parquet file.

    Each call writes a file of its own, so that several attempts of a Spark task do not write to one.

    Args:
        creator: `(config, batch_size)` to a `tf.data.Dataset` or an iterable of `(x, y)` or
            `(x, y, sample_weight)` batches; x and y are an array, a tuple of arrays, or a dict of arrays.
        shard: this shard takes batches `shard`, `shard + num_shards`, and so on.
        location: folder to write to.
        feature_cols, label_cols: names for the arrays of x and y that are not in a dict.
        max_batches: stop after this many batches of the whole data set (for endless ones).
        label_kinds: what labels must be; None decides by the arrays.

    Raises:
        ValueError: a batch has another form than the ones above, or than the batch before.
    """
    filesystem, folder = resolve(location)
    writer: pq.ParquetWriter | None = None
    spec: FeatureSpec | None = None
    rows = 0
    weighted = False
    # By shard first, so that the order of the files, which seeds shuffles, is the same every time.
    name = f"part-{shard:05d}-{uuid.uuid4().hex}.parquet"
    try:
        for features, labels, weight in _batches(
            creator(config, batch_size), shard, num_shards, max_batches, feature_cols, label_cols
        ):
            found = spec_of_arrays(features, labels, label_kinds)
            for label in found.labels:
                check_labels(label.name, labels[label.name], label.kind)
            if spec is None:
                spec = found
                schema = _to_table(features, labels, weight).schema
                writer = pq.ParquetWriter(f"{folder}/{name}", schema, filesystem=filesystem)
                weighted = weight is not None
            elif found != spec:
                raise ValueError(
                    f"All batches must have the same columns and shapes as the first: {spec}. "
                    f"Received: {found}"
                )
            table = _to_table(features, labels, weight)
            if writer is not None:
                writer.write_table(table)
            rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return Shard(spec.model_dump_json(), rows, weighted, name) if spec else Shard("", 0, False, "")


def spec_of_arrays(
    features: Mapping[str, npt.NDArray[Any]],
    labels: Mapping[str, npt.NDArray[Any]],
    label_kinds: LabelKinds | None = None,
) -> FeatureSpec:
    """The spec that says how these arrays enter a model, by their type and rank.

    Integers `[batch]` are categorical ids, `[batch, length]` sequences; floats are dense. Without `label_kinds`
    integer labels are class numbers and others regressions.

    Example:
        >>> spec_of_arrays({"user": np.array([1, 2])}, {}).features[0].kind.value
        'categorical'
    """
    by_type: list[LabelKind] = [
        "multiclass" if array.dtype.kind in "iu" else "regression" for array in labels.values()
    ]
    kinds = by_type if label_kinds is None else label_kinds.of(list(labels))
    return FeatureSpec(
        features=tuple(_feature(name, array) for name, array in features.items()),
        labels=tuple(Label(name=name, kind=kind) for name, kind in zip(labels, kinds, strict=True)),
    )


def _feature(name: str, array: npt.NDArray[Any]) -> Feature:
    if array.ndim not in (1, 2) or array.dtype.kind not in "iufb":
        raise ValueError(
            f"Feature {name!r} must be an array of numbers with one or two axes. "
            f"Received: shape={array.shape}, dtype={array.dtype}"
        )
    if array.dtype.kind in "iu":
        if array.ndim == 1:
            return Feature(name=name, kind=FeatureKind.CATEGORICAL, raw_type="int64")
        return Feature(name=name, kind=FeatureKind.SEQUENCE, raw_type="int64", max_length=array.shape[1])
    width = array.shape[1] if array.ndim == 2 else None
    return Feature(name=name, kind=FeatureKind.DENSE, raw_type="float32", width=width)


def _batches(
    data: Any,
    shard: int,
    num_shards: int,
    max_batches: int | None,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str] | None,
) -> Iterator[tuple[Arrays, Arrays, npt.NDArray[Any] | None]]:
    if hasattr(data, "as_numpy_iterator"):
        data = data.as_numpy_iterator()
    if not isinstance(data, Iterable):
        raise ValueError(
            "A data creator must return a tf.data.Dataset or an iterable of (x, y) batches. "
            f"Received: {type(data).__name__}"
        )
    for element in islice(data, shard, max_batches, num_shards):
        if not isinstance(element, tuple) or not 1 <= len(element) <= 3:
            raise ValueError(
                "Each batch of a data creator must be (x,), (x, y) or (x, y, sample_weight). "
                f"Received: {type(element).__name__}"
            )
        x, y, weight = (*element, None, None)[:3]
        yield (
            _named(x, feature_cols, "x"),
            {} if y is None else _named(y, label_cols, "y"),
            None if weight is None else np.asarray(weight, np.float32),
        )


def _named(value: Any, names: Sequence[str] | None, prefix: str) -> Arrays:
    if isinstance(value, Mapping):
        return {str(name): np.asarray(array) for name, array in value.items()}
    arrays = list(value) if isinstance(value, (tuple, list)) else [value]
    if names is None:
        names = [prefix] if len(arrays) == 1 else [f"{prefix}{index}" for index in range(len(arrays))]
    if len(names) != len(arrays):
        raise ValueError(
            f"A batch has {len(arrays)} arrays in {prefix}, so it needs as many names. Received: {list(names)}"
        )
    return {name: np.asarray(array) for name, array in zip(names, arrays, strict=True)}


def _to_table(features: Arrays, labels: Arrays, weight: npt.NDArray[Any] | None) -> pa.Table:
    columns = {name: _column(array) for name, array in features.items()}
    # A label of shape [batch, 1] is the same number for each sample.
    columns |= {
        name: _column(array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array)
        for name, array in labels.items()
    }
    if weight is not None:
        columns[WEIGHT_COLUMN] = pa.array(weight.reshape(-1))
    return pa.table(columns)


def _column(array: npt.NDArray[Any]) -> pa.Array:
    if array.ndim == 1:
        return pa.array(array)
    offsets = np.arange(len(array) + 1, dtype=np.int64) * array.shape[1]
    return pa.LargeListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(array).reshape(-1)))
