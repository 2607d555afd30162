"""The disk is full: while a checkpoint is written, and while rows are moved to a tier on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import checks
from tests.faults.harness import Data, Driver, FaultRun
from tests.faults.record import Outcome, Recorder

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

MEGABYTE = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={24 * MEGABYTE}", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    """A file that takes what is left."""
    ballast = place / "ballast"
    free = os.statvfs(place)
    with ballast.open("wb") as file:
        file.write(bytes(free.f_bavail * free.f_frsize))
    return ballast


def test_disk_full_while_saving(
    fault_driver: Driver,
    fault_data: Data,
    undisturbed: dict[str, Any],
    small_disk: Path,
    recorder: Recorder,
) -> None:
    run = FaultRun(
        fault_driver,
        fault_data,
        small_disk / "model",
        num_workers=1,
        checkpoints={"save_steps": 40, "keep_max": 1},
    )
    run.saved("full")
    run.fault()
    ballast = fill(small_disk)
    said = fault_driver.wait_for_log(r"No space left on device.*", 60)
    seconds = run.recovered()
    ballast.unlink()
    done = run.done()
    assert said
    assert done["restarts"] == 0
    how = "the log says so, training goes on, the checkpoints before stay whole; saves succeed again once there is room"
    checks.recovered(recorder, "disk full while saving", how, done, undisturbed, seconds)


@pytest.mark.all_faults
def test_disk_full_while_spilling_a_tier(
    fault_driver: Driver,
    fault_data: Data,
    undisturbed: dict[str, Any],
    small_disk: Path,
    tmp_path: Path,
    recorder: Recorder,
) -> None:
    tier = small_disk / "tier"
    tier.mkdir()
    fill(small_disk)
    config = {"tier_path": str(tier), "tier_bytes": 256 << 10}
    run = FaultRun(
        fault_driver,
        fault_data,
        tmp_path / "model",
        config=config,
        num_workers=1,
        restarts={"max_restarts": 0},
    )
    event = run.refused()
    assert "No space left on device" in event["text"]
    assert str(tier) in event["text"]
    recorder(
        Outcome(
            "disk full while spilling a tier", "refused", "the error names the tier's files", event["seconds"]
        )
    )
