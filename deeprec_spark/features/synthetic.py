"""Generate Criteo-like data with a planted truth on Spark, of any size, in Criteo's own format."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType

from deeprec_spark.features import planted
from deeprec_spark.features.criteo import CATEGORY_COLUMNS, INTEGER_COLUMNS, LABEL
from deeprec_spark.features.output import write_text
from deeprec_spark.features.planted import criteo_like_batches, exact_auc
from deeprec_spark.features.prepare import DataError, quoted

logger = logging.getLogger(__name__)

PROBABILITY = "probability"
TRUTH_FILE = "truth.json"

__all__ = [
    "PROBABILITY",
    "criteo_like_batches",
    "exact_auc",
    "generate_criteo",
    "planted_auc",
]


def generate_criteo(
    spark: SparkSession,
    rows: int,
    seed: int = 0,
    out: str | None = None,
    *,
    data_format: Literal["parquet", "tsv"] = "parquet",
    first_row: int = 0,
    partitions: int | None = None,
) -> DataFrame:
    """Criteo-like rows: `label`, `I1` to `I13`, `C1` to `C26`, and `probability`, the planted truth.

    With `out` they are written: `<out>/data` as Parquet, or as Criteo's tab-separated lines, which have no room
    for the probability; `<out>/truth` (Parquet) has label and probability of each row in any case, and
    `<out>/truth.json` rows, seed and the best possible AUC.

    Args:
        spark: the session.
        rows: how many.
        seed: equal seeds give equal rows, whatever the partitions, and row i does not depend on `rows`.
        out: a folder, local or of any file system that Spark knows; overwritten. None writes nothing.
        data_format: of `<out>/data`.
        first_row: number of the first row; further data of the same truth begins where the last ended.
        partitions: of the result, so files of `<out>/data`; None is Spark's default parallelism.

    Returns:
        The rows: lazy without `out`, read back from `<out>/data` (Parquet) with it.

    Raises:
        DataError: rows or data_format make no sense.

    Example:
        >>> clicks = generate_criteo(spark, 200_000, seed=1)
        >>> spec = prepare_criteo(spark, clicks, "prepared", keep=["probability"])
        >>> planted_auc(spark, "prepared/test")  # the best that a model can expect
        0.83
    """
    if rows < 1:
        raise DataError(f"rows must be at least 1. Received: rows={rows}")
    if data_format not in ("parquet", "tsv"):
        raise DataError(f"data_format must be 'parquet' or 'tsv'. Received: data_format={data_format!r}")
    schema = StructType(
        [
            StructField(LABEL, LongType(), False),
            *[StructField(name, LongType()) for name in INTEGER_COLUMNS],
            *[StructField(name, StringType()) for name in CATEGORY_COLUMNS],
            StructField(PROBABILITY, DoubleType(), False),
        ]
    )
    numbers = spark.range(first_row, first_row + rows, numPartitions=partitions)
    frame = numbers.mapInArrow(partial(_generate, seed), schema)
    if out is None:
        return frame
    if data_format == "parquet":
        frame.write.mode("overwrite").parquet(f"{out}/data")
    else:
        frame.drop(PROBABILITY).write.mode("overwrite").csv(f"{out}/data", sep="\t", nullValue="")
    frame.select(LABEL, PROBABILITY).write.mode("overwrite").parquet(f"{out}/truth")
    best = planted_auc(spark, f"{out}/truth")
    write_text(f"{out}/{TRUTH_FILE}", json.dumps({"rows": rows, "seed": seed, "best_auc": best}) + "\n")
    logger.info("Generated %d rows: the best possible AUC is %.4f", rows, best)
    return spark.read.parquet(f"{out}/data") if data_format == "parquet" else frame


def planted_auc(spark: SparkSession, path: str, label: str = LABEL) -> float:
    """The AUC of the planted probabilities on this data: the best that any model can expect.

    Args:
        spark: the session.
        path: Parquet with the columns `label` and `probability`, such as `<out>/test` prepared with
            `keep=["probability"]`.
        label: the label's column.

    Raises:
        DataError: there is no column `probability`.
    """
    frame = spark.read.parquet(path)
    if PROBABILITY not in frame.columns:
        raise DataError(
            f"{path!r} has no column {PROBABILITY!r}: prepare it with keep=[{PROBABILITY!r}]. "
            f"Received: columns {frame.columns}"
        )
    pairs = frame.select(quoted(label).cast("double"), PROBABILITY).toPandas()
    return exact_auc(pairs.iloc[:, 0].to_numpy(), pairs.iloc[:, 1].to_numpy())


def _generate(seed: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        numbers = batch.column(0).to_numpy()
        data = planted.planted_rows(numbers, seed)
        columns = {LABEL: pa.array(data.label.astype(np.int64))}
        for index, name in enumerate(INTEGER_COLUMNS):
            counts = data.dense[:, index]
            missing = np.isnan(counts)
            columns[name] = pa.array(np.where(missing, 0, counts).astype(np.int64), mask=missing)
        for index, name in enumerate(CATEGORY_COLUMNS):
            columns[name] = _hexadecimal(data.ranks[:, index], index, seed)
        columns[PROBABILITY] = pa.array(data.probability)
        yield pa.record_batch(columns)


def _hexadecimal(ranks: planted.Int64Array, column: int, seed: int) -> pa.StringArray:
    """Ids as Criteo writes them: 8 hexadecimal digits, null where missing."""
    vocabulary = planted.id_codes(np.arange(planted.CARDINALITIES[column]), column, seed)
    texts = pa.array([f"{code:08x}" for code in vocabulary.tolist()])
    return pc.take(texts, pa.array(ranks, mask=ranks < 0))
