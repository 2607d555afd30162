"""Staging: whatever the user hands to the Estimator, as prepared Parquet that workers read."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from deeprec_spark import orca
from deeprec_spark.data import ParquetDataset
from deeprec_spark.data.creator import WEIGHT_COLUMN, DataCreator, write_shard
from deeprec_spark.embedding.filesystem import (
    delete_directory,
    is_local,
    join,
    list_folders,
    redacted,
    resolve,
)
from deeprec_spark.features.groups import is_grouped, ungroup_rows
from deeprec_spark.features.infer import infer_spec, prepare_dataframe
from deeprec_spark.features.labels import LabelKinds
from deeprec_spark.features.prepare import is_prepared, quoted
from deeprec_spark.features.spec import FeatureSpec, Label

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

SPEC_FILE = "feature_spec.json"
_PREFIX = "staging-"
_SHARD_SCHEMA = "spec string, rows long, weighted boolean, file string"
_SPARK_SCHEMES = ("hdfs:", "viewfs:")


@dataclass(frozen=True)
class DataColumns:
    """Which columns of the data are features, labels and sample weight; None lets the spec decide."""

    feature_cols: Sequence[str] | None = None
    label_cols: Sequence[str] | None = None
    sample_weight_col: str | None = None


@dataclass(frozen=True)
class StagedData:
    """Prepared Parquet: its row ranges, its spec, and the name of the weight column if it has one."""

    location: str
    dataset: ParquetDataset
    spec: FeatureSpec
    sample_weight: str | None = None

    @property
    def description(self) -> str:
        """Which columns are trained, in words that tell two choices of the same data apart."""
        weight = f", weight {self.sample_weight}" if self.sample_weight else ""
        return f"{', '.join(self.spec.feature_names)} for {', '.join(self.spec.label_names)}{weight}"


class Staging:
    """Writes data below `root` for as long as the context is open, and removes it afterwards.

    A Parquet path whose columns bear the mark of preparation (`features.prepare.is_prepared`) is read in place; but of
    groups from which only item-level features are wanted, or only group-level ones, flat samples are written. A
    DataFrame, a FeatureTable, SparkXShards or another Parquet path is prepared by Spark; a data creator is run on
    `num_shards` Spark tasks. Nothing passes through the driver. `label_kinds` says how labels are checked where the
    spec does not.
    """

    def __init__(
        self,
        spark: SparkSession,
        root: str,
        *,
        num_shards: int = 1,
        label_kinds: LabelKinds | None = None,
    ) -> None:
        self._spark = spark
        self._label_kinds = label_kinds or LabelKinds()
        self._root = join(root)
        # Host and process say whether the owner still lives, should it be killed before it cleans up.
        owner = f"{_PREFIX}{socket.gethostname()}-{os.getpid()}"
        self._folder = join(self._root, f"{owner}-{uuid.uuid4().hex}")
        self._num_shards = num_shards
        self._written: list[str] = []

    def __enter__(self) -> Staging:
        remove_abandoned(self._root)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._written:
            filesystem, path = resolve(self._folder)
            delete_directory(filesystem, path)

    def stage(
        self,
        data: Any,
        columns: DataColumns,
        *,
        spec: FeatureSpec | None = None,
        config: dict[str, Any] | None = None,
        batch_size: int = 32,
        max_batches: int | None = None,
    ) -> StagedData:
        """Make `data` readable for workers.

        Args:
            data: DataFrame, FeatureTable, SparkXShards, Parquet path, or data creator.
            columns: the roles of the columns.
            spec: how columns are prepared; None reads it beside the data, or infers it from the schema.
            config, batch_size, max_batches: for data creators.

        Raises:
            TypeError: data is none of these.
            ValueError: no rows, or columns that do not fit.
            FileNotFoundError: the path has no Parquet data.
        """
        staged = self._stage(data, columns, spec, config or {}, batch_size, max_batches)
        if not staged.dataset.num_rows:
            raise ValueError(f"The data set has no rows. Received: {_describe(data)}")
        return staged

    def _stage(
        self,
        data: Any,
        columns: DataColumns,
        spec: FeatureSpec | None,
        config: dict[str, Any],
        batch_size: int,
        max_batches: int | None,
    ) -> StagedData:
        if isinstance(data, str):
            dataset = ParquetDataset.scan(data)
            stored = self._spark.read.parquet(data)
            spec = spec or find_spec(data)
            if spec is None or not is_prepared(stored, spec):
                return self._stage_dataframe(stored, columns, spec)
            narrowed = self._with_columns(spec, columns, stored.columns)
            if narrowed.grouping is None and is_grouped(stored):
                # Without a grouping readers would take lists of samples for the values of one.
                return self._stage_dataframe(stored, columns, spec)
            if narrowed.sample_column is not None:
                dataset = ParquetDataset.scan(data, narrowed.sample_column)
            return StagedData(data, dataset, narrowed, columns.sample_weight_col)
        frame = as_dataframe(self._spark, data, columns)
        if frame is not None:
            return self._stage_dataframe(frame, columns, spec)
        if callable(data):
            return self._stage_creator(data, columns, spec, config, batch_size, max_batches)
        raise TypeError(
            "data must be a DataFrame, a FeatureTable, SparkXShards, the path of Parquet data, or a function "
            f"(config, batch_size) that returns batches. Received: {type(data).__name__}"
        )

    def _stage_dataframe(
        self, frame: DataFrame, columns: DataColumns, spec: FeatureSpec | None
    ) -> StagedData:
        weight = columns.sample_weight_col
        if spec is None:
            labels = list(columns.label_cols or [])
            others = [name for name in frame.columns if name not in (*labels, weight)]
            spec = infer_spec(frame, columns.feature_cols or others, labels, label_kind="regression")
            spec = _with_kinds(spec, self._label_kinds)
        else:
            spec = self._with_columns(spec, columns, frame.columns)
        if spec.grouping is None:
            frame = ungroup_rows(frame)
        if weight:
            _check_weights(ungroup_rows(frame), weight)
        prepared = prepare_dataframe(frame, spec, keep=[weight] if weight else [])
        location = self._new_location()
        files = _write_parquet(prepared, location)
        return StagedData(location, ParquetDataset.scan(location, spec.sample_column, files), spec, weight)

    def _stage_creator(
        self,
        creator: DataCreator,
        columns: DataColumns,
        spec: FeatureSpec | None,
        config: dict[str, Any],
        batch_size: int,
        max_batches: int | None,
    ) -> StagedData:
        location = self._new_location()
        filesystem, path = resolve(location)
        filesystem.create_dir(path)
        task = _creator_task(
            creator, columns, config, batch_size, max_batches, self._num_shards, location, self._label_kinds
        )
        shards = self._spark.range(self._num_shards, numPartitions=self._num_shards)
        results = shards.mapInArrow(task, _SHARD_SCHEMA).collect()
        specs = {row["spec"] for row in results if row["spec"]}
        if len(specs) > 1:
            raise ValueError(f"All shards of a data creator must yield the same columns. Received: {specs}")
        if not specs:
            raise ValueError(
                "The data set has no rows: the data creator yielded no batch. Received: " + repr(creator)
            )
        weighted = any(row["weighted"] for row in results)
        return StagedData(
            location,
            ParquetDataset.scan(location, files={row["file"] for row in results}),
            spec or FeatureSpec.model_validate_json(specs.pop()),
            WEIGHT_COLUMN if weighted else None,
        )

    def _with_columns(self, spec: FeatureSpec, columns: DataColumns, found: Sequence[str]) -> FeatureSpec:
        """The spec with the features and labels that the caller names; a ValueError for names it cannot have."""
        features = {feature.name: feature for feature in spec.features}
        names = list(columns.feature_cols or features)
        unknown = [name for name in names if name not in features]
        if unknown:
            raise ValueError(
                f"feature_cols must be features of the spec: {list(features)}. Received: unknown {unknown}"
            )
        labels = spec.labels
        if columns.label_cols is not None:
            known = {label.name: label.kind for label in spec.labels}
            kinds = self._label_kinds.of(columns.label_cols)
            labels = tuple(
                Label(name=name, kind=known.get(name, kind))
                for name, kind in zip(columns.label_cols, kinds, strict=True)
            )
        weight = [columns.sample_weight_col] if columns.sample_weight_col else []
        missing = [name for name in (*names, *(label.name for label in labels), *weight) if name not in found]
        if missing:
            raise ValueError(
                f"The data has no column {missing}: check feature_cols and label_cols. Received: columns {list(found)}"
            )
        return spec.with_columns([features[name] for name in names], labels)

    def _new_location(self) -> str:
        location = join(self._folder, str(len(self._written)))
        self._written.append(location)
        return location


def _write_parquet(frame: DataFrame, location: str) -> set[str] | None:
    """Write a DataFrame as Parquet files, by Spark where it can be sure to know the filesystem.

    Elsewhere (s3, gs, abfs) Spark would need jars and credentials of its own, so its tasks write through pyarrow.

    Returns:
        The names of the files of attempts that Spark counts; None: all that are there.
    """
    if is_local(location) or location.startswith(_SPARK_SCHEMES):
        frame.write.parquet(location)
        return None
    written = frame.mapInArrow(_parquet_writer(location), "name string").collect()
    names = {row["name"] for row in written}
    if not names:
        raise ValueError(f"The data set has no rows. Received: a DataFrame staged in {redacted(location)}")
    return names


def _parquet_writer(location: str) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        # Named by partition first, so that the order of the files, which seeds shuffles, is the same every time.
        context = TaskContext.get()
        name = f"part-{context.partitionId():05d}-{uuid.uuid4().hex}.parquet" if context else ""
        filesystem, folder = resolve(location)
        writer = None
        for batch in batches:
            if writer is None:
                stream = filesystem.open_output_stream(f"{folder}/{name}")
                writer = pq.ParquetWriter(stream, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
            stream.close()
            yield pa.RecordBatch.from_pydict({"name": [name]})

    return write


def remove_abandoned(root: str) -> None:
    """Delete what killed drivers of this host have staged below `root`; what a living process owns stays."""
    filesystem, path = resolve(root)
    prefix = f"{_PREFIX}{socket.gethostname()}-"
    for name in list_folders(filesystem, path):
        owner, _, _ = name.removeprefix(prefix).partition("-")
        if name.startswith(prefix) and owner.isdigit() and not _is_alive(int(owner)):
            logger.info("Deleting what a killed driver had staged: %s/%s", path, name)
            delete_directory(filesystem, f"{path}/{name}")


def as_dataframe(spark: SparkSession, data: Any, columns: DataColumns) -> DataFrame | None:
    """The DataFrame behind a DataFrame, FeatureTable or SparkXShards; None for anything else."""
    if hasattr(data, "mapInArrow"):
        frame: DataFrame = data
        return frame
    # FeatureTable, ours or Friesian's: a wrapper of a DataFrame.
    if hasattr(getattr(data, "df", None), "mapInArrow"):
        wrapped: DataFrame = data.df
        return wrapped
    if orca.is_xshards(data):
        return orca.xshards_to_dataframe(spark, data, columns.feature_cols or (), columns.label_cols or ())
    return None


def find_spec(location: str) -> FeatureSpec | None:
    """The spec that the feature pipeline wrote in a data folder, or beside it."""
    filesystem, path = resolve(location)
    for folder in (path, path.rstrip("/").rpartition("/")[0]):
        candidate = f"{folder}/{SPEC_FILE}"
        if filesystem.get_file_info(candidate).type == fs.FileType.File:
            with filesystem.open_input_stream(candidate) as stream:
                return FeatureSpec.model_validate_json(stream.read())
    return None


def _creator_task(
    creator: DataCreator,
    columns: DataColumns,
    config: dict[str, Any],
    batch_size: int,
    max_batches: int | None,
    num_shards: int,
    location: str,
    label_kinds: LabelKinds,
) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for shard in batch.column(0).to_pylist():
                written = write_shard(
                    creator,
                    config,
                    batch_size,
                    shard=shard,
                    num_shards=num_shards,
                    location=location,
                    feature_cols=columns.feature_cols,
                    label_cols=columns.label_cols,
                    max_batches=max_batches,
                    label_kinds=label_kinds,
                )
                yield pa.RecordBatch.from_pylist([written._asdict()])

    return run


def _describe(data: Any) -> str:
    return repr(data) if isinstance(data, str) else type(data).__name__


def _with_kinds(spec: FeatureSpec, kinds: LabelKinds) -> FeatureSpec:
    labels = zip(spec.label_names, kinds.of(spec.label_names), strict=True)
    return spec.model_copy(update={"labels": tuple(Label(name=name, kind=kind) for name, kind in labels)})


def _check_weights(frame: DataFrame, name: str) -> None:
    """See that every sample weight is a finite number of at least 0; a ValueError counts the others."""
    from pyspark.sql import functions

    if name not in frame.columns:
        raise ValueError(
            f"The data has no column {name!r}: check sample_weight_col. Received: columns {frame.columns}"
        )
    weight = quoted(name).cast("double")
    valid = weight.isNotNull() & ~functions.isnan(weight) & (weight >= 0) & (weight < float("inf"))
    wrong = frame.where(~functions.coalesce(valid, functions.lit(False))).count()
    if wrong:
        raise ValueError(
            f"Sample weights of column {name!r} must be finite numbers of at least 0: fill or drop the others. "
            f"Received: {wrong} rows that are not"
        )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
