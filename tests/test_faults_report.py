"""The table of docs/reliability.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import report
from tests.faults.record import Outcome, Recorder


def test_outcomes_become_the_table_of_the_page(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "outcomes")
    recorder(Outcome("kill", "recovered", "starts again", 3.14159, 0, 0, 0.00042))
    recorder(Outcome("kill", "recovered", "starts again", 5.5, 0, 0, 0.0001))
    recorder(Outcome("flip", "refused", "named"))
    Recorder(None)(Outcome("other", "refused", "not kept"))
    page = report.with_table(
        f"before\n{report.BEGIN}old\n{report.END}after\n", report.read(tmp_path / "outcomes")
    )
    assert page == (
        f"before\n{report.BEGIN}{report.HEAD}"
        "| kill | recovered | starts again | 5.5 | 0 | 0 | 0.0001 |\n"
        f"| flip | refused | named |  |  |  |  |\n{report.END}after\n"
    )
    with pytest.raises(ValueError, match="needs the lines"):
        report.with_table("nothing", [])


SKIPPING = """
import pytest

@pytest.fixture
def mounted():
    pytest.skip("no file system can be mounted | here")

def test_disk_full_while_saving(mounted):
    raise AssertionError

def test_cut_connections():
    pytest.skip("the kernel does not let us")

def test_of_a_known_fault():
    pytest.xfail("known")

def test_that_runs():
    pass
"""


def test_faults_that_are_skipped_are_told_with_the_reason(tmp_path: Path) -> None:
    """By the hook of the fault tests, in a pytest of its own."""
    (tmp_path / "conftest.py").write_text("from tests.faults.conftest import pytest_runtest_makereport\n")
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    outcomes = tmp_path / "outcomes"
    outcomes.touch()
    environment = {**os.environ, "PYTHONPATH": str(report.ROOT), "DEEPREC_FAULT_RECORD": str(outcomes)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-c", os.devnull, str(tmp_path)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert report.table(report.read(outcomes)) == (
        f"{report.HEAD}"
        "| disk full while saving | not run: no file system can be mounted \\| here |  |  |  |  |  |\n"
        "| cut connections | not run: the kernel does not let us |  |  |  |  |  |\n"
    )


def test_the_page_has_a_place_for_it() -> None:
    report.with_table(report.PAGE.read_text(encoding="utf-8"), [])
