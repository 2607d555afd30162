"""Exported tables: every int64 key, defaults, and sizes beyond 2 GiB."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark.export.tables import SortedTable
from tests.checkpoints import EDGES, LIMITS
from tests.conftest import RunPython


def test_any_key_is_found_and_any_other_reads_the_default() -> None:
    random = np.random.default_rng(0)
    keys = np.unique(np.concatenate([EDGES, random.integers(LIMITS.min, LIMITS.max, 1000)]))
    values = random.normal(size=(len(keys), 3)).astype(np.float32)
    known, unknown = keys[::2], keys[1::2]
    lookup = tf.function(SortedTable("t", known, values[::2], 0.5).lookup)
    np.testing.assert_array_equal(lookup(tf.constant(known[::-1])), values[::2][::-1])
    np.testing.assert_array_equal(lookup(tf.constant(unknown)), np.full((len(unknown), 3), 0.5))
    assert lookup(tf.zeros([0], tf.int64)).shape == (0, 3)


@pytest.mark.parametrize("rows", [0, 1])
def test_tables_of_few_rows(rows: int) -> None:
    table = SortedTable("t", np.array([7])[:rows], np.ones((rows, 2), np.float32), -1.0)
    found = table.lookup(tf.constant([7, LIMITS.max, LIMITS.min], tf.int64))
    assert found.numpy()[:, 0].tolist() == [1.0 if rows else -1.0, -1.0, -1.0]


def test_keys_and_values_must_fit() -> None:
    with pytest.raises(ValueError, match=r"'t' needs one row.*2 and 3"):
        SortedTable("t", np.array([1, 2]), np.ones((3, 2), np.float32))


BIG = """
import resource, sys
import numpy as np, tensorflow as tf
from deeprec_spark.export.tables import SortedTable

rows, dim = 34_000_000, 16
values = np.memmap("values", np.float32, "w+", shape=(rows, dim))
for start in range(0, rows, 1 << 20):
    stop = min(rows, start + (1 << 20))
    values[start:stop] = (np.arange(start, stop) % 1000003)[:, None]
values.flush()
values = np.memmap("values", np.float32, "r", shape=(rows, dim))
assert values.nbytes > 2**31
keys = np.arange(rows, dtype=np.int64) * 5
module = tf.Module()
module.table = SortedTable("big", keys, values)
function = tf.function(lambda ids: {"rows": module.table.lookup(ids)})
spec = tf.TensorSpec([None], tf.int64, name="ids")
tf.saved_model.save(module, "model", signatures=function.get_concrete_function(spec))
del module, function
loaded = tf.saved_model.load("model")
ids = np.concatenate([np.random.default_rng(0).integers(-9, 5 * rows + 9, 10000), keys[-3:]])
found = loaded.signatures["serving_default"](ids=tf.constant(ids))["rows"].numpy()
known = (ids >= 0) & (ids < 5 * rows) & (ids % 5 == 0)
np.testing.assert_array_equal(found, np.where(known, ids // 5 % 1000003, 0)[:, None] * np.ones(dim))
assert 1900 < known.sum() < 2200
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif("DEEPREC_TEST_ALL" not in os.environ, reason="takes 7 GB: run by make test-all")
def test_a_table_beyond_2_gib(run_python: RunPython, tmp_path: Path) -> None:
    try:
        run_python(BIG, timeout=800)
    finally:
        (tmp_path / "values").unlink(missing_ok=True)
