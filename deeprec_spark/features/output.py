"""What the pipelines share: malformed rows, and the folder that they write."""

from __future__ import annotations

import logging

from pyarrow import fs
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses

from deeprec_spark.data import ParquetDataset
from deeprec_spark.embedding.filesystem import resolve
from deeprec_spark.features.group_sizes import warn_of_small_groups
from deeprec_spark.features.groups import group_rows
from deeprec_spark.features.prepare import DataError, PrepareReport
from deeprec_spark.features.spec import FeatureSpec

logger = logging.getLogger(__name__)

MALFORMED = "__malformed__"  # the column that holds a malformed row's text, null for a good row
SPEC_FILE = "feature_spec.json"
REPORT_FILE = "report.json"

__all__ = ["MalformedDataError", "check_fraction", "check_malformed", "write_splits", "write_text"]


class MalformedDataError(DataError):
    """More malformed rows than allowed."""


def check_fraction(test_fraction: float) -> None:
    """Raise a DataError unless some rows are left to train on."""
    if not 0 <= test_fraction < 1:
        raise DataError(f"test_fraction must be in [0, 1). Received: test_fraction={test_fraction}")


def check_malformed(parsed: DataFrame, limit: float, what: str) -> int:
    """Count the malformed rows, log the count with examples, and raise if their share is above `limit`.

    Raises:
        MalformedDataError: the share is above `limit`, or no row is good.
    """
    malformed = F.col(MALFORMED)
    total, bad = parsed.agg(F.count(F.lit(1)), F.count(malformed)).collect()[0]
    if not bad:
        return 0
    examples = [
        row[0][:120] for row in parsed.where(malformed.isNotNull()).select(malformed).limit(3).collect()
    ]
    if bad > limit * total or bad == total:
        raise MalformedDataError(
            f"Too many malformed {what}: at most {limit:.2%} are left out (max_malformed). Is it the right file? "
            f"Received: {bad} of {total}, such as {examples}"
        )
    logger.warning("%d of %d %s are malformed and left out, such as %s", bad, total, what, examples)
    return int(bad)


def write_splits(
    prepared: DataFrame, is_test: str, out: str, spec: FeatureSpec, report: PrepareReport
) -> None:
    """Write `<out>/train` and `<out>/test` by the boolean column `is_test`, then the spec and the report.

    Flat rows become groups where the spec has a grouping; a group's samples of either split stay together. Groups of
    fewer than two samples on average are a warning.

    The spec comes last: a folder that has it is complete.
    """
    filesystem, folder = resolve(out)
    spec_path = f"{folder}/{SPEC_FILE}"
    if filesystem.get_file_info(spec_path).type is not fs.FileType.NotFound:
        filesystem.delete_file(spec_path)
    test: Column = F.col(is_test)
    for name, condition in (("train", ~test), ("test", test)):
        rows = prepared.where(condition).drop(is_test)
        stored = rows if spec.grouping is None else group_rows(rows, spec)
        stored.write.mode("overwrite").parquet(f"{out}/{name}")
        if spec.grouping is not None and spec.sample_column is not None:
            found = ParquetDataset.scan(f"{out}/{name}", spec.sample_column)
            warn_of_small_groups(rows, spec, found.num_samples, found.num_rows)
    write_text(f"{out}/{REPORT_FILE}", report.to_json())
    write_text(f"{out}/{SPEC_FILE}", spec.model_dump_json(indent=2) + "\n")


def write_text(location: str, text: str) -> None:
    """Write a small text file to a path or URI."""
    filesystem, path = resolve(location)
    with filesystem.open_output_stream(path) as stream:
        stream.write(text.encode())
