"""One connected socket, plain or TLS, that sends and receives whole pieces by a deadline.

A plain socket blocks in the kernel until all bytes of a piece are there (or the deadline is): one system call, and one
time without the interpreter's lock, whatever the size.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_MAX_PARTS = 1024  # of one sendmsg: IOV_MAX
_TLS_CHUNK = 1 << 16
_BUFFER_BYTES = 4 << 20
_TIMEVAL = struct.Struct("@ll")

# A peer whose machine is gone is noticed after a minute and a half, though nothing is sent meanwhile.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class ClosedError(ConnectionError):
    """The other side closed the connection."""


class Stream:
    """A connected socket of its own; `send` and `receive` may each be used by one thread at a time.

    Deadlines are of `time.monotonic`; None waits without limit. What fails leaves the stream unusable: close it.

    Raises, in both directions:
        TimeoutError: the deadline passed.
        ClosedError: the other side ended the connection between two pieces or within one.
        OSError: the connection broke, or TLS did not come about.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._tls: ssl.SSLSocket | None = None
        self._limits: dict[int, float] = {}
        self._woken = False
        connected.setblocking(True)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            if connected.family == socket.AF_UNIX:
                connected.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def start_tls(self, context: ssl.SSLContext, deadline: float, server_hostname: str | None = None) -> None:
        """Speak TLS from here on; as the client where `server_hostname` is given."""
        self._tls = context.wrap_socket(
            self._socket,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            suppress_ragged_eofs=True,
            # Only once it can be woken: the socket that was handed over cannot any more.
            do_handshake_on_connect=False,
        )
        self._socket = self._tls
        if self._woken:
            raise ClosedError("The connection was ended before its handshake.")
        self._tls.settimeout(_left(deadline))
        self._tls.do_handshake()

    def send(self, parts: Sequence[Any], deadline: float | None) -> None:
        """Send contiguous buffers one after another."""
        if self._tls is not None:
            self._send_tls(self._tls, parts, deadline)
            return
        pending = list(parts)
        while pending:
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(pending[:_MAX_PARTS])
            except BlockingIOError:
                _left(deadline)
                continue
            pending = _rest(pending, sent)

    def receive(self, into: memoryview, deadline: float | None) -> None:
        """Fill a buffer."""
        at = 0
        while at < len(into):
            if self._tls is not None:
                self._tls.settimeout(_left(deadline))
                got = self._tls.recv_into(into[at:])
            else:
                self._limit(socket.SO_RCVTIMEO, deadline)
                try:
                    got = self._socket.recv_into(into[at:], len(into) - at, socket.MSG_WAITALL)
                except BlockingIOError:
                    _left(deadline)
                    continue
            if got == 0:
                raise ClosedError(f"The connection was closed. Received: {at} of {len(into)} bytes")
            at += got

    def wake(self) -> None:
        """End the connection from any thread: who sends or receives fails at once."""
        self._woken = True
        with suppress(OSError):
            # Not SSLSocket's own, which takes its state away from under a thread that reads.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; by the thread that uses it."""
        self.wake()
        self._socket.close()

    def _send_tls(self, stream: ssl.SSLSocket, parts: Sequence[Any], deadline: float | None) -> None:
        gathered = bytearray()
        for part in parts:
            view = memoryview(part).cast("B")
            if len(gathered) + len(view) > _TLS_CHUNK and gathered:
                self._send_all(stream, gathered, deadline)
                gathered = bytearray()
            if len(view) > _TLS_CHUNK:
                self._send_all(stream, view, deadline)
            else:
                gathered += view
        if gathered:
            self._send_all(stream, gathered, deadline)

    @staticmethod
    def _send_all(stream: ssl.SSLSocket, data: Any, deadline: float | None) -> None:
        view = memoryview(data)
        while view:
            # Not sendall, which gives each record that much time.
            stream.settimeout(_left(deadline))
            view = view[stream.send(view) :]

    def _limit(self, option: int, deadline: float | None) -> None:
        """Have the kernel end a wait at about the deadline; set anew only where it differs by much."""
        left = _left(deadline)
        if left is None:
            return  # a wait that a former limit ends is begun again
        now = self._limits.get(option, 0.0)
        if not left / 2 <= now <= left * 1.1:
            seconds, fraction = divmod(left, 1.0)
            limit = _TIMEVAL.pack(int(seconds), max(1, int(fraction * 1e6)))
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)
            self._limits[option] = left


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("The deadline passed.")
    return left


def _rest(pending: list[Any], sent: int) -> list[Any]:
    """What is left of buffers of which `sent` bytes are gone."""
    for index, part in enumerate(pending):
        view = memoryview(part).cast("B")
        if sent < len(view):
            return [view[sent:], *pending[index + 1 :]] if sent else pending[index:]
        sent -= len(view)
    return []
