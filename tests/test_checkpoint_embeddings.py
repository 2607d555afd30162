"""Tables of checkpoints, read by Spark through the product, and by pandas and DuckDB without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import numpy as np
import pandas as pd
import pytest

from deeprec_spark import checkpoint
from deeprec_spark.checkpoint.embeddings import table_rows
from tests import checkpoints

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_spark_reads_a_table_over_a_full_checkpoint_and_deltas(spark: SparkSession, tmp_path: Path) -> None:
    store, directories = checkpoints.write_chain(tmp_path)
    frame = checkpoint.read_embeddings(spark, str(tmp_path), "a/b c")
    assert dict(frame.dtypes) == {
        "key": "bigint",
        "values": "array<float>",
        "frequency": "bigint",
        "version": "bigint",
    }
    rows = {row["key"]: row for row in frame.collect()}
    [*blocks] = store.table("a/b c").export()
    keys = np.concatenate([block.key for block in blocks])
    assert sorted(rows) == sorted(keys.tolist())
    for block in blocks:
        for index, key in enumerate(block.key.tolist()):
            row = rows[key]
            assert row["values"] == block.value[index].tolist()
            assert (row["frequency"], row["version"]) == (block.frequency[index], block.version[index])
    # The same of the state before, and without Spark.
    before = checkpoint.read_embeddings(spark, directories[0], "a/b c").count()
    assert before == sum(len(batch) for batch in table_rows(directories[0], "a/b c")) != len(keys)
    with pytest.raises(checkpoint.CheckpointMismatchError, match="table='nobody'"):
        checkpoint.read_embeddings(spark, str(tmp_path), "nobody")


def test_a_table_without_rows_is_an_empty_frame(spark: SparkSession, tmp_path: Path) -> None:
    checkpoints.save(checkpoints.new_store(), tmp_path, 1)
    assert checkpoint.read_embeddings(spark, str(tmp_path), "bloom").collect() == []


def test_pandas_and_duckdb_read_the_files_of_a_full_checkpoint(tmp_path: Path) -> None:
    """Plain Parquet: no code of this project is needed. DuckDB stands for the SQL engines that read it."""
    store, [full] = checkpoints.write_chain(tmp_path, deltas=0)
    [block] = store.table("bloom").export()
    order = np.argsort(block.key)
    frame = pd.concat(
        [pd.read_parquet(path) for path in sorted(Path(full, "tables", "bloom").glob("part-*.parquet"))]
    ).sort_values("key")
    np.testing.assert_array_equal(frame["key"], block.key[order])
    np.testing.assert_array_equal(np.stack(list(frame["value"])), block.value[order])
    files = str(Path(full, "tables", "bloom", "part-*.parquet"))
    query = f"select key, value, frequency, version from read_parquet('{files}') order by key"
    with duckdb.connect() as connection:
        found = connection.execute(query).fetchall()
        [(norm,)] = connection.execute(
            f"select sum(list_dot_product(value, value)) from read_parquet('{files}')"
        ).fetchall()
    assert [row[0] for row in found] == block.key[order].tolist()
    np.testing.assert_array_equal(np.array([row[1] for row in found], np.float32), block.value[order])
    assert [row[2] for row in found] == block.frequency[order].tolist()
    assert norm == pytest.approx(float((block.value.astype(np.float64) ** 2).sum()), rel=1e-5)
