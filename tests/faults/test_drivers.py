"""Two jobs at once on the same hosts; a driver that dies, and its job submitted again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deeprec_spark.platform.standalone import StandaloneCluster
from tests.faults import checks
from tests.faults.harness import Data, Driver, FaultRun
from tests.faults.record import Recorder

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SAVING = {"checkpoints": {"save_steps": 100, "incremental_steps": 20}}


@pytest.fixture(scope="module")
def other_driver(
    fault_cluster: StandaloneCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    """Another application on the same hosts."""
    driver = Driver(fault_cluster, tmp_path_factory.mktemp("other-driver"), executors=3)
    yield driver
    driver.close()


def test_a_second_job_on_the_same_hosts(
    fault_driver: Driver,
    other_driver: Driver,
    fault_data: Data,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    recorder: Recorder,
) -> None:
    runs = [
        FaultRun(driver, fault_data, tmp_path / str(number), num_workers=1)
        for number, driver in enumerate((fault_driver, other_driver))
    ]
    nodes = [run.in_the_middle() for run in runs]
    assert not {*nodes[0].workers, *nodes[0].servers} & {*nodes[1].workers, *nodes[1].servers}
    for run in runs:
        how = "both run beside each other, on ports of their own"
        checks.recovered(
            recorder, "a second job on the same hosts at once", how, run.done(), undisturbed, None
        )


def test_kill_9_of_the_driver_and_resubmission(
    fault_driver: Driver,
    other_driver: Driver,
    fault_data: Data,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    recorder: Recorder,
) -> None:
    run = FaultRun(other_driver, fault_data, tmp_path / "model", num_workers=1, **SAVING)
    run.saved()
    run.in_the_middle()
    run.fault()
    left = other_driver.kill()
    assert left
    again = FaultRun(fault_driver, fault_data, tmp_path / "model", num_workers=1, **SAVING)
    again.fault_at = run.fault_at
    seconds = again.recovered()
    done = again.done()
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive
    fault_driver.wait_for_log(r"Going on from step [1-9]", 1)
    how = "no process of the job outlives it; submitted again, it goes on from the last checkpoints"
    checks.recovered(recorder, "kill -9 of the driver, then resubmission", how, done, undisturbed, seconds)
