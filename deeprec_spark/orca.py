"""The only room that imports bigdl.orca: context, XShards, and the base class of Orca's estimators.

Everything here works without BigDL too (on Spark 4, say): `attach` then refuses, nothing is an XShards,
and estimators stand under `object`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

logger = logging.getLogger(__name__)

# One class of each jar that Python calls into.
_CLASSES = (
    "com.intel.analytics.bigdl.dllib.common.PythonZoo",
    "com.intel.analytics.bigdl.dllib.feature.python.PythonImageFeature",
    "com.intel.analytics.bigdl.orca.python.PythonOrca",
    "com.intel.analytics.bigdl.friesian.python.PythonFriesian",
)
_ENGINE_LOGGER = "com.intel.analytics.bigdl"
_ROWS_PER_BATCH = 65_536
_lock = threading.Lock()

__all__ = [
    "OrcaError",
    "attach",
    "dataframe_to_xshards",
    "estimator_base",
    "installed",
    "is_xshards",
    "missing_classes",
    "xshards_to_dataframe",
]


class OrcaError(RuntimeError):
    """Orca cannot be used; the message says why, and what to do."""


def installed() -> bool:
    """Whether bigdl.orca can be imported."""
    return (
        importlib.util.find_spec("bigdl") is not None and importlib.util.find_spec("bigdl.orca") is not None
    )


def import_bigdl(name: str) -> ModuleType:
    """Import a module of BigDL without the warnings of its old sources.

    Raises:
        OrcaError: BigDL is not installed, or does not import here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise OrcaError(f"{name} cannot be imported. Received: {error}") from error


def missing_classes(spark: SparkSession) -> list[str]:
    """The classes of BigDL that the driver's JVM cannot load; empty where its jars are there."""
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()  # type: ignore[union-attr]
    return [name for name in _CLASSES if not _loads(loader, name)]


def _loads(loader: Any, name: str) -> bool:
    try:
        loader.loadClass(name)
    except Py4JJavaError as error:
        if "ClassNotFoundException" not in str(error.java_exception):
            raise
        return False
    return True


def attach(spark: SparkSession) -> None:
    """Attach Orca's context to the session's SparkContext; a second call does nothing.

    BigDL's own way is kept from what harms: no PYTHONHOME (it kills the Python workers of a virtual
    environment), no log file in the working directory, no change of Spark's log level, no stop at exit.
    Python gateways in the executors are not started: nothing here needs them.

    Raises:
        OrcaError: BigDL refuses, for example with dynamic allocation.
    """
    with _lock:
        context = spark.sparkContext
        if getattr(context, "_deeprec_orca", False):
            return
        common = import_bigdl("bigdl.orca.common")
        nncontext = import_bigdl("bigdl.dllib.nncontext")
        said = io.StringIO()
        try:
            with (
                warnings.catch_warnings(),
                contextlib.redirect_stdout(said),
                _replaced(nncontext, "set_python_home", lambda: None),
                _replaced(nncontext, "redire_spark_logs", lambda *args, **kwargs: None),
                _replaced(nncontext, "show_bigdl_info_logs", lambda *args, **kwargs: None),
                _replaced(context, "setLogLevel", lambda level: None),
                _quiet_engine(context._jvm),
            ):
                warnings.simplefilter("ignore")
                common.init_orca_context(cluster_mode="spark-submit", cores=1, init_executor_gateway=False)
        except (
            Exception
        ) as error:  # BigDL raises what it likes: RuntimeError, Py4JJavaError, SystemExit's kin
            raise OrcaError(
                f"BigDL's context could not be attached ({type(error).__name__}). Dynamic allocation must be off, "
                f"or spark.dynamicAllocation.minExecutors equal maxExecutors. Received: {_first_line(error)}"
            ) from error
        finally:
            atexit.unregister(common.stop_orca_context)
        context._deeprec_orca = True  # type: ignore[attr-defined]  # ends with the context, as it must
        logger.debug("Orca's context is attached: %s", said.getvalue().strip())


