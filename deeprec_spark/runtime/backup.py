"""Synchronous steps that do not wait for all workers: the server's side, and the store of a worker."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.store import PushRequest
from deeprec_spark.runtime.calls import Handler
from deeprec_spark.runtime.errors import JobEndedError
from deeprec_spark.runtime.gather import Gather
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.remote_store import RemoteStore
from deeprec_spark.runtime.server import ParameterServer, ServerOptions
from deeprec_spark.runtime.store_messages import Sender, decode_push
from deeprec_spark.runtime.synchronous import merge_pushes


class Admissions:
    """Decides, on one server for all of them, whose push is part of a step: the first so many that ask.

    Numbers of steps begin at 1. Safe from many threads.

    Example:
        >>> admissions = Admissions(needed=1)
        >>> admissions.admit(rank=0, step=1), admissions.admit(rank=1, step=1)
        ((True, 2), (False, 2))
    """

    def __init__(self, needed: int) -> None:
        self._needed = needed
        self._lock = threading.Lock()
        self._step = 1
        self._members: set[int] = set()
        self._last: dict[int, int] = {}

    def admit(self, rank: int, step: int) -> tuple[bool, int]:
        """Whether this worker's push is part of its step, and which step is the current one after that.

        To ask again gives the same answer. A ValueError for a step that is not there yet.
        """
        with self._lock:
            if step > self._step:
                raise ValueError(f"Step {self._step} is the current one. Received: rank={rank}, step={step}")
            if self._last.get(rank) == step:
                return True, self._step
            if step < self._step:
                return False, self._step
            self._last[rank] = step
            self._members.add(rank)
            if len(self._members) >= self._needed:
                self._step += 1
                self._members = set()
            return True, self._step


class BackupServer:
    """A server of synchronous steps that take `num_workers - backup_workers` pushes each.

    A worker asks the first server whether its push is in time, then pushes to all of them; so every server merges the
    same ones, in rank order. A pull for a step waits until the step before is applied; it is not merged with others.

    Arguments:
        store: this server's shard.
        options: with backup workers.
    """

    def __init__(self, store: LocalStore, options: ServerOptions, backup_workers: int) -> None:
        needed = options.num_workers - backup_workers
        self._ranks = options.worker_ranks
        self._store = store
        # Pulls, and all that is no step, are those of an asynchronous server.
        self._server = ParameterServer(store, replace(options, mode="async"))
        self._pushes: Gather[PushRequest, int] = Gather(
            "push", options.worker_ranks, options.num_ps, self._apply, options.sync_timeout, needed=needed
        )
        self._admissions = Admissions(needed)

    def handlers(self) -> dict[str, Handler]:
        """Handlers by method name."""
        handlers = self._server.handlers()
        pull = handlers["pull"]

        def pull_in_turn(message: Message) -> Message:
            if message.header.get("train") is True:
                self._pushes.wait_for(Sender.of(message).sequence)
            return pull(message)

        return {**handlers, "pull": pull_in_turn, "push": self._push, "admit": self._admit}

    def stop(self) -> None:
        """Wake all calls that wait for other ranks; they fail."""
        self._server.stop()
        self._pushes.fail(JobEndedError("The job has ended."))

    def fence(self, rank: int, incarnation: int, timeout: float = 60.0) -> Any:
        """See `ParameterServer.fence`."""
        return self._server.fence(rank, incarnation, timeout)

    def _admit(self, message: Message) -> Message:
        sender = Sender.of(message)
        if sender.rank not in self._ranks:
            raise ValueError(
                f"Workers of this job are ranks {list(self._ranks)}. Received: rank={sender.rank}"
            )
        admitted, current = self._admissions.admit(sender.rank, sender.sequence)
        return Message({"admitted": admitted, "current": current})

    def _push(self, message: Message) -> Message:
        request = decode_push(message)
        sender = Sender.of(message)
        self._store.check(request)
        return Message({"step": self._pushes.exchange(sender.rank, sender.sequence, request)})

    def _apply(self, requests: Mapping[int, PushRequest]) -> dict[int, int]:
        return dict.fromkeys(requests, self._store.push(merge_pushes(requests)))


class BackupStore(RemoteStore):
    """The store of a worker that a step may go on without.

    `behind` is how many of its next batches the worker is to leave out, since their steps are over; `dropped` whether
    its last push was in vain.
    """

    behind = 0
    dropped = False
    _step = 0

    def push(self, request: PushRequest) -> int:
        """Give back the gradients of a step, if it is not over: then they are dropped.

        Returns:
            The number of updates applied as far as this worker knows.
        """
        number = self._pushes + 1
        answer = self.ask_first("admit", {"sequence": number})
        self.dropped = not answer["admitted"]
        if self.dropped:
            current = int(answer["current"])
            self.behind = current - number - 1
            self._pulls = self._pushes = current - 1
        else:
            self._step = super().push(request)
        return self._step
