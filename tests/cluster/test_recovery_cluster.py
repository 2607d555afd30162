"""Recovery of whole jobs, proven by counting: each row is trained once an epoch, whoever dies.

On a local master that tries a task again, as a cluster does: what matters here are the processes of driver and nodes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lengths import ALL

pytestmark = pytest.mark.timeout(900)

DRIVER = Path(__file__).resolve().parent.parent / "recovery_driver.py"
ROWS = 20_000
MASTER = "local[3,4]"


def start(master: str, mode: str, victim: str, folder: Path, servers: int = 1) -> subprocess.Popen[str]:
    """A driver of two workers; without servers, they hold the tables."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(DRIVER), master, mode, str(servers), "2", victim, "1", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def run(master: str, mode: str, victim: str, folder: Path, servers: int = 1) -> dict[str, Any]:
    """One driver from its start to its end; what it found."""
    driver = start(master, mode, victim, folder, servers)
    try:
        output, _ = driver.communicate(timeout=280)
    finally:
        end(driver)
    assert "FOUND " in output, output[-4000:]
    found: dict[str, Any] = json.loads(output.split("FOUND ", 1)[1].splitlines()[0])
    return found


def end(driver: subprocess.Popen[str]) -> list[psutil.Process]:
    """kill -9 of the driver and its JVM, both halves at once; what they were."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    driver.wait(30)
    if driver.stdout is not None:
        driver.stdout.close()
    return family


def test_a_synchronous_job_whose_server_was_killed_equals_an_undisturbed_one(tmp_path: Path) -> None:
    """Bit for bit: tables, dense weights, and Keras's history, though the model draws at random."""
    undisturbed = run(MASTER, "sync", "nobody", tmp_path / "undisturbed")
    killed = run(MASTER, "sync", "server 0", tmp_path / "killed")
    # Two workers' gradients are averaged: half a count for each sample and epoch.
    assert undisturbed["counts"] == killed["counts"] == {"1.0": ROWS}
    assert (undisturbed["restarts"], killed["restarts"]) == (0, 1)
    assert killed["sums"] == undisturbed["sums"]
    assert killed["history"] == undisturbed["history"]
    assert killed["rows"] == undisturbed["rows"] == 2 * ROWS
    assert killed["steps"] == undisturbed["steps"]
    told = {name: found["told"] for name, found in (("whole", undisturbed), ("killed", killed))}
    assert sum(worker["samples"] for worker in told["whole"]["workers"]) == 2 * ROWS
    # What was trained before the failure is told as well, though not by its last second.
    assert 1.5 * ROWS < sum(worker["samples"] for worker in told["killed"]["workers"]) < 3 * ROWS
    assert told["killed"]["restarts"] == 1
    trace = json.loads((tmp_path / "killed" / "model-sync" / "tracing" / "trace.json").read_text())
    named = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {"driver", "server 0", "worker 0", "worker 1"}


# The fault tests kill a node with tables, too.
@ALL
def test_an_asynchronous_node_with_tables_that_was_killed_costs_no_row(tmp_path: Path) -> None:
    found = run(MASTER, "async", "worker 1", tmp_path, servers=0)
    assert found["killed"]
    assert found["restarts"] == 1
    assert found["counts"] == {"2.0": ROWS}


# The fault tests kill a driver, too.
@ALL
def test_a_killed_driver_is_submitted_again_and_finishes_the_rest(tmp_path: Path) -> None:
    driver = start(MASTER, "async", "driver", tmp_path)
    try:
        assert driver.stdout is not None
        assert any("KILL ME" in line for line in driver.stdout), "it ended by itself"
    finally:
        end(driver)
    found = run(MASTER, "async", "nobody", tmp_path)
    assert found["counts"] == {"2.0": ROWS}
    assert found["begun"] in ([1], [0, 1]), "what is saved is not trained again"
    assert len(found["history"]["loss"]) == 2
    assert found["saves"][0][0] == "incremental", "it builds on what it has restored"


def test_sigterm_of_the_driver_saves_and_the_next_one_goes_on(tmp_path: Path) -> None:
    found = run(MASTER, "async", "sigterm", tmp_path)
    assert "SIGTERM: training has ended at step" in found["error"]
    assert "saved as" in found["error"]
    trained = {float(count): rows for count, rows in found["counts"].items()}
    assert sum(trained.values()) == ROWS
    assert set(trained) <= {1.0, 2.0}, "in the second epoch"
    again = run(MASTER, "async", "nobody", tmp_path)
    assert again["counts"] == {"2.0": ROWS}
    assert again["begun"] == [1]


def test_a_callback_stops_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    found = run(MASTER, "sync", "stop", tmp_path)
    assert found["killed"]
    assert ROWS < found["rows"] < 2 * ROWS
    assert set(found["counts"]) == {"0.5", "1.0"}
    assert found["counts"]["1.0"] == found["rows"] - ROWS
