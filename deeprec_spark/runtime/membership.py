"""Who takes part: each rank has at most one living node, and every silence has a deadline.

A rank is first claimed by its supervisor (the Spark task), then announced by its process, which sends
heartbeats from then on. A second copy of a rank (speculation, a retried task) stands by: it takes the
rank over once the first copy is dead, and never works beside it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from deeprec_spark.runtime.errors import StaleNodeError
from deeprec_spark.runtime.options import CoordinatorOptions, describe_rank

LOG_TAIL_LINES = 50


class MemberState(str, Enum):
    """The life of one incarnation of a rank."""

    CLAIMED = "claimed"  # its process is starting
    RUNNING = "running"  # announced, sends heartbeats
    LOST = "lost"  # silent for too long, or its process died
    DONE = "done"  # ended as it should


@dataclass
class Member:
    """One incarnation of a rank."""

    rank: int
    attempt: str
    incarnation: int
    host: str
    deadline: float
    last_seen: float
    state: MemberState = MemberState.CLAIMED
    address: str | None = None
    reason: str = ""
    lost_at: float = 0.0
    log_tail: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_TAIL_LINES))

    @property
    def alive(self) -> bool:
        """Whether this incarnation holds its rank."""
        return self.state in (MemberState.CLAIMED, MemberState.RUNNING)


class Membership:
    """The members of a job. All methods take `condition`'s lock.

    Arguments:
        options: topology and deadlines.
        condition: shared with the coordinator; its lock guards all of the job's state.
        on_lost: called with the lock held when a member is lost.
        on_change: called with the lock held when a member's state changes (not at each heartbeat); wakes the waiting.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        condition: threading.Condition,
        on_lost: Callable[[Member], None],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._condition = condition
        self._on_lost = on_lost
        self._on_change = on_change
        self._clock = clock
        self._started = clock()
        self._members: dict[int, Member] = {}
        self._incarnations = 0

    def claim(
        self, rank: int, attempt: str, host: str, *, timeout: float, stopping: Callable[[], bool]
    ) -> Member | None:
        """Take a rank, waiting up to `timeout` seconds for the copy that holds it to die.

        None if that one still lives, has ended as it should, or the job is `stopping`.
        """
        if not 0 <= rank < self._options.num_nodes:
            raise ValueError(
                f"Ranks of this job are 0 to {self._options.num_nodes - 1}. Received: rank={rank}"
            )
        end = self._clock() + timeout
        with self._condition:
            while True:
                self.expire()
                holder = self._members.get(rank)
                if holder is not None and holder.attempt == attempt and holder.alive:
                    return holder  # the answer to the first claim was lost on the way
                if stopping() or (holder is not None and holder.state is MemberState.DONE):
                    return None
                if holder is None or not holder.alive:
                    return self._admit(rank, attempt, host)
                now = self._clock()
                if now >= end:
                    return None
                self._condition.wait(max(0.0, min(end, holder.deadline) - now))

    def _admit(self, rank: int, attempt: str, host: str) -> Member:
        now = self._clock()
        self._incarnations += 1
        member = Member(rank, attempt, self._incarnations, host, now + self._options.start_timeout, now)
        self._members[rank] = member
        self._on_change()
        return member

    def announce(self, rank: int, incarnation: int, address: str | None) -> None:
        """The node's process runs; servers say where they listen."""
        with self._condition:
            member = self.current(rank, incarnation)
            member.state = MemberState.RUNNING
            member.address = address
            self._touch(member)
            self._on_change()

    def beat(self, rank: int, incarnation: int) -> None:
        """A heartbeat, or any other sign of life."""
        with self._condition:
            self._touch(self.current(rank, incarnation))

    def _touch(self, member: Member) -> None:
        member.last_seen = self._clock()
        member.deadline = member.last_seen + self._options.heartbeat_timeout

    def exited(self, rank: int, incarnation: int, *, failed: bool, reason: str = "") -> bool:
        """The node's process ended; False if this incarnation no longer held its rank."""
        with self._condition:
            member = self._members.get(rank)
            if member is None or member.incarnation != incarnation or not member.alive:
                return False
            member.last_seen = self._clock()
            if failed:
                self._lose(member, reason)
            else:
                member.state = MemberState.DONE
            self._on_change()
            return True

    def _lose(self, member: Member, reason: str) -> None:
        member.state = MemberState.LOST
        member.reason = reason
        member.lost_at = self._clock()
        self._on_lost(member)

    def expire(self) -> None:
        """Give up the members whose deadline has passed."""
        with self._condition:
            now = self._clock()
            for member in list(self._members.values()):
                if member.alive and now >= member.deadline:
                    silent = f"{now - member.last_seen:.1f} s"
                    starting = member.state is MemberState.CLAIMED
                    self._lose(
                        member, f"not started after {silent}" if starting else f"no heartbeat for {silent}"
                    )
                    self._on_change()

    def current(self, rank: int, incarnation: int) -> Member:
        """The member that holds this rank; a StaleNodeError if the caller's incarnation does not."""
        with self._condition:
            member = self._members.get(rank)
            if member is None or member.incarnation != incarnation or not member.alive:
                raise StaleNodeError(
                    f"{describe_rank(rank, self._options.num_ps)} was given up or replaced; this copy must end. "
                    f"Received: incarnation={incarnation}"
                )
            return member

    def get(self, rank: int) -> Member | None:
        """The newest incarnation of a rank."""
        return self._members.get(rank)

    def name(self, rank: int) -> str:
        """The node's description for messages, with its host where known."""
        member = self._members.get(rank)
        role = describe_rank(rank, self._options.num_ps)
        return f"{role} on {member.host}" if member is not None else role

    def all_running(self, ranks: range | list[int]) -> bool:
        """Whether all of these ranks have announced themselves and live."""
        with self._condition:
            members = [self._members.get(rank) for rank in ranks]
            return all(member is not None and member.state is MemberState.RUNNING for member in members)

    def is_alive(self, rank: int) -> bool:
        """Whether a node holds this rank."""
        member = self._members.get(rank)
        return member is not None and member.alive

    def lost(self) -> list[Member]:
        """The members that were lost and not replaced."""
        with self._condition:
            return [member for member in self._members.values() if member.state is MemberState.LOST]

    def any_alive(self) -> bool:
        """Whether any node still holds a rank."""
        with self._condition:
            return any(member.alive for member in self._members.values())

    def describe_missing(self, ranks: range | list[int]) -> str:
        """Who of these ranks is not running, and since when: `worker 1 (rank 2): never seen in 30.0 s; …`."""
        with self._condition:
            now = self._clock()
            parts = []
            for rank in ranks:
                member = self._members.get(rank)
                if member is None:
                    parts.append(
                        f"{describe_rank(rank, self._options.num_ps)}: never seen in {now - self._started:.1f} s"
                    )
                elif member.state is not MemberState.RUNNING:
                    since = f"{now - member.last_seen:.1f} s"
                    parts.append(
                        f"{self.name(rank)}: {member.state.value} since {since} {member.reason}".rstrip()
                    )
            return "; ".join(parts)
