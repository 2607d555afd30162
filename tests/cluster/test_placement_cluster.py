"""Workers that hold the tables, on a real standalone cluster: equal results, moves between placements, kill -9."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lengths import ALL

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
    # Batches are read and prepared two ahead, or each step is done before the next is read: the same model.
    one_by_one = found["one by one"]
    assert separate["checksums"] == one_by_one["checksums"]
    assert separate["history"] == one_by_one["history"]
    assert first["rows"] == separate["rows"] == 2 * ROWS
    assert first["history"]["auc"][-1] > 0.9
    # Each of two nodes wrote its shard of each table, and its part of the dense parameters.
    assert len(first["files"]) == 2 * len(separate["files"])


def test_checkpoints_move_between_placements_and_numbers_of_nodes(
    run_python: RunPython, standalone_cluster: str, tmp_path: Path
) -> None:
    found = run(run_python, standalone_cluster, "moves", tmp_path)
    stayed, moved = found["second"]
    assert found["first"]["rows"] == ROWS
    assert found["evaluated"][0] == found["evaluated"][1]
    # An epoch of two workers beside a server, then one of two nodes with tables, equals two epochs of the former.
    assert moved["checksums"] == stayed["checksums"]
    assert moved["history"] == stayed["history"]
    three, back = found["three"], found["back"]
    assert [three["rows"], back["rows"]] == [ROWS, ROWS]
    assert back["history"]["auc"][-1] >= moved["history"]["auc"][-1] - 0.003


def test_a_node_that_is_killed_starts_all_again_from_the_checkpoint(
    run_python: RunPython, standalone_cluster: str, tmp_path: Path
) -> None:
    found = run(run_python, standalone_cluster, "killed", tmp_path)
    undisturbed, disturbed = found["undisturbed"], found["disturbed"]
    assert disturbed["killed"]
    assert (undisturbed["restarts"], disturbed["restarts"]) == (0, 1)
    assert "incremental" in disturbed["saves"]
    assert disturbed["checksums"] == undisturbed["checksums"]
    assert disturbed["history"] == undisturbed["history"]
    assert disturbed["history"]["val_auc"][-1] > 0.9
    assert (disturbed["rows"], disturbed["steps"]) == (undisturbed["rows"], undisturbed["steps"])


# test_runtime_semi_sync has the same with nodes beside the driver.
@ALL
def test_between_async_and_sync(run_python: RunPython, standalone_cluster: str, tmp_path: Path) -> None:
    found = run(run_python, standalone_cluster, "semi_sync", tmp_path)
    bounded, backup = found["bounded"], found["backup"]
    assert bounded["rows"] == 2 * ROWS
    assert bounded["semi_sync"]["max_lead"] <= 1
    assert bounded["history"]["auc"][-1] > 0.9
    dropped = sum(samples for _, samples in backup["semi_sync"]["dropped_samples"])
    assert dropped > 0
    assert backup["rows"] == 4 * ROWS - dropped
    assert backup["history"]["auc"][-1] > 0.9
