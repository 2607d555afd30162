"""Damaged files: checkpoints with one byte changed, and training data cut short."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.harness import Data, Driver, FaultRun
from tests.faults.record import Outcome, Recorder

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def test_a_truncated_parquet_input(
    fault_driver: Driver, fault_data: Data, tmp_path: Path, recorder: Recorder
) -> None:
    copied = tmp_path / "train"
    shutil.copytree(fault_data.train, copied)
    victim = copied / "part-1.parquet"
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 2])
    data = Data(str(copied), fault_data.test, fault_data.rows)
    event = FaultRun(fault_driver, data, tmp_path / "model", num_workers=1).refused()
    assert "part-1.parquet" in event["text"], event
    recorder(
        Outcome(
            "a truncated Parquet input",
            "refused",
            "the error names it, before anything starts",
            event["seconds"],
        )
    )


@pytest.mark.all_faults
def test_a_parquet_input_truncated_while_training(
    fault_driver: Driver, fault_data: Data, tmp_path: Path, recorder: Recorder
) -> None:
    model = tmp_path / "model"
    run = FaultRun(fault_driver, fault_data, model, num_workers=1)
    run.in_the_middle()
    # What is read by then are the prepared rows.
    victims = [file for file in model.rglob("*.parquet") if model / "checkpoints" not in file.parents]
    assert victims
    run.fault()
    for victim in victims:
        victim.write_bytes(victim.read_bytes()[:1000])
    event = run.refused()
    assert any(victim.name in event["text"] for victim in victims), event
    recorder(
        Outcome("a Parquet input truncated while it is read", "refused", "the error names it", event["after"])
    )
