"""Memory at the size of real tables: what the system says, not the engine's own count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import RunPython

ROWS = 10_000_000
DIM = 16
IDEAL = 8 + 4 * DIM + 4 * DIM + 16  # key, value, Adagrad's accumulator, and 16 bytes

SCRIPT = """
import json, sys
import numpy as np
from deeprec_spark.embedding.optimizers import Adagrad
from deeprec_spark.embedding.variable import EmbeddingVariable

ROWS, DIM, BATCH = int(sys.argv[1]), int(sys.argv[2]), 100_000


def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def train(table, start, step):
    keys = np.arange(start, start + BATCH)
    table.lookup(keys, train=True)
    if step % 10 == 0:
        table.apply_gradients(keys, gradients, step=step + 1)


gradients = np.ones((BATCH, DIM), np.float32)
train(EmbeddingVariable("warm-up", DIM, optimizer=Adagrad()), 0, 0)  # code, threads, buffers of batches
before = memory("VmRSS")
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # the peak starts here
table = EmbeddingVariable("t", DIM, optimizer=Adagrad())
for step, start in enumerate(range(0, ROWS, BATCH)):
    train(table, start, step)
print(json.dumps({
    "rows": len(table),
    "resident": memory("VmRSS") - before,
    "peak": memory("VmHWM") - before,
    "own": table.stats()["bytes"],
}))
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory"
)
def test_ten_million_rows_stay_near_what_they_hold(run_python: RunPython) -> None:
    seen = json.loads(run_python(SCRIPT, str(ROWS), str(DIM)).stdout)
    assert seen["rows"] == ROWS
    assert seen["resident"] <= 1.25 * ROWS * IDEAL
    assert seen["peak"] <= 1.5 * ROWS * IDEAL
    # And the engine's own count is no more than the truth, nor much less.
    assert 0.85 * seen["resident"] <= seen["own"] <= 1.05 * seen["resident"]
