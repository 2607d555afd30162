"""What both transports of calls have in common: handlers by method, and errors that cross the wire as themselves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from deeprec_spark.embedding.store import SaveBaseError
from deeprec_spark.runtime.errors import ConnectionLostError, JobEndedError, RemoteError, StaleNodeError
from deeprec_spark.runtime.messages import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Message], Message]

# Errors that cross the wire as themselves; anything else arrives as RemoteError.
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ValueError,
        KeyError,
        TypeError,
        TimeoutError,
        FileNotFoundError,
        StaleNodeError,
        JobEndedError,
        SaveBaseError,
    )
}


def handler_of(handlers: Mapping[str, Handler], method: str) -> Handler:
    """The handler of a method; a ValueError if there is none."""
    handler = handlers.get(method)
    if handler is None:
        raise ValueError(f"There is no method of this name. Received: {method[:100]!r}")
    return handler


def error_message(method: str, error: Exception) -> Message:
    """The answer that tells a caller of a handler's error; logged here if it is not of the kinds that cross."""
    kind = type(error).__name__
    if kind not in ERRORS:
        logger.error("Method %s failed", method, exc_info=error)
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return Message({"error": {"type": kind, "message": text}})


def checked(answer: Message, address: str, method: str) -> Message:
    """The answer; raises the error that it tells of."""
    error = answer.header.get("error")
    if error is None:
        return answer
    kind = ERRORS.get(error["type"])
    if kind is not None:
        raise kind(error["message"])
    raise RemoteError(f"{address} failed in {method}: {error['type']}: {error['message']}")


def retried(call: Callable[[], T], seconds: float, closed: threading.Event | None = None) -> T:
    """Repeat a call while its connection is lost, with growing pauses, for at most `seconds` after the loss.

    A call that lasted longer than that, before its connection broke, is tried again all the same.
    """
    cancelled = closed or threading.Event()
    end = float("inf")
    pause = 0.05
    while True:
        began = time.monotonic()
        try:
            return call()
        except ConnectionLostError as error:
            if end == float("inf") or time.monotonic() - began > seconds:
                end = time.monotonic() + seconds
            if time.monotonic() + pause >= end or cancelled.wait(pause):
                raise
            logger.warning("Trying again: %s", error)
            pause = min(2 * pause, 1.0)
