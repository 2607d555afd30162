"""A node's control thread: carries out the driver's orders while the node works."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.runtime.errors import ConnectionLostError, JobEndedError, StaleNodeError
from deeprec_spark.runtime.gate import StepGate
from deeprec_spark.runtime.store_messages import file_to_dict
from deeprec_spark.runtime.worker_client import NodeClient, NodeOrder

logger = logging.getLogger(__name__)

OrderHandler = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], bytes]]
Capture = Callable[[int], tuple[Mapping[str, Any], bytes]]

# These read or write files: other orders must not wait for them.
_SLOW = frozenset({"write", "restore"})
_RETRY_SECONDS = 1.0
_LOST = (ConnectionLostError, JobEndedError, StaleNodeError, TimeoutError, OSError)


class NodeControl:
    """Asks the coordinator for orders and carries them out, until closed or the job ends.

    Arguments:
        client: a connection of its own, so that no long call of the node delays an order.
        handlers: by the kind of order; their errors are the answer.
        on_end: called once if the job has ended, or this copy was replaced.
    """

    def __init__(
        self, client: NodeClient, handlers: Mapping[str, OrderHandler], on_end: Callable[[], None]
    ) -> None:
        self._client = client
        self._handlers = dict(handlers)
        self._on_end = on_end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Take no more orders."""
        self._closed.set()
        self._client.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        seen = 0
        while not self._closed.is_set():
            try:
                order = self._client.next_order(seen)
            except StaleNodeError:
                order = None
            except Exception as error:  # whatever it is, later orders must be heard
                if not self._closed.is_set():
                    # The heartbeat decides when a driver out of reach is given up.
                    expected = isinstance(error, _LOST)
                    logger.warning(
                        "No order from the driver: %s", error, exc_info=None if expected else error
                    )
                    self._closed.wait(_RETRY_SECONDS)
                continue
            if order is None:
                if not self._closed.is_set():
                    self._on_end()
                return
            seen = order.number
            if order.kind in _SLOW:
                name = f"control-{order.kind}"
                threading.Thread(target=self._carry_out, args=(order,), name=name, daemon=True).start()
            else:
                self._carry_out(order)

    def _carry_out(self, order: NodeOrder) -> None:
        data: Mapping[str, Any] = {}
        blob = b""
        error: Exception | None = None
        try:
            handler = self._handlers.get(order.kind)
            if handler is None:
                raise ValueError(f"This node has no such order. Received: {order.kind!r}")
            data, blob = handler(order.payload)
        except Exception as found:  # whatever it is, the driver must hear of it
            logger.warning("Order %s failed", order.kind, exc_info=found)
            error = found
        self._answer(order, data, blob, error)

    def _answer(
        self, order: NodeOrder, data: Mapping[str, Any], blob: bytes, error: Exception | None
    ) -> None:
        try:
            self._client.answer(order.number, data, blob, error)
        except _LOST as lost:
            logger.warning("The answer to order %s did not reach the driver: %s", order.kind, lost)
        except Exception as refused:  # it is too large, or nothing that can be sent
            logger.warning("The answer to order %s cannot be sent", order.kind, exc_info=refused)
            if error is None:
                self._answer(order, {}, b"", refused)


def store_orders(store: LocalStore) -> dict[str, OrderHandler]:
    """The orders to a node that holds tables: its part of saves and restores."""

    def snapshot(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        # One that is still fixed was given up, though word of that did not come.
        store.drop_snapshots()
        store.snapshot(str(payload["save_id"]), payload["base"])
        return {"step": store.step}, b""

    def write(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        started = time.monotonic()
        files = store.write_snapshot(str(payload["save_id"]), str(payload["directory"]))
        seconds = time.monotonic() - started
        return {"files": [file_to_dict(file) for file in files], "seconds": seconds}, b""

    def drop(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        store.drop_snapshot(str(payload["save_id"]))
        return {}, b""

    def restore(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        warm = payload.get("warm_start")
        store.restore(
            [str(part) for part in payload["chain"]],
            payload["save_id"],
            None if warm is None else WarmStart.from_dict(warm),
        )
        return {"step": store.step}, b""

    return {"snapshot": snapshot, "write": write, "drop": drop, "restore": restore}


def server_orders(turn_away: Callable[[int, int], Any]) -> dict[str, OrderHandler]:
    """The orders to a node that serves.

    Arguments:
        turn_away: takes no more pushes of a rank's incarnation, and tells where its last one put it in the data.
    """

    def fence(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        return {"position": turn_away(int(payload["rank"]), int(payload["incarnation"]))}, b""

    return {"fence": fence}


def worker_orders(gate: StepGate, capture: Callable[[], Capture | None]) -> dict[str, OrderHandler]:
    """The orders to a worker: stop between two steps, say where it stands, go on.

    Arguments:
        capture: gives what the worker's main has set to tell its state at a cut, or None.
    """

    def hold(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        return {"begun": gate.hold(int(payload["phase"]))}, b""

    def run_to(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        phase = int(payload["phase"])
        standing = gate.run_to(phase, int(payload["target"]), float(payload["timeout"]))
        tell = capture()
        state, blob = ({}, b"") if tell is None else tell(phase)
        return {**standing.to_dict(), "state": dict(state)}, blob

    def release(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        return {"pause": gate.release(stop=bool(payload["stop"]))}, b""

    return {"hold": hold, "run_to": run_to, "release": release}
