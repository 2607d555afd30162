"""ChannelServer: the hot path's server, a thread for each connection, over TCP (TLS) and a Unix socket."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa

from deeprec_spark.runtime.calls import Handler, error_message, handler_of
from deeprec_spark.runtime.channel import LOCAL_SOCKETS
from deeprec_spark.runtime.errors import ConnectionLostError
from deeprec_spark.runtime.frames import OversizeError, receive_body, receive_head, send_frame
from deeprec_spark.runtime.handshake import LocalDoor, welcome
from deeprec_spark.runtime.messages import MAX_MESSAGE_BYTES, Message, decode, encode_parts
from deeprec_spark.runtime.stream import Stream
from deeprec_spark.runtime.transport import TlsOptions, join_address

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
MAX_STRANGERS = 256
"""Connections that may be between their beginning and their handshake's end at a time. For one more the oldest ends, of
the host that has most of them: who knows the token needs its place for moments only."""

_ROOM_SECONDS = 1.0

TRANSFER_SECONDS = 300.0
"""How long one message may take on its way; who stops in the middle of one is cut off."""


class ChannelServer:
    """Serves handlers on a port until `stop`; `address` is what a `Channel` connects to.

    Clients of the same host are told of a Unix socket after their handshake, and come back through that: twice as fast.
    It is an abstract one, which leaves no file. Its handshake takes nobody but who was told of it in that way: over TLS
    and with a certificate, where those are asked for.

    Arguments:
        handlers: message in, message out, by method name; called from many threads at once.
        host: the interface to bind, and the name that `address` announces.
        port: 0 takes a free one, and keeps it.
        token: the job's secret; who does not know it is told so and cut off.
        max_bytes: larger messages are refused, and larger answers not sent.
        local: whether to open the Unix socket.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        host: str,
        port: int = 0,
        token: str,
        tls: TlsOptions | None = None,
        bind_host: str | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
        local: bool = LOCAL_SOCKETS,
    ) -> None:
        if not token:
            raise ValueError("A server needs the job's token. Received: an empty token")
        self._handlers = dict(handlers)
        self._token = token
        self._max_bytes = max_bytes
        self._context = tls.server_context() if tls else None
        self._lock = threading.Condition()
        self._stopping = False
        self._threads: dict[threading.Thread, _Served] = {}
        bind = bind_host or host
        try:
            listener = _listen(bind, port)
        except OSError as error:
            raise ConnectionLostError(
                f"No server can be bound to {join_address(bind, port)}: {error}"
            ) from error
        self.address = join_address(host, listener.getsockname()[1])
        self._door: LocalDoor | None = None
        self._listeners = [listener]
        if local and hasattr(socket, "AF_UNIX"):
            door = LocalDoor.new()
            try:
                self._listeners.append(_listen_locally(door.name))
                self._door = door
            except OSError as error:  # systems that know or allow no abstract names
                logger.info("No Unix socket can be bound, all clients come over TCP: %s", error)
        self._acceptors = [
            threading.Thread(target=self._accept, args=(one,), name=f"accept-{self.address}", daemon=True)
            for one in self._listeners
        ]
        for acceptor in self._acceptors:
            acceptor.start()

    def stop(self, timeout: float = 30.0) -> None:
        """End the server once running calls are answered; wake waiting handlers before."""
        end = time.monotonic() + timeout
        with self._lock:
            self._stopping = True
            for served in self._threads.values():
                if not served.busy:
                    served.stream.wake()
        for listener in self._listeners:
            with suppress(OSError):  # wakes its thread
                listener.shutdown(socket.SHUT_RDWR)
        for acceptor in self._acceptors:
            acceptor.join(max(0.0, end - time.monotonic()))
        for listener in self._listeners:
            listener.close()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            left = list(self._threads.values())
            for served in left:
                served.stream.wake()
        if left:
            logger.warning("The server at %s still answers calls after %.0f s", self.address, timeout)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, peer = listener.accept()
            except OSError as error:
                with self._lock:
                    if self._stopping:
                        return
                    # Out of descriptors, or a client that was gone at once.
                    logger.warning("A connection could not be taken: %s", error)
                    self._lock.wait(0.1)
                continue
            self._begin(connected, peer)

    def _begin(self, connected: socket.socket, peer: Any) -> None:
        local = connected.family == getattr(socket, "AF_UNIX", None)
        with self._lock:
            if not self._make_room() or self._stopping:
                connected.close()
                return
            try:
                served = _Served(Stream(connected), "" if local else str(peer[0]))
            except OSError:  # gone already
                connected.close()
                return
            # The number is free again with the thread's end: a trace has no more of them than there were at a time.
            taken = {one.name for one in self._threads}
            name = next(name for number in itertools.count(1) if (name := f"channel {number}") not in taken)
            thread = threading.Thread(target=self._run, args=(served, local), name=name, daemon=True)
            self._threads[thread] = served
        try:
            thread.start()
        except RuntimeError as error:  # there can be no more threads
            logger.warning("A connection could not be taken: %s", error)
            served.stream.close()
            with self._lock:
                del self._threads[thread]

    def _make_room(self) -> bool:
        """Have a stranger end if there are too many; whether it did."""
        strangers = self._strangers()
        if len(strangers) >= MAX_STRANGERS:
            [(crowded, _)] = Counter(one.host for one in strangers).most_common(1)
            next(one for one in strangers if one.host == crowded).stream.wake()
            self._lock.wait_for(lambda: len(self._strangers()) < MAX_STRANGERS, _ROOM_SECONDS)
        return len(self._strangers()) < MAX_STRANGERS

    def _strangers(self) -> list[_Served]:
        """Those that have not shown the token, the oldest first."""
        return [served for served in self._threads.values() if not served.known]

    def _run(self, served: _Served, local: bool) -> None:
        try:
            deadline = time.monotonic() + HANDSHAKE_SECONDS
            token = self._token if self._door is None or not local else self._door.token(self._token)
            if self._context is not None and not local:
                served.stream.start_tls(self._context, deadline)
            if not welcome(served.stream, token, self._door, deadline):
                return
            served.known = True
            while self._answer_one(served):
                pass
        except OSError as error:  # those of stream and frames among them
            logger.debug("A connection ended: %s", error)
        finally:
            served.stream.close()
            with self._lock:
                del self._threads[threading.current_thread()]
                self._lock.notify_all()

    def _answer_one(self, served: _Served) -> bool:
        """Receive a request and answer it; False once the server stops."""
        stream = served.stream
        method, size = receive_head(stream, None)
        try:
            body = receive_body(stream, size, self._max_bytes, time.monotonic() + TRANSFER_SECONDS)
        except OversizeError as error:
            answer = Message({"error": {"type": "ValueError", "message": str(error)}})
        else:
            if not self._enter(served):
                return False
            answer = self._handle(method, body)
        try:
            parts, size = encode_parts(answer, max_bytes=self._max_bytes)
        except Exception as error:  # too large, or nothing that can be sent: the caller must hear it
            parts, size = encode_parts(error_message(method, error))
        send_frame(stream, "", parts, size, time.monotonic() + TRANSFER_SECONDS)
        return self._leave(served)

    def _handle(self, method: str, body: pa.Buffer) -> Message:
        try:
            return handler_of(self._handlers, method)(decode(body, max_bytes=self._max_bytes))
        except Exception as error:  # every error must reach the caller, and the server must go on
            return error_message(method, error)

    def _enter(self, served: _Served) -> bool:
        with self._lock:
            served.busy = not self._stopping
            return served.busy

    def _leave(self, served: _Served) -> bool:
        with self._lock:
            served.busy = False
            return not self._stopping


class _Served:
    """A connection: from where, whether it has shown the token, and whether a call of it is being answered."""

    def __init__(self, stream: Stream, host: str) -> None:
        self.stream = stream
        self.host = host
        self.known = False
        self.busy = False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=512, reuse_port=False)


def _listen_locally(name: bytes) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(b"\0" + name)
        listener.listen(512)
    except BaseException:
        listener.close()
        raise
    return listener
