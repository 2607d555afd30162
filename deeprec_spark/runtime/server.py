"""A parameter server: one shard of all tables and of the dense parameters, behind a ChannelServer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.store import PullReply, PullRequest, PushRequest
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.runtime.calls import Handler
from deeprec_spark.runtime.errors import JobEndedError, StaleNodeError
from deeprec_spark.runtime.gather import Gather
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.options import (
    DEFAULT_STEP_SECONDS,
    Mode,
    Placement,
    check_topology,
    describe_rank,
)
from deeprec_spark.runtime.store_messages import (
    Sender,
    decode_pull,
    decode_push,
    encode_pull_reply,
    file_to_dict,
    spec_from_dict,
    wire_of,
)
from deeprec_spark.runtime.synchronous import merge_pulls, merge_pushes

_COPIES_KEPT = 8
"""Of each worker: the last one, and those whose loss the driver may not have dealt with yet."""


@dataclass(frozen=True)
class ServerOptions:
    """The topology as a server needs it; `sync_timeout` is how many seconds ranks wait for each other in a step."""

    num_ps: int
    num_workers: int
    mode: Mode = "async"
    sync_timeout: float = DEFAULT_STEP_SECONDS
    placement: Placement = "separate"

    def __post_init__(self) -> None:
        check_topology(self.num_ps, self.num_workers, self.mode, self.placement)

    @property
    def worker_ranks(self) -> range:
        """The ranks of the workers."""
        return range(self.num_ps, self.num_ps + self.num_workers)


class SequenceGuard:
    """Tells new requests from repeated ones, and turns replaced workers away. Callers hold a lock."""

    def __init__(self, num_ps: int) -> None:
        self._num_ps = num_ps
        self._newest: dict[int, tuple[int, int]] = {}

    def is_new(self, sender: Sender) -> bool:
        """Whether this request has not been seen; a StaleNodeError if another copy of the rank has taken over."""
        incarnation, sequence = self._newest.get(sender.rank, (0, 0))
        if sender.incarnation < incarnation:
            raise StaleNodeError(
                f"{describe_rank(sender.rank, self._num_ps)} was replaced; this copy must end. "
                f"Received: incarnation={sender.incarnation}, newest={incarnation}"
            )
        if sender.incarnation == incarnation and sender.sequence <= sequence:
            if sender.sequence < sequence:
                raise ValueError(
                    f"A request older than the last one. Received: {sender}, last sequence={sequence}"
                )
            return False
        self._newest[sender.rank] = (sender.incarnation, sender.sequence)
        return True

    def turn_away(self, rank: int, incarnation: int) -> None:
        """Take nothing more from this copy of a rank."""
        if self._newest.get(rank, (0, 0))[0] <= incarnation:
            self._newest[rank] = (incarnation + 1, 0)


@dataclass
class _Copy:
    """One incarnation of a worker: its pushes that are being applied, and what came of the last one."""

    pushing: int = 0
    sequence: int = 0
    step: int = 0
    position: Any = None
    failed: Exception | None = None

    def done(self, sequence: int, step: int, position: Any) -> None:
        """A push was applied. Of two at a time the older one may be so later: the newer one is what counts."""
        if sequence >= self.sequence:
            self.sequence, self.step, self.position = sequence, step, position


class ParameterServer:
    """The handlers of one server over its store.

    Asynchronous (and with one worker): requests are applied as they come, in parallel. Synchronous: each training
    pull and each push waits for those of all ranks, and is applied once, merged.

    Arguments:
        store: this server's shard.
    """

    def __init__(self, store: LocalStore, options: ServerOptions) -> None:
        self._store = store
        self._options = options
        self._lock = threading.Condition()
        self._copies: dict[int, dict[int, _Copy]] = {rank: {} for rank in options.worker_ranks}
        self._pulls = SequenceGuard(options.num_ps)
        self._pushes = SequenceGuard(options.num_ps)
        self._synchronous = options.mode == "sync" and options.num_workers > 1
        ranks, timeout = options.worker_ranks, options.sync_timeout
        self._pull_gather: Gather[PullRequest, PullReply] = Gather(
            "pull", ranks, options.num_ps, self._pull_together, timeout
        )
        self._push_gather: Gather[PushRequest, int] = Gather(
            "push", ranks, options.num_ps, self._push_together, timeout
        )

    def handlers(self) -> dict[str, Handler]:
        """Handlers by method name."""
        return {
            "create_tables": self._create_tables,
            "init_dense": self._init_dense,
            "pull": self._pull,
            "push": self._push,
            "evict": self._evict,
            "save": self._save,
            "snapshot": self._snapshot,
            "write_snapshot": self._write_snapshot,
            "drop_snapshot": self._drop_snapshot,
            "restore": self._restore,
            "statistics": self._statistics,
        }

    def stop(self) -> None:
        """Wake all calls that wait for other ranks; they fail."""
        ended = JobEndedError("The job has ended.")
        self._pull_gather.fail(ended)
        self._push_gather.fail(ended)

    def fence(self, rank: int, incarnation: int, timeout: float = 60.0) -> Any:
        """Take no more pushes of a worker that was lost; where the last one of them put it in the data.

        A push that is being applied is waited for. None if there was no push, or none that told its position.

        Raises:
            TimeoutError: the running push did not end in time.
        """
        with self._lock:
            self._pushes.turn_away(rank, incarnation)
            self._pulls.turn_away(rank, incarnation)
            copy = self._copies.get(rank, {}).get(incarnation)
            if copy is None:
                return None
            if not self._lock.wait_for(lambda: not copy.pushing, timeout):
                raise TimeoutError(
                    f"A push of {describe_rank(rank, self._options.num_ps)} was still running after {timeout:.0f} s."
                )
            return copy.position

    def _create_tables(self, message: Message) -> Message:
        specs = [spec_from_dict(entry) for entry in message.header["specs"]]
        self._store.create_tables(specs)
        return Message()

    def _init_dense(self, message: Message) -> Message:
        dense, state = message.array("dense", np.float32), message.array("state", np.float32)
        self._store.init_dense(dense, state, Optimizer.from_dict(message.header["optimizer"]))
        return Message()

    def _pull(self, message: Message) -> Message:
        request, wire = decode_pull(message), wire_of(message)
        tables = list(request.keys)
        if request.train and self._synchronous:
            sender = Sender.of(message)
            self._store.check(request)
            reply = self._pull_gather.exchange(sender.rank, sender.sequence, request)
            return encode_pull_reply(reply, tables, wire)
        if request.train and not self._is_new(self._pulls, message):
            # The rows were made and counted when it came first; only its answer was lost.
            request = replace(request, train=False)
        return encode_pull_reply(self._store.pull(request), tables, wire)

    def _pull_together(self, requests: Mapping[int, PullRequest]) -> dict[int, PullReply]:
        merged = merge_pulls(requests)
        reply = self._store.pull(merged.request)
        return {
            rank: merged.reply_for(rank, reply, dense=request.dense) for rank, request in requests.items()
        }

    def _push(self, message: Message) -> Message:
        request = decode_push(message)
        if self._synchronous:
            sender = Sender.of(message)
            self._store.check(request)
            return Message({"step": self._push_gather.exchange(sender.rank, sender.sequence, request)})
        sender = self._sender(message)
        with self._lock:
            known = not self._pushes.is_new(sender)
            copy = self._copy(sender)
            if known:
                self._wait_for_first(copy, sender)
                return Message({"step": copy.step})
            copy.failed = None
            copy.pushing += 1
        try:
            step = self._store.push(request)
            with self._lock:
                copy.done(sender.sequence, step, message.header.get("position"))
        except Exception as error:
            with self._lock:
                if sender.sequence > copy.sequence:
                    copy.failed = error
            raise
        finally:
            with self._lock:
                copy.pushing -= 1
                self._lock.notify_all()
        return Message({"step": step})

    def _copy(self, sender: Sender) -> _Copy:
        """What is kept of this copy of a worker. That of long replaced ones goes, however many there were."""
        copies = self._copies[sender.rank]
        if sender.incarnation not in copies:
            for old in sorted(copies)[: max(0, len(copies) - _COPIES_KEPT + 1)]:
                if not copies[old].pushing:
                    del copies[old]
            copies[sender.incarnation] = _Copy()
        return copies[sender.incarnation]

    def _wait_for_first(self, copy: _Copy, sender: Sender) -> None:
        """A push came again because its answer was lost: answer as it was, or would have been, answered.

        It may still be at work. Whoever is told that it is done takes a save for one that has it.
        """
        timeout = self._options.sync_timeout
        if not self._lock.wait_for(lambda: not copy.pushing, timeout):
            raise TimeoutError(
                f"A push was still running after {timeout:g} s (cluster.deadlines.step_secs). Received: {sender}"
            )
        if copy.failed is not None:
            raise copy.failed

    def _sender(self, message: Message) -> Sender:
        sender = Sender.of(message)
        if sender.rank not in self._options.worker_ranks:
            ranks = list(self._options.worker_ranks)
            raise ValueError(f"Workers of this job are ranks {ranks}. Received: rank={sender.rank}")
        return sender

    def _is_new(self, guard: SequenceGuard, message: Message) -> bool:
        sender = self._sender(message)
        with self._lock:
            return guard.is_new(sender)

    def _push_together(self, requests: Mapping[int, PushRequest]) -> dict[int, int]:
        step = self._store.push(merge_pushes(requests))
        return dict.fromkeys(requests, step)

    def _evict(self, message: Message) -> Message:
        return Message({"evicted": dict(self._store.evict())})

    def _save(self, message: Message) -> Message:
        files = self._store.save(str(message.header["directory"]))
        return Message({"files": [file_to_dict(file) for file in files]})

    def _restore(self, message: Message) -> Message:
        header = message.header
        warm = header.get("warm_start")
        self._store.restore(
            [str(directory) for directory in header["chain"]],
            header.get("save_id"),
            None if warm is None else WarmStart.from_dict(warm),
        )
        return Message()

    def _snapshot(self, message: Message) -> Message:
        self._store.snapshot(str(message.header["save_id"]), message.header.get("base"))
        return Message()

    def _write_snapshot(self, message: Message) -> Message:
        header = message.header
        files = self._store.write_snapshot(str(header["save_id"]), str(header["directory"]))
        return Message({"files": [file_to_dict(file) for file in files]})

    def _drop_snapshot(self, message: Message) -> Message:
        self._store.drop_snapshot(str(message.header["save_id"]))
        return Message()

    def _statistics(self, message: Message) -> Message:
        found = self._store.statistics()
        return Message({"tables": {table: dict(values) for table, values in found.items()}})
