"""Calls to a server that is in this process: its handlers, without the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deeprec_spark.runtime.calls import Handler
from deeprec_spark.runtime.messages import Message

Array = npt.NDArray[Any]


class Caller(Protocol):
    """Whom a client of servers calls: a `Channel`, or a `Loopback`."""

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        """Send a message and wait for the answer."""

    def close(self) -> None:
        """Make no more calls."""


class Loopback:
    """Stands in for the `Channel` to a server of the same process. Its errors are raised as the handler raised them.

    Nothing is encoded: arrays of a call and of its answer are the ones that were given, which nobody may change.
    Handlers that wait have deadlines of their own, so `timeout` is not looked at.

    Arguments:
        handlers: of the server, by method name.

    Example:
        >>> server = Loopback({"double": lambda message: Message({}, {"x": 2 * message.array("x", np.int64)})})
        >>> server.call("double", Message({}, {"x": [np.arange(2), np.arange(1)]})).array("x", np.int64).tolist()
        [0, 2, 0]
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = dict(handlers)

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        """Call the handler of this name in the caller's thread."""
        handler = self._handlers.get(method)
        if handler is None:
            raise ValueError(f"There is no method of this name. Received: {method[:100]!r}")
        return _joined(handler(_joined(message)))

    def close(self) -> None:
        """Nothing is open."""


def _joined(message: Message) -> Message:
    """The message as it would arrive: each of its arrays in one piece."""
    if all(isinstance(value, np.ndarray) for value in message.arrays.values()):
        return message
    return Message(message.header, {name: _one(value) for name, value in message.arrays.items()})


def _one(value: Array | Sequence[Array]) -> Array:
    if isinstance(value, np.ndarray):
        return value
    return np.concatenate(value) if value else np.empty(0, dtype=np.uint8)
