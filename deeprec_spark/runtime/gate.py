"""The gate before each training step: the training thread passes it, the control thread closes and opens it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

HOLD_SECONDS = 900.0
"""How long a worker stays held without being told to go on; the driver should have ended it long before."""


@dataclass(frozen=True)
class Standing:
    """How far a worker is in a phase: steps done, and rows done of the items that it has not completed yet."""

    phase: int
    steps: int = 0
    rows: Mapping[int, int] = field(default_factory=dict)
    finished: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON values; JSON has no integer keys."""
        return {
            "phase": self.phase,
            "steps": self.steps,
            "rows": [list(pair) for pair in self.rows.items()],
            "finished": self.finished,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Standing:
        """Read back what `to_dict` gave."""
        return cls(data["phase"], data["steps"], rows_of(data["rows"]), data["finished"])


@dataclass
class _Hold:
    phase: int
    limit: int
    since: float


class StepGate:
    """Lets one worker's steps pass until told to hold.

    The training thread calls `enter`, then `begin` and `end` around each step, then `leave`; several steps may have
    begun that end later, in the same order. Another thread holds it: steps that have begun are finished, later ones
    wait for `release`. A hold for a phase that the training thread has not entered yet takes effect when it does.

    Example:
        >>> gate = StepGate()
        >>> gate.enter(phase=1)
        >>> gate.begin({7: 32}), gate.hold(1)
        (True, 1)
        >>> gate.end()
        >>> gate.run_to(1, target=1, timeout=1.0).rows
        {7: 32}
    """

    def __init__(self, hold_timeout: float = HOLD_SECONDS) -> None:
        self._timeout = hold_timeout
        self._condition = threading.Condition()
        self._phase = 0
        self._begun = 0
        self._done = 0
        self._rows: dict[int, int] = {}
        self._running: deque[dict[int, int]] = deque()
        self._finished = True
        self._hold: _Hold | None = None
        self._stop_phase = 0

    # --- the training thread ---

    def enter(self, phase: int, steps: int = 0) -> None:
        """A phase begins, after so many steps of it that were done before."""
        with self._condition:
            self._phase, self._begun, self._done = phase, steps, steps
            self._rows, self._finished = {}, False
            self._running.clear()
            self._condition.notify_all()

    def begin(self, rows: Mapping[int, int] | None = None, *, wait: bool = True) -> bool | None:
        """Before each step; waits while held. False: the phase is to end here, without this step.

        Arguments:
            rows: by item, how many of its rows are done once this step is.
            wait: without it the answer is None where the gate is held.

        Raises:
            TimeoutError: nobody has ended the hold.
        """
        with self._condition:
            since = time.monotonic()
            while self._held():
                if not wait:
                    return None
                left = since + self._timeout - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"The driver held training for a save and has not let it go on within {self._timeout:.0f} s."
                    )
                self._condition.wait(left)
            if self._stop_phase == self._phase:
                return False
            self._begun += 1
            self._running.append(dict(rows or {}))
            return True

    def end(self) -> None:
        """After each step."""
        with self._condition:
            self._done += 1
            self._rows.update(self._running.popleft())
            self._condition.notify_all()

    def wait_for(self, batch: Future[Any]) -> bool:
        """While steps have begun: wait until the next batch is there, or no step may begin; whether it is there."""

        def wake(_: Future[Any]) -> None:
            with self._condition:
                self._condition.notify_all()

        if not batch.done():
            batch.add_done_callback(wake)
        with self._condition:
            self._condition.wait_for(lambda: batch.done() or self._held())
            return batch.done()

    def forget(self, item: int) -> None:
        """The coordinator knows that this item is completed."""
        with self._condition:
            self._rows.pop(item, None)

    def leave(self) -> None:
        """The worker takes no more steps in this phase."""
        with self._condition:
            self._finished = True
            self._condition.notify_all()

    def position(self) -> dict[str, Any]:
        """Where the worker is once the first of the running steps is done; every push carries it."""
        with self._condition:
            rows = {**self._rows, **(self._running[0] if self._running else {})}
            return {"phase": self._phase, "rows": [list(pair) for pair in rows.items()]}

    def _held(self) -> bool:
        hold = self._hold
        return hold is not None and hold.phase == self._phase and self._begun >= hold.limit

    # --- the control thread ---

    def hold(self, phase: int) -> int:
        """Let no step begin any more; the number of the last one of this phase that has begun."""
        with self._condition:
            begun = self._begun if self._phase == phase else 0
            if self._hold is None:
                self._hold = _Hold(phase, begun, time.monotonic())
            return begun

    def run_to(self, phase: int, target: int, timeout: float) -> Standing:
        """Let steps up to `target` pass, and wait until they are done or the phase has no more.

        A negative target is the step that had begun at `hold`.

        Raises:
            TimeoutError: they were not done in time.
            ValueError: the gate is not held.
        """
        end = time.monotonic() + timeout
        with self._condition:
            if self._hold is None or self._hold.phase != phase:
                raise ValueError(f"Hold the gate first. Received: run_to phase {phase}, held: {self._hold}")
            target = self._hold.limit = max(self._hold.limit, target)
            self._condition.notify_all()
            while not (self._phase == phase and (self._done >= target or self._finished)) and target > 0:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"Step {target} was not done within {timeout:.0f} s. Received: {self._done} steps done"
                    )
                self._condition.wait(left)
            if self._phase != phase:
                return Standing(phase)
            return Standing(phase, self._done, dict(self._rows), self._finished)

    def release(self, stop: bool = False) -> float:
        """Let training go on, or (with `stop`) end the phase at once; the seconds since `hold`."""
        with self._condition:
            held = 0.0 if self._hold is None else time.monotonic() - self._hold.since
            if stop and self._hold is not None:
                self._stop_phase = self._hold.phase
            self._hold = None
            self._condition.notify_all()
            return held


def rows_of(pairs: Any) -> dict[int, int]:
    """Rows by item from JSON pairs; ValueError where they are malformed."""
    if not isinstance(pairs, list):
        raise ValueError(f"Rows by item are a list of pairs. Received: {str(pairs)[:100]}")
    rows: dict[int, int] = {}
    for pair in pairs:
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(type(value) is int and value >= 0 for value in pair)
        ):
            raise ValueError(f"Rows by item are pairs of integers. Received: {str(pair)[:100]}")
        rows[pair[0]] = pair[1]
    return rows
