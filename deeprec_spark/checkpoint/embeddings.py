"""A table of a checkpoint as a Spark DataFrame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from deeprec_spark.checkpoint.chains import load_chain, table_chain
from deeprec_spark.embedding.hashing import NUM_BUCKETS
from deeprec_spark.embedding.table_chain import TableChain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ("key", "value", "frequency", "version")
_SCHEMA = "key long, values array<float>, frequency long, version long"
_ROWS_OF_A_TASK = 250_000
_FEWEST_TASKS = 8


def read_embeddings(spark: SparkSession, path: str, table: str) -> DataFrame:
    """The rows of one table, as they are after the incremental checkpoints too: key, values, frequency, version.

    Executors read the files, each task a range of hash buckets, so nothing is shuffled and nothing passes through the
    driver. `version` is the step of the row's last update, -1 where there was none; keys that a filter is only
    counting have no row.

    Args:
        spark: a session, plain or of Spark Connect.
        path: the checkpoint, or a model directory, whose newest one is taken; driver and executors must reach it.
        table: the table's name.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: see `checkpoint.chain`; sizes are checked here.
        CheckpointMismatchError: there is no such table; names those that are.

    Example:
        >>> read_embeddings(spark, "/models/ctr", "item").orderBy("frequency").show()  # doctest: +SKIP
    """
    found = load_chain(path)
    found[-1][1].table(table)
    places = [(directory, [file.path for file in manifest.files_of(table)]) for directory, manifest in found]
    rows = sum(
        file.rows
        for _, manifest in found
        for file in manifest.files_of(table)
        if file.path.rpartition("/")[2].startswith("part-")
    )
    tasks = min(NUM_BUCKETS, max(_FEWEST_TASKS, -(-rows // _ROWS_OF_A_TASK)))
    spans = spark.range(tasks, numPartitions=tasks)
    return spans.mapInArrow(_reader(places, table, tasks), _SCHEMA)


def _reader(
    places: list[tuple[str, list[str]]], table: str, tasks: int
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    directories, files = [place for place, _ in places], [names for _, names in places]

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                first, last = (NUM_BUCKETS * number // tasks for number in (task, task + 1))
                for rows in TableChain(directories, table, files).rows(first, last, COLUMNS):
                    yield _plain(rows)

    return read


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of rows with the columns and types that Spark takes."""
    values: Any = batch.column("value")
    offsets = np.arange(len(batch) + 1, dtype=np.int32) * values.type.list_size
    return pa.RecordBatch.from_arrays(
        [
            batch.column("key"),
            pa.ListArray.from_arrays(pa.array(offsets), values.flatten()),
            batch.column("frequency"),
            batch.column("version"),
        ],
        names=["key", "values", "frequency", "version"],
    )


def table_rows(path: str, table: str) -> Iterator[pa.RecordBatch]:
    """The same rows in this process, without Spark, a part at a time and verified first."""
    for batch in table_chain(load_chain(path, verify=True), table).rows(columns=COLUMNS):
        yield _plain(batch)
