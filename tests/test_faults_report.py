"""The table of docs/reliability.md."""

from __future__ import annotations

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


def test_the_page_has_a_place_for_it() -> None:
    report.with_table(report.PAGE.read_text(encoding="utf-8"), [])
