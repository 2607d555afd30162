"""Damaged files: checkpoints with one byte changed, and training data cut short."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import Data, Driver, FaultRun
from tests.faults.record import Outcome, Recorder

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def kind_of(file: Path) -> str:
    """What a file of a checkpoint holds: `tombstones`, `manifest` …"""
    name = re.split(r"[-.]", file.name)[0]
    return f"dense {name}" if file.parent.name == "dense" else name


def flip(file: Path) -> None:
    """Change one bit of the byte in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def test_a_flipped_byte_in_each_kind_of_checkpoint_file(
    fault_driver: Driver, fault_data: Data, tmp_path: Path, recorder: Recorder
) -> None:
    model = tmp_path / "model"
    wanted: dict[str, Any] = {
        "config": {"all_kinds_of_files": True},
        "num_workers": 1,
        "checkpoints": {"incremental_steps": 40, "save_steps": 10_000},
    }
    run = FaultRun(fault_driver, fault_data, model, restarts={"max_restarts": 0}, **wanted)
    run.saved()
    # Cut short, so that what is newest is an incremental checkpoint.
    run.in_the_middle().servers[0].kill()
    assert run.refused()["type"] == "NodeError"
    places = sorted(file.parent for file in (model / "checkpoints").glob("*/manifest.json"))
    full, newest = places[0], places[-1]
    kinds = {kind_of(file): file for file in sorted(newest.rglob("*")) if file.is_file()}
    assert set(kinds) >= {
        "manifest",
        "part",
        "filtered",
        "bloom",
        "tombstones",
        "store",
        "dense part",
        "dense state",
    }
    kinds["part of the base"] = full / "tables" / "ta" / kinds["part"].name
    for kind, file in kinds.items():
        whole = file.read_bytes()
        flip(file)
        event = FaultRun(fault_driver, fault_data, model, **wanted).refused()
        file.write_bytes(whole)
        assert event["type"] == "CheckpointCorruptError", event
        assert file.name in event["text"], event
        recorder(
            Outcome(
                f"a flipped byte in a checkpoint's {kind} file",
                "refused",
                "CheckpointCorruptError names it",
                event["seconds"],
            )
        )

    flip(kinds["manifest"])
    wanted["checkpoints"]["fallback"] = True
    done = FaultRun(fault_driver, fault_data, model, **wanted).done()
    fault_driver.wait_for_log("cannot be restored.*going back to", 1)
    assert (done["lost"], done["repeated"]) == (0, 0)
    recorder(
        Outcome(
            "the same, with fallback=True",
            "recovered",
            "the log says so, and training goes on from the newest checkpoint that is whole",
            None,
            done["lost"],
            done["repeated"],
        )
    )


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
