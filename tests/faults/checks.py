"""What every recovery must show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.faults.record import Outcome, Recorder

MAX_AUC_DIFFERENCE = 0.005


def recovered(
    recorder: Recorder,
    fault: str,
    how: str,
    done: Mapping[str, Any],
    undisturbed: Mapping[str, Any],
    seconds: float | None,
) -> None:
    """Every sample was trained exactly once an epoch, and the model is as good as if nothing had happened."""
    difference = abs(done["auc"] - undisturbed["auc"])
    recorder(Outcome(fault, "recovered", how, seconds, done["lost"], done["repeated"], difference))
    assert (done["lost"], done["repeated"]) == (0, 0)
    assert difference < MAX_AUC_DIFFERENCE
