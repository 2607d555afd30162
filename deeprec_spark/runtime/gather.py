"""Gather: one value from each rank, combined once, and an answer back to each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from deeprec_spark.runtime.options import describe_rank

Part = TypeVar("Part")
Answer = TypeVar("Answer")

_REMEDY = (
    "See the log of the missing ones for what holds them up; if they only need longer, raise "
    "cluster.deadlines.step_secs, DeadlineOptions(step_secs=…)."
)


class Gather(Generic[Part, Answer]):
    """Rounds in which every rank takes part; each round is combined once, in rank order.

    A rank that repeats its last request (its answer was lost) gets the same answer again. Safe from many threads.

    Arguments:
        what: the word for messages, e.g. "pull".
        ranks: who takes part.
        num_ps: for messages.
        combine: from the parts by rank, in rank order, to the answers by rank; runs in one caller's thread.
        timeout: seconds from a round's first part until all must be there.
        needed: so many parts make a round; None is one from each rank. Whoever is late for a round must know it
            beforehand, and take part in a later one.
    """

    def __init__(
        self,
        what: str,
        ranks: Sequence[int],
        num_ps: int,
        combine: Callable[[Mapping[int, Part]], Mapping[int, Answer]],
        timeout: float,
        needed: int | None = None,
    ) -> None:
        self._what = what
        self._ranks = sorted(ranks)
        self._num_ps = num_ps
        self._combine = combine
        self._timeout = timeout
        self._needed = len(self._ranks) if needed is None else needed
        self._condition = threading.Condition()
        self._round = 1
        self._parts: dict[int, Part] = {}
        # Each rank's last answer and its round: rounds may go on without a rank that has not heard it yet.
        self._answers: dict[int, tuple[int, Answer]] = {}
        self._combining = False
        self._deadline = 0.0
        self._error: Exception | None = None

    def exchange(self, rank: int, sequence: int, part: Part) -> Answer:
        """Take part in round `sequence` (1, 2, …) and wait for its answer.

        Raises:
            TimeoutError: not every rank came in time; names the missing ones.
            ValueError: the rank or the round does not fit.
            Exception: what `combine` raised, for every rank; the gather stays broken.
        """
        with self._condition:
            self._check_rank(rank)
            known = self._answers.get(rank)
            if known is not None and known[0] == sequence:
                return known[1]
            self._check_round(rank, sequence)
            if not self._parts:
                self._deadline = time.monotonic() + self._timeout
            self._parts.setdefault(rank, part)
            if len(self._parts) < self._needed or self._combining:
                return self._wait(rank, sequence)
            self._combining = True
        try:
            answers = self._combine({one: self._parts[one] for one in self._ranks if one in self._parts})
        except Exception as error:
            self.fail(error)
            raise
        with self._condition:
            self._answers.update((one, (self._round, answer)) for one, answer in answers.items())
            self._parts, self._combining = {}, False
            self._round += 1
            self._condition.notify_all()
            return answers[rank]

    def wait_for(self, sequence: int) -> None:
        """Wait until round `sequence` is the next one, or is over.

        Nobody who takes part is further than one round ahead: they have waited for the ones before.

        Raises:
            ValueError: it is further ahead than that.
            TimeoutError: not every rank came in time for the rounds before.
            Exception: what broke the gather.
        """
        end = time.monotonic() + self._timeout
        with self._condition:
            if sequence > self._round + 1:
                raise ValueError(
                    f"{self._what} {self._round} is next; nobody is more than one ahead of it. Received: {sequence}"
                )
            while self._round < sequence and self._error is None:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"Synchronous {self._what} {self._round} was not there after {self._timeout:g} s. "
                        f"{_REMEDY} Missing: {self._missing()}"
                    )
                self._condition.wait(left)
            if self._error is not None:
                raise self._error

    def fail(self, error: Exception) -> None:
        """Break the gather: all who wait or come later get this error."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def _check_rank(self, rank: int) -> None:
        if rank not in self._ranks:
            raise ValueError(f"Ranks {self._ranks} take part in each {self._what}. Received: rank={rank}")
        if self._error is not None:
            raise self._error

    def _check_round(self, rank: int, sequence: int) -> None:
        if sequence != self._round:
            raise ValueError(
                f"{self._what} {self._round} is next; every rank takes part in each. Received: rank={rank}, {sequence}"
            )

    def _wait(self, rank: int, sequence: int) -> Answer:
        while self._round == sequence and self._error is None:
            left = self._deadline - time.monotonic()
            if left <= 0 and not self._combining:
                self._error = TimeoutError(
                    f"Synchronous {self._what} {sequence} waited {self._timeout:g} s for other workers. "
                    f"{_REMEDY} Missing: {self._missing()}"
                )
                self._condition.notify_all()
                break
            self._condition.wait(max(left, 0.05) if self._combining else left)
        if self._error is not None:
            raise self._error
        return self._answers[rank][1]

    def _missing(self) -> str:
        missing = [describe_rank(one, self._num_ps) for one in self._ranks if one not in self._parts]
        needed = self._needed - len(self._parts)
        of = "" if needed == len(missing) else f"{needed} of "
        return of + ", ".join(missing)
