"""How far asynchronous workers may drift apart: the bound on one server, and how a worker keeps it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deeprec_spark.runtime.calls import Handler
from deeprec_spark.runtime.errors import StaleNodeError
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.options import describe_rank
from deeprec_spark.runtime.pace import Pace
from deeprec_spark.runtime.semi_sync import SemiSyncOptions, SemiSyncReport
from deeprec_spark.runtime.store_messages import Sender

logger = logging.getLogger(__name__)

_POLL_SECONDS = 20.0

Ask = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""Calls the server that keeps the bound: method, header, the answer's header."""


@dataclass
class _Runner:
    """A worker that trains: how many steps it has pushed, on a scale that all of them share.

    The worker's own numbers are smaller by `moved_up`: what it was moved up by, after it had been left out.
    """

    incarnation: int
    done: int
    pushed_at: float
    sequence: int = 0
    moved_up: int = 0
    left_out: bool = False
    report: SemiSyncReport = field(default_factory=SemiSyncReport)


class StalenessBound:
    """Counts the steps of all workers on one server, and lets none begin one that is too far ahead.

    A worker enters when it begins to train, at the count of the slowest; it counts until it leaves, or is lost. Its
    pushes are its steps. Safe from many threads.

    Arguments:
        options: with a max_staleness.
        ranks: of the workers.
        num_ps: for messages.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        options: SemiSyncOptions,
        ranks: Sequence[int],
        num_ps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if options.max_staleness is None:
            raise ValueError(f"There is no bound to keep. Received: {options}")
        self._limit = options.max_staleness
        self._patience = options.patience_secs
        self._ranks = ranks
        self._num_ps = num_ps
        self._clock = clock
        self._changed = threading.Condition()
        self._runners: dict[int, _Runner] = {}
        # How many of those that count have pushed so many steps. They are close together, so this stays small.
        self._at: Counter[int] = Counter()
        self._gone: dict[int, int] = {}
        self._error: Exception | None = None

    def around(self, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
        """A server's handlers, its pushes counted, and those that workers ask for their turn."""
        push = handlers["push"]

        def counted(message: Message) -> Message:
            answer = push(message)
            self.pushed(Sender.of(message))
            return answer

        return {
            **handlers,
            "push": counted,
            "enter_steps": self._enter,
            "await_turn": self._await_turn,
            "leave_steps": self._leave,
        }

    def enter(self, rank: int, incarnation: int) -> int:
        """This worker begins to train; the count at which it begins."""
        if rank not in self._ranks:
            raise ValueError(f"Workers of this job are ranks {list(self._ranks)}. Received: rank={rank}")
        with self._changed:
            if incarnation <= self._gone.get(rank, 0):
                raise StaleNodeError(
                    f"{describe_rank(rank, self._num_ps)} was given up; this copy must end. "
                    f"Received: incarnation={incarnation}"
                )
            known = self._runners.get(rank)
            if known is not None and incarnation < known.incarnation:
                raise StaleNodeError(
                    f"{describe_rank(rank, self._num_ps)} was replaced; this copy must end. "
                    f"Received: incarnation={incarnation}, newest={known.incarnation}"
                )
            self._remove(rank)
            done = self._slowest()
            self._runners[rank] = _Runner(incarnation, done, self._clock())
            self._at[done] += 1
            return done

    def turn(self, rank: int, incarnation: int, step: int, timeout: float) -> int | None:
        """Wait until this worker may begin its step of this number (it has begun so many before).

        Returns:
            The number of the last step that it may begin by now; None if it may not yet after `timeout` seconds.
        """
        started = self._clock()
        with self._changed:
            runner = self._running(rank, incarnation)
            waited = False
            while (slowest := self._slowest()) + self._limit < step + runner.moved_up:
                self._raise_error()
                left = started + timeout - self._clock()
                if left <= 0:
                    runner.report.wait_seconds += self._clock() - started
                    return None
                waited = True
                self._changed.wait(max(0.0, min(left, self._leave_out_silent())))
                runner = self._running(rank, incarnation)
            if waited:
                runner.report.waits += 1
                runner.report.wait_seconds += self._clock() - started
            runner.report.max_lead = max(runner.report.max_lead, step + runner.moved_up - slowest)
            return slowest + self._limit - runner.moved_up

    def pushed(self, sender: Sender) -> None:
        """A step of this worker is applied; the same one again changes nothing."""
        with self._changed:
            runner = self._runners.get(sender.rank)
            if runner is None or runner.incarnation != sender.incarnation:
                return
            if sender.sequence <= runner.sequence:
                return
            runner.sequence = sender.sequence
            runner.pushed_at = self._clock()
            slowest = self._slowest()
            if runner.left_out:
                runner.left_out = False
                behind = max(0, slowest - runner.done - 1)
                runner.moved_up += behind
                runner.done += behind + 1
            else:
                runner.report.max_lead = max(runner.report.max_lead, runner.done - slowest)
                self._forget(runner.done)
                runner.done += 1
            self._at[runner.done] += 1
            if self._slowest() > slowest:
                self._changed.notify_all()

    def leave(self, rank: int, incarnation: int) -> SemiSyncReport:
        """This worker has no more rows for now; what it has cost and met since it entered."""
        with self._changed:
            runner = self._runners.get(rank)
            if runner is None or runner.incarnation != incarnation:
                return SemiSyncReport()
            self._remove(rank)
            return runner.report

    def lost(self, rank: int, incarnation: int) -> None:
        """This copy of a worker will not come back: it holds nobody up any more."""
        with self._changed:
            self._gone[rank] = max(incarnation, self._gone.get(rank, 0))
            self.leave(rank, incarnation)

    def fail(self, error: Exception) -> None:
        """Whoever waits gets this error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _running(self, rank: int, incarnation: int) -> _Runner:
        runner = self._runners.get(rank)
        if runner is None or runner.incarnation != incarnation:
            raise StaleNodeError(
                f"{describe_rank(rank, self._num_ps)} has not begun to train here, or was given up. "
                f"Received: incarnation={incarnation}"
            )
        return runner

    def _slowest(self) -> int:
        # With nobody who counts, who comes next begins where the foremost one is: it waits for none, and none for it.
        foremost = max((runner.done for runner in self._runners.values()), default=0)
        return min(self._at, default=foremost)

    def _forget(self, done: int) -> None:
        """One fewer that counts has pushed so many steps."""
        self._at[done] -= 1
        if not self._at[done]:
            del self._at[done]

    def _remove(self, rank: int) -> None:
        runner = self._runners.pop(rank, None)
        if runner is not None and not runner.left_out:
            self._forget(runner.done)
            self._changed.notify_all()

    def _leave_out_silent(self) -> float:
        """Go on without the slowest, where they have been silent for too long; seconds until the next look."""
        now, slowest, wait = self._clock(), self._slowest(), self._patience
        for rank, runner in self._runners.items():
            if runner.left_out or runner.done > slowest:
                continue
            silent = now - runner.pushed_at
            if silent >= self._patience:
                runner.left_out = True
                self._forget(runner.done)
                self._changed.notify_all()
                runner.report.add(SemiSyncReport(left_out={rank: 1}))
                wait = 0.0
                logger.warning(
                    "%s has pushed nothing for %.0f s: others do not wait for it any more",
                    describe_rank(rank, self._num_ps), silent,
                )  # fmt: skip
            else:
                wait = min(wait, self._patience - silent)
        return wait

    def _enter(self, message: Message) -> Message:
        sender = Sender.of(message)
        return Message({"done": self.enter(sender.rank, sender.incarnation)})

    def _await_turn(self, message: Message) -> Message:
        sender = Sender.of(message)
        timeout: Any = message.header.get("timeout")
        if not isinstance(timeout, (int, float)) or not timeout >= 0:
            raise ValueError(
                f"The message needs `timeout` in seconds. Received: timeout={str(timeout)[:100]}"
            )
        wait = float(min(timeout, _POLL_SECONDS))
        return Message({"last": self.turn(sender.rank, sender.incarnation, sender.sequence, wait)})

    def _leave(self, message: Message) -> Message:
        sender = Sender.of(message)
        return Message({"report": self.leave(sender.rank, sender.incarnation).to_dict()})


class StepTurns(Pace):
    """A worker's side of the bound, for one phase of training at a time.

    The training thread calls `may_begin` and `begun` before each step, and `starving` before it waits for rows: a
    worker that has trained all that it has, and waits for more, holds nobody up. The thread that reads calls `reading`
    for each batch.

    Arguments:
        ask: calls the server that keeps the bound.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._inside = False
        self._next = self._last = 0
        self._report = SemiSyncReport()

    @property
    def number(self) -> int:
        """The number of the next step, on the scale that all workers share."""
        return self._next

    def enter(self) -> None:
        """A phase of training begins."""
        with self._lock:
            self._report = SemiSyncReport()
            self._go_in()

    def may_begin(self, *, wait: bool) -> bool:
        """Whether the next step may begin; with `wait` it does not return before."""
        if self._next > self._last:
            while (last := self._ask_turn(_POLL_SECONDS if wait else 0.0)) is None:
                if not wait:
                    return False
            self._last = last
        return True

    def begun(self) -> None:
        """The step that may begin has begun."""
        self._next += 1

    def reading(self) -> None:
        """A batch was read: there is a step to take, so others count with this worker."""
        with self._lock:
            self._go_in()

    def starving(self) -> None:
        """There is no row to train right now: all that had begun has ended."""
        with self._lock:
            self._go_out()

    def leave(self) -> SemiSyncReport:
        """The phase is over for this worker; what the bound has cost it."""
        with self._lock:
            self._go_out()
            return self._report

    def _go_in(self) -> None:
        if not self._inside:
            self._inside = True
            self._next = int(self._ask("enter_steps", {"sequence": 0})["done"])
            self._last = self._next - 1

    def _go_out(self) -> None:
        if self._inside:
            self._inside = False
            self._report.add(SemiSyncReport.from_dict(self._ask("leave_steps", {"sequence": 0})["report"]))

    def _ask_turn(self, timeout: float) -> int | None:
        answer = self._ask("await_turn", {"sequence": self._next, "timeout": timeout})["last"]
        return None if answer is None else int(answer)
