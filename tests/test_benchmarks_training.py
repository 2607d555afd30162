"""The training benchmark: its data, its plot, and one tiny run of this project's own worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peer_process import bar_chart
from benchmarks.peers.protocol import Data
from benchmarks.workloads import Workload
from tests.conftest import ROOT


def test_data_is_zipf_and_has_a_truth(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    Workload(batch=500, batches=8, ids=26_000).write(path)
    data = Data(str(path))
    assert data.ids.shape == (8, 500, 26)
    assert sum(data.sizes) == 26_000
    column = data.ids[:, :, 3].ravel()
    assert column.min() >= 0
    assert column.max() < 1000
    _, counts = np.unique(column, return_counts=True)
    share = np.sort(counts)[::-1] / len(column)
    # Zipf with exponent 1.1 over 1000 ids: the first has 1 / sum(k^-1.1), the second 2^-1.1 of that.
    first = 1 / (np.arange(1, 1001) ** -1.1).sum()
    assert share[:2] == pytest.approx([first, first * 2**-1.1], rel=0.12)
    assert 0.3 < data.label.mean() < 0.7


def test_the_plot_is_well_formed() -> None:
    root = ET.fromstring(
        bar_chart({"embedded": 20_000.0, "keras": 5_000.0}, "DLRM", unit="samples/s", ours=["embedded"])
    )
    _, *rects = root.iter("{http://www.w3.org/2000/svg}rect")
    bars = [float(rect.attrib["width"]) for rect in rects]
    assert bars[0] == pytest.approx(4 * bars[1])


@pytest.mark.timeout(240)
def test_a_tiny_run_ends_with_its_result() -> None:
    arguments = [
        "--batch",
        "64",
        "--ids",
        "2600",
        "--steps",
        "2",
        "--rounds",
        "2",
        "--warmup",
        "1",
        "--peers",
        "embedded",
        "--no-docs",
        "--no-calibration",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", *arguments],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.strip().splitlines()
    result = json.loads(last.removeprefix("RESULT "))
    assert result["samples_per_s"]["embedded"] > 0
    assert (result["model"], result["batch"], result["ids"]) == ("dlrm", 64, 2600)