def estimator_base() -> type[Any]:
    """Orca's `SparkTFEstimator` where BigDL is installed, else `object`: what our estimator stands under.

    Only the type is Orca's: `isinstance` holds, and nothing of its training path is used.
    """
    if not installed():
        return object
    try:
        module = import_bigdl("bigdl.orca.learn.tf2.pyspark_estimator")
    except OrcaError as error:
        logger.info("The Estimator does not stand under Orca's base class. %s", error)
        return object
    base: type[Any] = module.SparkTFEstimator
    return base


def is_xshards(data: object) -> bool:
    """Whether data is a SparkXShards; does not import BigDL for it."""
    module = sys.modules.get("bigdl.orca.data.shard") or sys.modules.get("bigdl.orca.data")
    kind = getattr(module, "SparkXShards", None)
    return kind is not None and isinstance(data, kind)


def xshards_to_dataframe(
    spark: SparkSession, shards: Any, feature_cols: Sequence[str] = (), label_cols: Sequence[str] = ()
) -> DataFrame:
    """SparkXShards to a DataFrame, on the executors; the driver sees but the schema.

    Args:
        spark: the session.
        shards: shards of pandas DataFrames, or of Orca's dicts {'x': ..., 'y': ...} where x and y are an array
            `[n]` or `[n, width]`, a list or tuple of such, or a dict of such by name.
        feature_cols: names for the arrays of x; needed unless x is a dict. For pandas, the columns to take.
        label_cols: the same for y.

    Raises:
        OrcaError: the shards hold something else, or names and arrays differ in number.

    Note:
        A shard comes as Arrow, so that rows do not pass Python one by one. With pandas shards that Orca read
        by Spark (`bigdl.orca.data.pandas.read_csv`, its default) BigDL fails by itself on Spark 3.5: set
        `OrcaContext.pandas_read_backend = "pandas"` first.
    """
    to_ipc = partial(_shard_to_ipc, features=tuple(feature_cols), labels=tuple(label_cols))
    batches = shards.rdd.flatMap(to_ipc)
    first = batches.map(_ipc_schema).take(1)
    if not first:
        raise OrcaError("The XShards hold no rows. Received: no shard with rows")
    schema = pa.ipc.read_schema(pa.py_buffer(first[0]))
    packed = spark.createDataFrame(batches.map(lambda data: (bytearray(data),)), "batch binary")
    return packed.mapInArrow(_unpack, from_arrow_schema(schema))


def dataframe_to_xshards(df: DataFrame, feature_cols: Sequence[str], label_cols: Sequence[str] = ()) -> Any:
    """A DataFrame as SparkXShards of dicts {'x': {column: array}, 'y': {column: array}}, on the executors.

    Raises:
        OrcaError: BigDL is not installed.
    """
    shard = import_bigdl("bigdl.orca.data.shard")
    columns = [*feature_cols, *label_cols]
    packed = df.select(*columns).mapInArrow(_pack, "batch binary")
    to_shard = partial(_ipc_to_shard, features=tuple(feature_cols), labels=tuple(label_cols))
    return shard.SparkXShards.lazy(packed.rdd.map(lambda row: to_shard(row[0])))


def _shard_to_ipc(shard: Any, features: tuple[str, ...], labels: tuple[str, ...]) -> Iterator[bytes]:
    """One shard as Arrow IPC streams of at most `_ROWS_PER_BATCH` rows."""
    if isinstance(shard, pd.DataFrame):
        chosen = shard[[*features, *labels]] if features else shard
        table = pa.Table.from_pandas(chosen, preserve_index=False)
    elif isinstance(shard, Mapping) and "x" in shard:
        columns = _named(shard["x"], features, "x", "feature_cols")
        if shard.get("y") is not None:
            columns.update(_named(shard["y"], labels, "y", "label_cols"))
        table = pa.table({name: _to_arrow(array, name) for name, array in columns.items()})
    else:
        kind = f"dict with keys {sorted(shard)}" if isinstance(shard, Mapping) else type(shard).__name__
        raise OrcaError(
            f"Shards must be pandas DataFrames, or dicts with 'x' (and 'y') of numpy arrays. Received: {kind}"
        )
    for batch in table.combine_chunks().to_batches(max_chunksize=_ROWS_PER_BATCH):
        if batch.num_rows:
            yield _ipc(batch)


