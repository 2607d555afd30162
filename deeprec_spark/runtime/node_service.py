"""What the coordinator answers to nodes: one handler for each method they call."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from deeprec_spark.runtime.calls import Handler
from deeprec_spark.runtime.errors import NodeFailure, describe_exit
from deeprec_spark.runtime.job_state import JobState
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.node_log import log_node_lines
from deeprec_spark.runtime.orders import Answer
from deeprec_spark.runtime.phases import PhaseResult, Progress

# A long poll returns empty-handed after this and the node asks again, so that no call outlives its deadline.
MAX_POLL_SECONDS = 20.0
# A worker that is so many times slower than the others shall hold no lease that they could have had.
SLOWED = 10


class NodeService:
    """Handlers over a job's state. A call of a copy that lost its rank raises StaleNodeError."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._members = state.members
        self._nodes = state.nodes

    def handlers(self) -> dict[str, Handler]:
        """Handlers by method name."""
        return {
            "claim": self._claim,
            "announce": self._announce,
            "heartbeat": self._heartbeat,
            "clock": self._clock,
            "exited": self._exited,
            "log": self._log,
            "servers": self._servers,
            "next_phase": self._next_phase,
            "lease": self._lease,
            "complete": self._complete,
            "progress": self._progress,
            "finish": self._finish,
            "fail": self._fail,
            "order": self._order,
            "answer": self._answer,
            "begin": self._begin,
        }

    # --- membership ---

    def _claim(self, message: Message) -> Message:
        rank = _integer(message, "rank")
        member = self._members.claim(
            rank,
            _text(message, "attempt"),
            _text(message, "host"),
            timeout=_poll_seconds(message),
            stopping=lambda: self._state.ended,
        )
        with self._nodes:
            if self._state.ended:
                return Message({"status": "stop"})
            if member is None:
                holder = self._members.get(rank)
                return Message({"status": "standby" if holder is not None and holder.alive else "stop"})
            options = self._state.options
            return Message(
                {
                    "status": "accepted",
                    "incarnation": member.incarnation,
                    "heartbeat_interval": options.heartbeat_interval,
                    "heartbeat_timeout": options.heartbeat_timeout,
                }
            )

    def _announce(self, message: Message) -> Message:
        rank, incarnation = _identity(message)
        address = _text(message, "address") if rank in self._state.options.server_ranks else None
        self._members.announce(rank, incarnation, address)
        return Message()

    def _heartbeat(self, message: Message) -> Message:
        self._members.beat(*_identity(message))
        with self._nodes:
            return Message({"status": "stop" if self._state.ended else "ok"})

    def _clock(self, message: Message) -> Message:
        return Message({"now": time.monotonic()})

    def _exited(self, message: Message) -> Message:
        code = _integer(message, "code")
        reason = _text(message, "reason") or f"its process {describe_exit(code)}"
        self._members.exited(*_identity(message), failed=code != 0, reason=reason)
        return Message()

    def _log(self, message: Message) -> Message:
        rank, incarnation = _identity(message)
        lines = message.header.get("lines")
        if not isinstance(lines, list):
            raise ValueError(f"The message needs a list `lines`. Received: {type(lines).__name__}")
        lines = [str(line) for line in lines]
        with self._nodes:
            member = self._members.get(rank)
            if member is not None and member.incarnation == incarnation:
                member.log_tail.extend(lines)
        log_node_lines(rank, self._state.options.num_ps, lines)
        return Message()

    def _servers(self, message: Message) -> Message:
        ranks = self._state.options.server_ranks
        with self._nodes:
            self._members.current(*_identity(message))
            ready = self._nodes.wait_for(
                lambda: self._state.ended or self._members.all_running(ranks), _poll_seconds(message)
            )
            if self._state.ended:
                return Message({"status": "stop"})
            if not ready:
                return Message({"status": "wait", "missing": self._members.describe_missing(ranks)})
            members = [self._members.get(rank) for rank in ranks]
            return Message({"status": "ready", "addresses": [member.address for member in members if member]})

    # --- phases ---

    def _next_phase(self, message: Message) -> Message:
        rank, incarnation = _identity(message)

        def has_work() -> bool:
            state = self._state.phase
            cut = self._state.cut
            if state is None or state.stopped or (cut is not None and cut.get(rank) != incarnation):
                return False
            return rank in state.ranks and rank not in state.results

        with self._nodes:
            self._members.current(rank, incarnation)
            self._nodes.wait_for(lambda: self._state.ended or has_work(), _poll_seconds(message))
            if self._state.ended:
                return Message({"status": "stop"})
            self._members.current(rank, incarnation)
            state = self._state.phase
            if state is None or not has_work():
                return Message({"status": "wait"})
            state.active(rank)
            state.joined.add((rank, incarnation))
            blob = np.frombuffer(state.phase.blob, dtype=np.uint8)
            return Message({"status": "phase", "phase": state.message_for(rank)}, {"blob": blob})

    def _lease(self, message: Message) -> Message:
        rank, incarnation = _identity(message)
        caller, number = (rank, incarnation, _integer(message, "caller")), _integer(message, "request")
        end = time.monotonic() + _poll_seconds(message)
        with self._nodes:
            while True:
                self._members.current(rank, incarnation)
                state = self._state.running(_integer(message, "phase"))
                if self._state.ended or state is None or state.queue is None:
                    return Message({"status": "stop" if self._state.ended else "none"})
                left = end - time.monotonic()
                request = state.request(caller, number)
                if request.number != number:
                    # Its thread has asked for more since: nobody hears this answer.
                    return Message({"status": "none"})
                if request.lease is None and not state.stopped:
                    request.lease = state.queue.take((rank, incarnation), steal=left > 0)
                lease = request.lease
                if lease is not None:
                    state.active(rank)
                    found = {"index": lease.index, "item": dict(lease.item)}
                    return Message({"status": "item", "done": lease.done, **found})
                # What others hold may come back if they die: stay until it is done.
                if state.stopped or state.queue.leased == state.queue.held((rank, incarnation)):
                    return Message({"status": "none"})
                state.waits(rank)
                if left <= 0:
                    return Message({"status": "wait"})
                self._nodes.wait(left)

    def _complete(self, message: Message) -> Message:
        rank, incarnation = _identity(message)
        with self._nodes:
            self._members.current(rank, incarnation)
            state = self._state.running(_integer(message, "phase"))
            counted = False
            if state is not None and state.queue is not None:
                state.active(rank)
                owner = (rank, incarnation)
                counted = state.queue.complete(owner, _integer(message, "index"))
                self._nodes.notify_all()
            return Message({"counted": counted})

    def _begin(self, message: Message) -> Message:
        rank, incarnation = _identity(message)
        under_way = _integer(message, "under_way") if "under_way" in message.header else 0
        with self._nodes:
            self._members.current(rank, incarnation)
            state = self._state.running(_integer(message, "phase"))
            granted: bool | None = False
            if state is not None and state.queue is not None and not state.stopped:
                state.active(rank)
                owner = (rank, incarnation)
                reserve = SLOWED * (len(state.ranks) - 1) * under_way
                granted = state.queue.begin(owner, _integer(message, "index"), reserve=reserve)
            return Message({"granted": granted})

    def _progress(self, message: Message) -> Message:
        rank, incarnation = _identity(message)
        data = _mapping(message, "data")
        with self._nodes:
            self._members.current(rank, incarnation)
            state = self._state.running(_integer(message, "phase"))
            if state is not None:
                state.active(rank)
                state.progress[rank] = Progress(rank, data)
                state.unseen_progress = True
                self._state.driver.notify_all()
        return Message()

    def _finish(self, message: Message) -> Message:
        rank, incarnation = _identity(message)
        result = PhaseResult(rank, _mapping(message, "data"), message.array("blob", np.uint8).tobytes())
        with self._nodes:
            self._members.current(rank, incarnation)
            state = self._state.running(_integer(message, "phase"))
            if state is not None and rank in state.ranks:
                state.results[rank] = result
                self._state.driver.notify_all()
        return Message()

    def _fail(self, message: Message) -> Message:
        rank, incarnation = _identity(message)
        with self._nodes:
            member = self._members.current(rank, incarnation)
            trace, tail = _text(message, "traceback"), tuple(member.log_tail)
            lasting = message.header.get("lasting") is True
            self._state.fail(
                NodeFailure(rank, self._members.name(rank), _text(message, "reason"), trace, tail, lasting)
            )
        return Message()

    # --- orders ---

    def _order(self, message: Message) -> Message:
        rank, incarnation = _identity(message)
        seen = _integer(message, "seen")
        orders = self._state.orders
        with self._nodes:
            self._members.current(rank, incarnation)
            self._nodes.wait_for(
                lambda: self._state.ended or orders.next_for(rank, incarnation, seen) is not None,
                _poll_seconds(message),
            )
            if self._state.ended:
                return Message({"status": "stop"})
            self._members.current(rank, incarnation)
            order = orders.next_for(rank, incarnation, seen)
            if order is None:
                return Message({"status": "wait"})
            found = {"number": order.number, "kind": order.kind, "payload": dict(order.payload)}
            return Message({"status": "order", **found})

    def _answer(self, message: Message) -> Message:
        rank, incarnation = _identity(message)
        answer = Answer(
            _mapping(message, "data"),
            message.array("blob", np.uint8).tobytes(),
            _text(message, "error_type"),
            _text(message, "error"),
        )
        with self._nodes:
            self._members.current(rank, incarnation)
            self._state.orders.answer(_integer(message, "number"), rank, incarnation, answer)
            self._state.changed()
        return Message()


def _integer(message: Message, name: str) -> int:
    value: Any = message.header.get(name)
    if type(value) is not int:
        raise ValueError(f"The message needs an integer {name!r}. Received: {name}={str(value)[:100]}")
    return value


def _text(message: Message, name: str) -> str:
    value: Any = message.header.get(name)
    if not isinstance(value, str):
        raise ValueError(f"The message needs a string {name!r}. Received: {name}={str(value)[:100]}")
    return value


def _mapping(message: Message, name: str) -> dict[str, Any]:
    value: Any = message.header.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"The message needs an object {name!r}. Received: {name}={str(value)[:100]}")
    return value


def _identity(message: Message) -> tuple[int, int]:
    return _integer(message, "rank"), _integer(message, "incarnation")


def _poll_seconds(message: Message) -> float:
    value: Any = message.header.get("timeout", MAX_POLL_SECONDS)
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"The message needs `timeout` in seconds. Received: timeout={str(value)[:100]}")
    return float(min(MAX_POLL_SECONDS, value))
