"""A node's side of the coordinator: registration, heartbeats, phases, leases."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deeprec_spark.redaction import redact
from deeprec_spark.runtime.calls import retried
from deeprec_spark.runtime.errors import (
    ConnectionLostError,
    JobEndedError,
    RegistrationError,
    StaleNodeError,
    is_lasting,
)
from deeprec_spark.runtime.messages import MAX_MESSAGE_BYTES, Message
from deeprec_spark.runtime.transport import Connection, TlsOptions

logger = logging.getLogger(__name__)

_POLL_SECONDS = 20.0
_CALL_SECONDS = 60.0
_RETRY_SECONDS = 15.0
_MAX_TRACEBACK = 20_000


@dataclass(frozen=True)
class PhaseTask:
    """One worker's part of a phase: what to do, and its items where they were assigned beforehand."""

    number: int
    kind: str
    payload: Mapping[str, Any]
    blob: bytes
    dynamic: bool
    items: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class LeasedItem:
    """An item to work on; behaves like the mapping it holds. `done` of its rows were trained before."""

    data: Mapping[str, Any]
    index: int = field(repr=False)
    done: int = field(default=0, repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]


@dataclass(frozen=True)
class NodeOrder:
    """What the driver tells this node to do beside its work."""

    number: int
    kind: str
    payload: Mapping[str, Any]