def _named(value: Any, names: tuple[str, ...], part: str, argument: str) -> dict[str, npt.NDArray[Any]]:
    if isinstance(value, Mapping):
        chosen = names or tuple(value)
        if missing := [name for name in chosen if name not in value]:
            raise OrcaError(
                f"{part!r} of a shard lacks {missing}: check {argument}. Received: {sorted(value)}"
            )
        return {name: np.asarray(value[name]) for name in chosen}
    arrays = (
        [np.asarray(array) for array in value] if isinstance(value, list | tuple) else [np.asarray(value)]
    )
    if len(arrays) == 1 and arrays[0].ndim == 2 and len(names) == arrays[0].shape[1] > 1:
        arrays = list(arrays[0].T)  # one matrix, a name for each of its columns
    if len(arrays) != len(names):
        raise OrcaError(
            f"{argument} must name the arrays of {part!r} in a shard. "
            f"Received: {len(arrays)} arrays, {argument}={list(names)}"
        )
    return dict(zip(names, arrays, strict=True))


def _to_arrow(array: npt.NDArray[Any], name: str) -> pa.Array:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 1:
        return pa.array(array)
    if array.ndim != 2:
        raise OrcaError(f"Array {name!r} of a shard must have one or two axes. Received: shape {array.shape}")
    offsets = np.arange(len(array) + 1, dtype=np.int32) * array.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(array).reshape(-1)))


def _ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _ipc_schema(data: bytes) -> bytes:
    return bytes(pa.ipc.open_stream(data).schema.serialize())


def _unpack(packed: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in packed:
        for data in batch.column(0):
            yield from pa.ipc.open_stream(data.as_buffer())


def _pack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch({"batch": pa.array([_ipc(batch)], type=pa.binary())})


def _ipc_to_shard(
    data: bytes, features: tuple[str, ...], labels: tuple[str, ...]
) -> dict[str, dict[str, npt.NDArray[Any]]]:
    table = pa.ipc.open_stream(bytes(data)).read_all()

    def arrays(names: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
        return {name: _to_numpy(table.column(name).combine_chunks()) for name in names}

    return {"x": arrays(features), "y": arrays(labels)} if labels else {"x": arrays(features)}


def _to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """`[n]`, or `[n, width]` where all lists have one width."""
    if isinstance(array, pa.ListArray) and len(array) and not array.null_count:
        widths = np.diff(np.asarray(array.offsets))
        if widths[0] and (widths == widths[0]).all():
            return np.asarray(array.flatten().to_numpy(zero_copy_only=False)).reshape(len(array), widths[0])
    return np.asarray(array.to_numpy(zero_copy_only=False))


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _quiet_engine(jvm: Any) -> Iterator[None]:
    """Keep BigDL's engine from warning of settings for its own training, and its pickler from writing to stdout."""
    level = jvm.org.apache.logging.log4j.Level
    configurator = jvm.org.apache.logging.log4j.core.config.Configurator
    stdout = jvm.java.lang.System.out
    nowhere = jvm.java.io.PrintStream(jvm.java.io.OutputStream.nullOutputStream())
    configurator.setLevel(_ENGINE_LOGGER, level.ERROR)
    jvm.java.lang.System.setOut(nowhere)
    try:
        yield
    finally:
        jvm.java.lang.System.setOut(stdout)
        configurator.setLevel(_ENGINE_LOGGER, level.INFO)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
