"""docs/reliability.md from the outcomes of all fault tests: `python -m tests.faults.report` runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.record import Outcome

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"
HEAD = "| fault | outcome | how | seconds | samples lost | repeated | AUC |\n|---|---|---|---|---|---|---|\n"


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown; of a fault that came several times, the worst."""
    worst: dict[str, Outcome] = {}
    for outcome in outcomes:
        known = worst.get(outcome.fault)
        if known is None or (outcome.seconds or 0) > (known.seconds or 0):
            worst[outcome.fault] = outcome
    return HEAD + "".join(_row(outcome) for outcome in worst.values())


def with_table(page: str, outcomes: Sequence[Outcome]) -> str:
    """The page with its table replaced; a ValueError where it has no place for one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page needs the lines {BEGIN!r} and {END!r}. Received: {len(page)} characters")
    return before + begin + table(outcomes) + end + after


def read(file: Path) -> list[Outcome]:
    """The outcomes that a Recorder wrote."""
    return [Outcome(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def _row(outcome: Outcome) -> str:
    def shown(value: float | None, form: str = "") -> str:
        return "" if value is None else format(value, form)

    cells = [
        *(outcome.fault, outcome.outcome, outcome.how, shown(outcome.seconds, ".1f")),
        *(shown(outcome.lost), shown(outcome.repeated), shown(outcome.auc, ".4f")),
    ]
    return f"| {' | '.join(map(_cell, cells))} |\n"


def _cell(text: str) -> str:
    """Text that neither ends its cell nor its row."""
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    """Run all fault tests, then write the page; the exit code of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.jsonl"
        file.touch()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:xdist",
            "-m",
            "faults",
            "tests/faults",
            *sys.argv[1:],
        ]
        code = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "DEEPREC_FAULT_RECORD": str(file)}, check=False
        ).returncode
        if code == 0:
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read(file)), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
