"""The training benchmark: its data, its plot, and one tiny run of this project's own worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.contestants import selected
from benchmarks.peer_process import bar_chart
from benchmarks.peers.protocol import Data
from benchmarks.training_report import overview, ratios
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


def test_ratios_are_named_after_the_peers() -> None:
    rates = {"embedded": 20_000.0, "1+1": 15_000.0, "2+2": 12_000.0, "tfra": 10_000.0, "tfps": 5_000.0}
    assert ratios(rates) == {
        "vs_tfra": 2.0,
        "vs_tfps": 4.0,
        "ps_vs_embedded": 0.75,
        "ps_vs_2_2": 1.25,
        "ps_vs_tfra": 1.5,
        "ps_vs_tfps": 3.0,
    }
    assert ratios({"torch": 1.0, "tfra": 2.0}) == {}


def test_the_overview_has_a_row_for_each_run(tmp_path: Path) -> None:
    for model, batch, rate in (("dlrm", 2048, 3000.0), ("dlrm", 512, 2000.0), ("bags", 512, 1000.0)):
        found = {
            "model": model,
            "batch": batch,
            "samples_per_s": {"torch": rate / 2, "embedded": rate},
            "vs_torch": 2.0,
        }
        (tmp_path / f"training-{model}-{batch}.json").write_text(json.dumps(found))
    overview(tmp_path)
    lines = (tmp_path / "training-results.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| [")]
    assert [row.split("|")[2].strip() for row in rows] == ["512", "2,048", "512"]
    assert rows[0] == "| [dlrm](training-dlrm-512.md) | 512 | 2,000 | 1,000 |"


def test_peers_that_are_unknown_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Received: tensorrec"):
        selected(["embedded", "tensorrec"])
    assert [peer.name for peer in selected(None)][:3] == ["embedded", "1+1", "2+2"]


def run_benchmark(*arguments: str) -> dict[str, Any]:
    short = [
        "--batch",
        "64",
        "--ids",
        "2600",
        "--samples",
        "1024",
        "--seconds",
        "0.2",
        "--rounds",
        "2",
        "--warmup",
        "0.1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", *short, "--no-docs", "--no-calibration", *arguments],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = done.stdout.strip().splitlines()
    result: dict[str, Any] = json.loads(last.removeprefix("RESULT "))
    return result


@pytest.mark.timeout(240)
def test_a_tiny_run_ends_with_its_result() -> None:
    result = run_benchmark("--peers", "embedded,1+1,tfps")
    assert set(result["samples_per_s"]) == {"embedded", "1+1", "tfps"}
    assert min(result["samples_per_s"].values()) > 0
    assert result["ps_vs_tfps"] > 0
    assert (result["model"], result["batch"], result["ids"]) == ("dlrm", 64, 2600)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("model", "peers"), [("wdl", "keras"), ("deepfm", "embedded"), ("bags", "embedded,tfps")]
)
def test_every_model_is_trained_by_processes_that_start_anew(model: str, peers: str) -> None:
    result = run_benchmark("--model", model, "--peers", peers, "--fresh", "--rounds", "1")
    assert set(result["samples_per_s"]) == set(peers.split(","))
    assert min(result["samples_per_s"].values()) > 0