class NodeClient:
    """Calls that every node and its supervisor make. Safe from several threads."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        rank: int,
        incarnation: int = 0,
        tls: TlsOptions | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self._secrets = (token,)
        self._closed = threading.Event()
        self._requests = itertools.count(1)
        self._connection = Connection(
            address, token=token, tls=tls, timeout=_CALL_SECONDS, max_bytes=max_bytes
        )

    def claim(self, attempt: str, host: str, *, timeout: float = _POLL_SECONDS) -> Mapping[str, Any]:
        """Ask for this rank: status `accepted` (with the incarnation), `standby` (ask again) or `stop`."""
        answer = self._call("claim", {"attempt": attempt, "host": host, "timeout": timeout}).header
        if answer["status"] == "accepted":
            self.incarnation = answer["incarnation"]
        return answer

    def announce(self, address: str | None) -> None:
        """This node runs (and, a server, listens at `address`)."""
        self._repeat("announce", {"address": address})

    def heartbeat(self) -> bool:
        """A sign of life; False if the job has ended."""
        return bool(self._call("heartbeat", {}, timeout=10.0).header["status"] == "ok")

    def clock(self) -> float:
        """The driver's monotonic clock, in seconds."""
        return float(self._repeat("clock", {}, timeout=10.0).header["now"])

    def exited(self, code: int, reason: str = "", timeout: float | None = None) -> None:
        """The node's process ended with this exit code, or is about to, for a reason that the code does not tell."""
        self._call("exited", {"code": code, "reason": reason}, timeout=timeout)

    def log(self, lines: Sequence[str]) -> None:
        """Lines for the driver's log."""
        self._call("log", {"lines": list(lines)})

    def servers(self, timeout: float) -> list[str]:
        """The addresses of all servers, in rank order, once they run.

        Raises:
            RegistrationError: not all run after `timeout` seconds; names the missing ones.
            JobEndedError: the job ended.
        """
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            answer = self._repeat("servers", {"timeout": min(left, _POLL_SECONDS)}).header
            if answer["status"] == "ready":
                return list(answer["addresses"])
            if answer["status"] == "stop":
                raise JobEndedError
            if left <= 0:
                raise RegistrationError(
                    f"Servers did not start in {timeout:.0f} s. Received: {answer['missing']}"
                )

    def fail(self, error: BaseException) -> None:
        """Report this node's failure with its traceback; the driver raises it."""
        text = redact("".join(traceback.format_exception(error)), self._secrets)
        reason = redact(f"{type(error).__name__}: {error}"[:2000], self._secrets)
        if len(text) > _MAX_TRACEBACK:
            text = text[: _MAX_TRACEBACK // 2] + "\n  …\n" + text[-_MAX_TRACEBACK // 2 :]
        self._call("fail", {"reason": reason, "traceback": text, "lasting": is_lasting(error)})

    def next_order(self, seen: int) -> NodeOrder | None:
        """Wait for the first order after number `seen`; None when the job ends."""
        while True:
            answer = self._call("order", {"seen": seen, "timeout": _POLL_SECONDS}).header
            if answer["status"] == "stop":
                return None
            if answer["status"] == "order":
                return NodeOrder(answer["number"], answer["kind"], answer["payload"])

    def answer(
        self, number: int, data: Mapping[str, Any], blob: bytes = b"", error: Exception | None = None
    ) -> None:
        """Answer an order, or say why it could not be carried out."""
        kind = "" if error is None else type(error).__name__
        text = "" if error is None else f"{error}"[:4000]
        header = {"number": number, "data": dict(data), "error_type": kind, "error": text}
        self._repeat("answer", header, {"blob": np.frombuffer(blob, dtype=np.uint8)})

    def close(self) -> None:
        """Close the connection."""
        self._closed.set()
        self._connection.close()

    def _repeat(
        self,
        method: str,
        header: Mapping[str, Any],
        arrays: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Message:
        """`_call`, sent again while the connection is lost: for what may arrive twice."""
        return retried(lambda: self._call(method, header, arrays, timeout), _RETRY_SECONDS, self._closed)

    def _call(
        self,
        method: str,
        header: Mapping[str, Any],
        arrays: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Message:
        message = Message({"rank": self.rank, "incarnation": self.incarnation, **header}, arrays or {})
        return self._connection.call(method, message, timeout=timeout)


class WorkerClient(NodeClient):
    """What a worker's main function talks to. A connection that breaks for a moment is no error.

    Example:
        >>> while (task := client.next_phase()) is not None:    # doctest: +SKIP
        ...     while (item := client.lease()) is not None:
        ...         work(item)
        ...         client.complete(item)
        ...     client.finish({"rows": rows})
    """

    _task: PhaseTask | None = None

    def next_phase(self) -> PhaseTask | None:
        """Wait for the next phase in which this worker takes part; None when the job ends."""
        while True:
            answer = self._repeat("next_phase", {"timeout": _POLL_SECONDS})
            status = answer.header["status"]
            if status == "stop":
                return None
            if status == "phase":
                found = dict(answer.header["phase"])
                found["items"] = tuple(found["items"])
                self._task = PhaseTask(**found, blob=answer.array("blob", np.uint8).tobytes())
                self._assigned = deque(LeasedItem(item, index) for index, item in enumerate(self._task.items))
                return self._task

    def lease(self, *, wait: bool = True) -> LeasedItem | None:
        """The next item of the phase, leased or assigned; None when there is nothing more to do.

        With `wait` it stays while other workers still hold items, since those come back if a worker dies: hold no
        uncompleted item in the same thread then, or use `wait=False`, which returns None where nothing is free now.
        Near the end `wait` also takes over what another worker has leased but not begun. What it gives is begun.

        Raises:
            JobEndedError: the job ended.
        """
        task = self._current()
        if not task.dynamic:
            return self._assigned.popleft() if self._assigned else None
        header = {
            "phase": task.number,
            "timeout": _POLL_SECONDS if wait else 0.0,
            "caller": threading.get_ident(),
            "request": next(self._requests),
        }
        while True:
            answer = self._repeat("lease", header).header
            status = answer["status"]
            if status == "item":
                return LeasedItem(answer["item"], answer["index"], answer["done"])
            if status == "stop":
                raise JobEndedError
            if status == "none" or not wait:
                return None

    def begin(self, item: LeasedItem, under_way: int = 0) -> bool | None:
        """Before the first row of an item is used; False if an idle worker has taken it over: leave it then.

        Arguments:
            under_way: rows of items begun before that are still trained. Near the end of a phase the answer may then be
                None: others might run out of rows meanwhile, and could take this item over. Ask again once there are
                fewer; without any the answer is never None.
        """
        task = self._current()
        if not task.dynamic:
            return True
        header = {"phase": task.number, "index": item.index, "under_way": under_way}
        granted = self._repeat("begin", header).header["granted"]
        return None if granted is None else bool(granted)

    def complete(self, item: LeasedItem) -> bool:
        """The item's samples are trained; False if it was given to another worker meanwhile."""
        task = self._current()
        if not task.dynamic:
            return True
        header = {"phase": task.number, "index": item.index}
        return bool(self._repeat("complete", header).header["counted"])

    def items(self) -> Iterator[LeasedItem]:
        """Lease items until there are none; each is completed when the next one is asked for."""
        while (item := self.lease()) is not None:
            if self.begin(item):
                yield item
                self.complete(item)

    def progress(self, data: Mapping[str, Any]) -> None:
        """Report JSON-able progress to the driver's callback."""
        self._repeat("progress", {"phase": self._current().number, "data": dict(data)})

    def finish(self, data: Mapping[str, Any] | None = None, blob: bytes = b"") -> None:
        """End this worker's part of the phase with JSON-able data and bytes."""
        header = {"phase": self._current().number, "data": dict(data or {})}
        self._repeat("finish", header, {"blob": np.frombuffer(blob, dtype=np.uint8)})
        self._task = None

    def _current(self) -> PhaseTask:
        if self._task is None:
            raise RuntimeError("No phase is running here: call next_phase() first. Received: no phase")
        return self._task


class Heartbeat:
    """Sends heartbeats from a thread of its own until closed.

    `on_stop(reason)` is called once, from that thread, when the job has ended, when this copy was replaced, or when
    the driver was out of reach for `timeout` seconds.
    """

    def __init__(
        self, client: NodeClient, *, interval: float, timeout: float, on_stop: Callable[[str], None]
    ) -> None:
        self._client = client
        self._interval = interval
        self._timeout = timeout
        self._on_stop = on_stop
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        self._last = time.monotonic()
        while not self._closed.wait(self._interval):
            reason = self._beat()
            if reason is not None:
                self._on_stop(reason)
                return

    def _beat(self) -> str | None:
        """Why this node must stop, if it must."""
        try:
            if not self._client.heartbeat():
                return "the job has ended"
        except StaleNodeError as error:
            return str(error)
        except JobEndedError:
            return "the job has ended"
        except Exception as error:  # whatever it is: a node whose heartbeats end counts as lost
            if time.monotonic() - self._last > self._timeout:
                return f"the driver was out of reach for {self._timeout:.0f} s: {error}"
            expected = isinstance(error, (ConnectionLostError, TimeoutError, PermissionError))
            logger.warning("No heartbeat to the driver: %s", error, exc_info=None if expected else error)
            return None
        self._last = time.monotonic()
        return None

    def close(self) -> None:
        """End the thread; `on_stop` is not called afterwards."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(30.0)
