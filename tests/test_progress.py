"""The progress of a fit as log lines, which is what it is where stderr is no terminal."""

from __future__ import annotations

import logging

import pytest

from deeprec_spark import progress
from deeprec_spark.progress import ProgressDisplay


def shown(verbose: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.INFO, "deeprec_spark.progress"), ProgressDisplay(verbose, 1) as display:
        display.begin("epoch 1/1", 100)
        display.update(50, {"loss": 0.5}, "ms/step 20: pull 4 compute 12")
        display.end({"loss": 0.25}, "ms/step 21: pull 5 compute 12")
    return [record.getMessage() for record in caplog.records]


def test_each_line_ends_with_the_split_of_the_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    during, end = shown(1, caplog)
    assert during.startswith("epoch 1/1: 50/100 samples, ")
    assert during.endswith("samples/s, loss 0.5000, ms/step 20: pull 4 compute 12")
    assert end.endswith("samples/s, loss 0.2500, ms/step 21: pull 5 compute 12")


def test_verbose_2_is_one_line_and_0_none(caplog: pytest.LogCaptureFixture) -> None:
    assert len(shown(2, caplog)) == 1
    caplog.clear()
    assert shown(0, caplog) == []
