"""Processes of a running job die, are told to end, or stop."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults import checks
from tests.faults.harness import Data, Driver, FaultRun
from tests.faults.record import Recorder

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SAVING = {"checkpoints": {"save_steps": 100, "incremental_steps": 20}, "restarts": {"backoff_secs": 0.2}}


@pytest.fixture
def run(fault_driver: Driver, fault_data: Data, undisturbed: dict[str, Any], tmp_path: Path) -> FaultRun:
    """A fit that saves often. (The undisturbed one has run before.)"""
    return FaultRun(fault_driver, fault_data, tmp_path / "model", **SAVING)


def gone(*processes: psutil.Process) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


def test_kill_9_of_a_worker(run: FaultRun, recorder: Recorder, undisturbed: dict[str, Any]) -> None:
    nodes = run.in_the_middle()
    run.fault()
    nodes.workers[0].kill()
    seconds = run.recovered()
    done = run.done()
    assert done["restarts"] == 0
    how = "the others go on; Spark starts the worker again, its lease goes back"
    checks.recovered(recorder, "kill -9 of a worker", how, done, undisturbed, seconds)
    gone(*nodes.servers, *nodes.workers)


def test_kill_9_of_a_server(run: FaultRun, recorder: Recorder, undisturbed: dict[str, Any]) -> None:
    run.saved()
    nodes = run.in_the_middle()
    run.fault()
    nodes.servers[0].kill()
    seconds = run.recovered()
    done = run.done()
    assert done["restarts"] == 1
    how = "all nodes start again, from the last full and incremental checkpoints"
    checks.recovered(recorder, "kill -9 of a server", how, done, undisturbed, seconds)
    gone(*nodes.servers, *nodes.workers)


def test_kill_9_of_an_executor(run: FaultRun, recorder: Recorder, undisturbed: dict[str, Any]) -> None:
    nodes = run.in_the_middle()
    executor = nodes.executor(nodes.workers[0])
    run.fault()
    executor.kill()
    seconds = run.recovered()
    done = run.done()
    gone(executor, *nodes.workers)
    assert done["restarts"] == 0
    how = "its worker ends with it; the others go on; Spark starts another executor"
    checks.recovered(recorder, "kill -9 of an executor JVM", how, done, undisturbed, seconds)


@pytest.mark.all_faults
def test_sigterm_of_an_executor(run: FaultRun, recorder: Recorder, undisturbed: dict[str, Any]) -> None:
    run.saved()
    nodes = run.in_the_middle()
    executor = nodes.executor(nodes.servers[0])
    run.fault()
    executor.send_signal(signal.SIGTERM)
    seconds = run.recovered()
    done = run.done()
    gone(executor, *nodes.servers, *nodes.workers)
    assert done["restarts"] == 1
    how = "its server ends with it; all nodes start again, from the last checkpoints"
    checks.recovered(recorder, "SIGTERM of an executor JVM (of a server)", how, done, undisturbed, seconds)


@pytest.mark.all_faults
def test_sigstop_of_a_server(run: FaultRun, recorder: Recorder, undisturbed: dict[str, Any]) -> None:
    run.saved()
    nodes = run.in_the_middle()
    run.fault()
    nodes.servers[0].suspend()
    try:
        run.driver.wait_for_log(r"no heartbeat for \d", 120)
        seconds = run.recovered(known_at=time.monotonic())
        done = run.done()
        assert done["restarts"] == 1
        # Stopped, it cannot end by itself: its Spark task does it.
        gone(*nodes.servers, *nodes.workers)
    finally:
        if nodes.servers[0].is_running():
            nodes.servers[0].resume()
    how = "lost after the heartbeat's deadline (8 s here); all nodes start again, from the last checkpoints"
    checks.recovered(recorder, "SIGSTOP of a server", how, done, undisturbed, seconds)


@pytest.mark.all_faults
def test_kill_9_of_one_of_two_servers(
    fault_driver: Driver,
    fault_data: Data,
    undisturbed: dict[str, Any],
    recorder: Recorder,
    tmp_path: Path,
) -> None:
    run = FaultRun(fault_driver, fault_data, tmp_path / "model", num_ps=2, num_workers=1, **SAVING)
    run.saved()
    nodes = run.in_the_middle()
    run.fault()
    nodes.servers[1].kill()
    seconds = run.recovered()
    done = run.done()
    assert done["restarts"] == 1
    how = "all nodes start again, from the last checkpoints of both"
    checks.recovered(recorder, "kill -9 of one of two servers", how, done, undisturbed, seconds)
    gone(*nodes.servers, *nodes.workers)


@pytest.fixture(scope="module")
def undisturbed_sync(
    fault_driver: Driver, fault_data: Data, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The outcome of a synchronous fit that nothing happens to."""
    return FaultRun(fault_driver, fault_data, tmp_path_factory.mktemp("undisturbed"), mode="sync").done(400)


@pytest.mark.all_faults
@pytest.mark.parametrize(
    ("nodes", "fault", "how"),
    [
        pytest.param(
            {"num_ps": 1},
            "kill -9 of a synchronous worker",
            "all nodes start again, from the last checkpoints; the model is the undisturbed one, bit for bit",
            id="separate",
        ),
        pytest.param(
            {"num_ps": 0, "estimator": {"placement": "colocated"}},
            "kill -9 of a colocated node (sync)",
            "all nodes start again, from the last checkpoints of both shards; the model is that of separate servers",
            id="colocated",
        ),
    ],
)
def test_kill_9_of_a_synchronous_worker(
    fault_driver: Driver,
    fault_data: Data,
    undisturbed_sync: dict[str, Any],
    recorder: Recorder,
    tmp_path: Path,
    nodes: dict[str, Any],
    fault: str,
    how: str,
) -> None:
    run = FaultRun(fault_driver, fault_data, tmp_path / "model", mode="sync", **nodes, **SAVING)
    run.saved()
    running = run.in_the_middle()
    processes = (*running.servers, *running.workers)
    run.fault()
    processes[-1].kill()
    seconds = run.recovered()
    done = run.done()
    assert done["restarts"] == 1
    assert done["auc"] == undisturbed_sync["auc"]
    checks.recovered(recorder, fault, how, done, undisturbed_sync, seconds)
    gone(*processes)
