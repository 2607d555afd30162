"""One tiny run of the checkpoint benchmark."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.timeout(240)
def test_a_tiny_run_ends_with_its_result() -> None:
    nodes = ["--nodes", "1+1", "--modes", "async", "--node-saves", "1"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.checkpoint",
            "--rows",
            "20000",
            "--rounds",
            "1",
            "--no-docs",
            *nodes,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    result = json.loads(last.removeprefix("RESULT "))
    for name in (
        "incremental_bytes_ratio",
        "incremental_time_ratio",
        "pause_ratio",
        "pause_ratio_1_1",
        "save_MBps_vs_disk",
        "restore_MBps_vs_disk",
    ):
        assert result[name] > 0
    assert result["steps_while_saving"] > 0
