"""A TCP proxy that cuts connections in the middle of what passes."""

from __future__ import annotations

import random
import socket
import struct
import threading
from contextlib import suppress
from typing import Literal

from deeprec_spark.runtime.transport import split_address

Direction = Literal["request", "answer"]


class CutProxy:
    """Passes bytes on to a server; `arm` makes it cut all connections after so many bytes more of one direction.

    A cut is a reset (RST), as of a router that forgot a connection or a cable that was pulled and put in again.
    Clients may connect again at once.
    """

    def __init__(self, target: str) -> None:
        self._target = split_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._lock = threading.Lock()
        self._left: dict[Direction, int | None] = {"request": None, "answer": None}
        self._open: list[socket.socket] = []
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def arm(self, direction: Direction, after: int) -> None:
        """Cut after `after` more bytes of requests or answers have been passed on."""
        with self._lock:
            self._left[direction] = after

    def disarm(self) -> None:
        """Cut no more."""
        with self._lock:
            self._left = {"request": None, "answer": None}

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._reset_all()
        self._accepting.join(10)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, 10)
            except OSError:
                continue
            with self._lock:
                self._open += [client, server]
            for source, sink, direction in ((client, server, "request"), (server, client, "answer")):
                threading.Thread(target=self._pass_on, args=(source, sink, direction), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                allowed = self._take(direction, len(data))
                sink.sendall(data[:allowed])
                if allowed < len(data):
                    self.cuts += 1
                    self._reset_all()
                    return
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _take(self, direction: Direction, size: int) -> int:
        with self._lock:
            left = self._left[direction]
            if left is None:
                return size
            if size <= left:
                self._left[direction] = left - size
                return size
            self._left[direction] = None
            return left

    def _reset_all(self) -> None:
        with self._lock:
            doomed, self._open = self._open, []
        for one in doomed:
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def somewhere(chance: random.Random, size: int) -> tuple[Direction, int]:
    """A direction and a byte of a request of about this size, or of its short answer."""
    if chance.random() < 0.5:
        return "request", chance.randrange(size)
    return "answer", chance.randrange(200)
