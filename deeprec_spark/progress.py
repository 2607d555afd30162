"""Live progress of training on the driver: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0
MAX_NUMBERS = 4
"""Of a metric that is a vector, such as Precision at several thresholds, so many are shown."""


class ProgressDisplay:
    """Shows samples, speed and metrics of the running epoch.

    Args:
        verbose: 0 shows nothing, 1 a bar (or a log line every ten seconds where stderr is no terminal) and a
            line for each epoch and each validation, 2 only these lines.
        epochs: number of the last epoch, for the headings.

    Example:
        >>> with ProgressDisplay(verbose=0, epochs=1) as display:
        ...     display.begin("epoch 1/1", total=100)
        ...     display.update(50, {"loss": 0.7})
        ...     display.end(100, {"loss": 0.6})
    """

    def __init__(self, verbose: int, epochs: int) -> None:
        self.epochs = epochs
        self._verbose = verbose
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if verbose == 1 and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=Console(stderr=True),
            )
        self._label = ""
        self._total = 0
        self._first = self._samples = 0
        self._started = self._next_log = time.monotonic()

    def __enter__(self) -> ProgressDisplay:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def begin(self, label: str, total: int, done: int = 0) -> None:
        """Start a phase of `total` samples, of which `done` were trained before: they do not count as speed."""
        self._label, self._total = label, total
        self._first = self._samples = done
        self._started = time.monotonic()
        self._next_log = self._started + LOG_SECONDS
        if self._bar:
            self._task = self._bar.add_task(label, total=total, completed=done, status="")

    def update(self, samples: int, logs: Mapping[str, Any], split: str = "") -> None:
        """Show that `samples` of the phase are done, its metrics so far, and where the time of its steps goes."""
        self._samples = samples
        status = self._status(logs, split)
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=samples, status=status)
        elif self._verbose == 1 and time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + LOG_SECONDS
            logger.info("%s: %d/%d samples, %s", self._label, samples, self._total, status)

    def saved(self, step: int, pause: float, write: float) -> None:
        """Say beside the bar that a checkpoint was written; elsewhere the log says it."""
        if self._bar:
            self._bar.console.print(f"saved step {step}: held {pause:.3f} s, wrote for {write:.1f} s")

    def end(self, samples: int, logs: Mapping[str, Any], split: str = "") -> None:
        """Finish the phase, `samples` of which are done, with its final metrics."""
        self._samples = samples
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._total, status=self._status(logs, split))
        if self._verbose:
            seconds = time.monotonic() - self._started
            logger.info("%s: %.1f s, %s", self._label, seconds, self._status(logs, split))

    def validated(self, label: str, seconds: float, logs: Mapping[str, Any]) -> None:
        """Say what validation has found and what it took, which is no time of training."""
        if self._verbose:
            logger.info("%s: validated in %.1f s, %s", label, seconds, _metrics(logs))

    def _status(self, logs: Mapping[str, Any], split: str) -> str:
        speed = (self._samples - self._first) / max(time.monotonic() - self._started, 1e-9)
        parts = [f"{speed:,.0f} samples/s", _metrics(logs), split]
        return ", ".join(part for part in parts if part)


def _metrics(logs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in logs.items())


def _number(value: Any) -> str:
    """A number, or the first few of a metric that has several."""
    numbers = np.asarray(value, np.float64).reshape(-1)
    if np.ndim(value) == 0:
        return f"{numbers[0]:.4f}"
    shown = [f"{number:.4f}" for number in numbers[:MAX_NUMBERS]]
    return f"[{' '.join([*shown, '…'] if numbers.size > MAX_NUMBERS else shown)}]"
