"""Workers that hold the tables, on a real standalone cluster: equal results, moves between placements, kill -9."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import RunPython

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# A session on another master needs a JVM of its own, so the driver is a child process.
DRIVER = Path(__file__).resolve().parent.parent / "placement_driver.py"
ROWS = 6000


def run(run_python: RunPython, master: str, scene: str, folder: Path) -> dict[str, Any]:
    done = run_python(DRIVER, master, scene, str(folder), timeout=500)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def test_two_nodes_repeat_bit_for_bit_and_equal_two_workers_beside_a_server(
    run_python: RunPython, standalone_cluster: str, tmp_path: Path
) -> None:
    found = run(run_python, standalone_cluster, "equal", tmp_path)
    first, second, separate = (found[name] for name in ("first", "second", "separate"))
    assert len(first["checksums"]) == 6
    assert first["checksums"] == second["checksums"] == separate["checksums"]
    assert first["history"] == second["history"] == separate["history"]
    assert first["rows"] == separate["rows"] == 2 * ROWS
    assert first["history"]["auc"][-1] > 0.9
    # Each of two nodes wrote its shard of each table, and its part of the dense parameters.
    assert len(first["files"]) == 2 * len(separate["files"])
