"""`make demo-cluster`: spark-submit of the jobs on a real standalone cluster, one parameter server and two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lengths import ALL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


def run_demo(*arguments: str, timeout: float = 1100) -> tuple[dict[str, Any], str]:
    """The RESULT of a demo and all that it printed."""
    command = [str(Path(sys.executable).parent / "deeprec-spark"), "demo", *arguments]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYSPARK")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT {")
    return json.loads(last.removeprefix("RESULT ")), done.stdout


# Synchronous jobs on a cluster are tested in test_estimator_cluster; here it is the same demo a second time.
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=ALL)])
def test_movielens_on_a_standalone_cluster(mode: str, test_data: Path, tmp_path: Path) -> None:
    result, output = run_demo(
        "--cluster", "--mode", mode, "--data", str(test_data / "ml-100k"), "--out", str(tmp_path / "out")
    )
    assert result["mode"] == mode
    assert result["rows"] == 100_000
    assert result["auc"] >= 0.775
    assert result["samples_per_s"] > 0
    assert (Path(result["model"]) / "saved_model.pb").is_file()
    answer = _ask(output)
    assert 0 < answer["prediction"] < 1
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(tmp_path) in word for word in process.info["cmdline"] or [])
    ]


def _ask(output: str) -> dict[str, Any]:
    """Run the command that the demo prints."""
    (command,) = (line.split() for line in output.splitlines() if " query --model " in line)
    command[0] = str(Path(sys.executable).parent / "deeprec-spark")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
