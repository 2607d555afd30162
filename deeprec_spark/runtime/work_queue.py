"""WorkQueue: the items of an epoch, leased to workers one at a time."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Item = Mapping[str, Any]


@dataclass(frozen=True)
class Lease:
    """One item handed to one owner until it is completed or the owner is lost; `done` of its rows are done."""

    index: int
    item: Item
    done: int = 0


class WorkQueue:
    """Items of one epoch, each handed out once, in their order; an item whose owner dies goes back to the front.

    Safe from many threads. Never waits: `take` returns None where all is handed out. An item of `rows` rows may be done
    in part: what is handed out again says how many of them are done.

    Arguments:
        items: JSON-able dicts, e.g. a file and its row group.

    Example:
        >>> queue = WorkQueue([{"file": "a"}])
        >>> lease = queue.take("worker 0")
        >>> queue.complete("worker 0", lease.index), queue.finished
        (True, True)
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = [dict(item) for item in items]
        self._lock = threading.Lock()
        self._start(completed=())

    def take(self, owner: Hashable, *, steal: bool = False) -> Lease | None:
        """The next item for this owner, or None while (or because) there is none to hand out.

        With `steal`, where none is left: the last one of the owner that holds the most which it has not begun. What is
        taken with `steal` is begun at once, or two idle owners could take it from each other for ever.
        """
        with self._lock:
            if self._pending:
                index = self._pending.popleft()
            else:
                idle = [i for i, holder in self._owners.items() if i not in self._begun and holder != owner]
                if not steal or not idle:
                    return None
                held = Counter(self._owners[i] for i in idle)
                index = max(reversed(idle), key=lambda i: held[self._owners[i]])
                del self._owners[index]  # so that what is leased later comes later
            self._owners[index] = owner
            if steal:
                self._begun.add(index)
            return Lease(index, self._items[index], self._done.get(index, 0))

    def begin(self, owner: Hashable, index: int, *, reserve: int = 0) -> bool | None:
        """The owner starts on an item, so that nobody takes it over; False if it no longer holds it.

        With a `reserve`: None if fewer rows than that are left to hand out. Items without `rows` count as one.
        """
        with self._lock:
            if self._owners.get(index, _NOBODY) != owner:
                return False
            if index not in self._begun and not self._has_pending(reserve):
                return None
            self._begun.add(index)
            return True

    def complete(self, owner: Hashable, index: int) -> bool:
        """Mark an item as done; False if this owner no longer holds it (then its work must not count).

        May be repeated.
        """
        with self._lock:
            if self._owners.get(index, _NOBODY) != owner:
                return self._completed.get(index, _NOBODY) == owner
            self._complete(index, owner)
            return True

    def release(self, owner: Hashable, done: Mapping[int, int] | None = None, *, redo: bool = False) -> int:
        """Take back all that this owner holds; the number of items that others will get.

        Arguments:
            done: rows that are done of these items, where it is known; one that is done in whole is completed.
            redo: what the owner completed is handed out again, too: its results died with it.
        """
        with self._lock:
            returned = [index for index, holder in self._owners.items() if holder == owner]
            for index in returned:
                if not redo and self._advance(index, (done or {}).get(index, 0)):
                    self._complete(index, owner)
            returned = [index for index in returned if index in self._owners]
            for index in returned:
                del self._owners[index]
                self._begun.discard(index)
            if redo:
                again = [index for index, by in self._completed.items() if by == owner]
                for index in again:
                    del self._completed[index]
                returned += again
            self._pending.extendleft(reversed(returned))
            return len(returned)

    def position(self, done: Mapping[int, int] | None = None) -> dict[str, Any]:
        """What is done, without the items: for `from_dict`, beside them.

        Arguments:
            done: rows that are done of leased items; those of which nothing is known count as not begun.
        """
        with self._lock:
            known = {**self._done, **{i: rows for i, rows in (done or {}).items() if i in self._owners}}
            whole = [index for index, rows in known.items() if self._is_whole(index, rows)]
            return {
                "completed": [*self._completed, *(i for i in whole if i not in self._completed)],
                "done": [
                    [index, rows]
                    for index, rows in sorted(known.items())
                    if rows and index not in whole and index not in self._completed
                ],
            }

    def held(self, owner: Hashable) -> int:
        """Number of items that this owner holds."""
        with self._lock:
            return sum(holder == owner for holder in self._owners.values())

    @property
    def pending(self) -> int:
        """Items that nobody holds yet."""
        return len(self._pending)

    @property
    def leased(self) -> int:
        """Items that are being worked on."""
        return len(self._owners)

    @property
    def completed(self) -> int:
        """Items that are done."""
        return len(self._completed)

    @property
    def finished(self) -> bool:
        """Whether every item is done."""
        with self._lock:
            return not self._pending and not self._owners

    def to_dict(self) -> dict[str, Any]:
        """The position, JSON-able; what is leased counts as not done."""
        with self._lock:
            return {
                "version": 1,
                "items": [dict(item) for item in self._items],
                "completed": list(self._completed),
                "done": [[index, rows] for index, rows in sorted(self._done.items()) if rows],
            }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> WorkQueue:
        """A queue that goes on where `to_dict` was called."""
        if state.get("version") != 1:
            raise ValueError(
                f"Not a WorkQueue state of version 1. Received: version={state.get('version')!r}"
            )
        queue = cls(state["items"])
        completed = [int(index) for index in state["completed"]]
        if len(set(completed)) != len(completed) or not all(0 <= i < len(queue._items) for i in completed):
            raise ValueError(
                f"A WorkQueue state completes items once, by their index. Received: {completed[:20]}"
            )
        queue._start(completed=completed)
        for index, rows in state.get("done", []):
            if not 0 <= int(index) < len(queue._items) or int(rows) < 0:
                raise ValueError(f"A WorkQueue state counts rows of its items. Received: {[index, rows]}")
            queue._done[int(index)] = int(rows)
        return queue

    def _start(self, completed: Sequence[int]) -> None:
        done = set(completed)
        self._pending = deque(index for index in range(len(self._items)) if index not in done)
        self._owners: dict[int, Hashable] = {}
        self._begun: set[int] = set()
        self._completed: dict[int, Hashable] = dict.fromkeys(completed, _NOBODY)
        self._done: dict[int, int] = {}

    def _complete(self, index: int, owner: Hashable) -> None:
        del self._owners[index]
        self._begun.discard(index)
        self._done.pop(index, None)
        self._completed[index] = owner

    def _advance(self, index: int, rows: int) -> bool:
        """More rows of an item are done; whether all are."""
        self._done[index] = max(rows, self._done.get(index, 0))
        return self._is_whole(index, self._done[index])

    def _has_pending(self, rows: int) -> bool:
        """Whether so many rows are left to hand out; looks at no more items than that takes."""
        found = 0
        pending = iter(self._pending)
        while found < rows and (index := next(pending, None)) is not None:
            size = self._items[index].get("rows")
            found += size - self._done.get(index, 0) if isinstance(size, int) else 1
        return found >= rows

    def _is_whole(self, index: int, rows: int) -> bool:
        size = self._items[index].get("rows")
        return isinstance(size, int) and rows >= size > 0


_NOBODY = object()
