"""Outcomes of fault tests: one JSON line each, in the file that DEEPREC_FAULT_RECORD names."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcome:
    """What a fault came to.

    `outcome` is "recovered", "refused", or "not run: " with the reason; `how` says in a few words what was seen;
    `seconds` run from the fault until training was further than before it, or until the error; samples are counted in
    the final model; `auc` is the difference of the final AUC from an undisturbed run.
    """

    fault: str
    outcome: str
    how: str
    seconds: float | None = None
    lost: int | None = None
    repeated: int | None = None
    auc: float | None = None


@dataclass(frozen=True)
class Recorder:
    """Appends outcomes to a file."""

    file: Path | None

    def __call__(self, outcome: Outcome) -> None:
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(outcome)) + "\n")

    def not_run(self, test: str, report: pytest.TestReport) -> None:
        """Take down the fault of a test that was skipped: the page shall not pass over it in silence.

        Arguments:
            test: the name of its function, which says what the fault is.
            report: of one of its stages; nothing is done unless that was skipped.
        """
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
            fault = test.removeprefix("test_").replace("_", " ")
            self(Outcome(fault, f"not run: {reason.removeprefix('Skipped: ')}", ""))
