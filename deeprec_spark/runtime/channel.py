"""Channel: a client of one ChannelServer, which keeps its connections from call to call."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time

from deeprec_spark.runtime.calls import checked
from deeprec_spark.runtime.errors import ConnectionLostError
from deeprec_spark.runtime.frames import OversizeError, receive_body, receive_head, send_frame
from deeprec_spark.runtime.handshake import LocalDoor, RefusedError, introduce
from deeprec_spark.runtime.messages import MAX_MESSAGE_BYTES, Message, decode, encode_parts
from deeprec_spark.runtime.stream import Stream
from deeprec_spark.runtime.transport import TlsOptions, split_address

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 20.0

LOCAL_SOCKETS = os.environ.get("DEEPREC_SPARK_LOCAL_SOCKETS", "1") != "0"
"""Whether nodes of one host meet at Unix sockets; 0 in the environment of the nodes keeps them on TCP as well."""


class Channel:
    """A client of one ChannelServer; calls may run in several threads at once, each over a connection of its own.

    Arguments:
        address: `host:port` of the server.
        token: the job's secret.
        timeout: seconds for a call that says nothing else.
        max_bytes: larger messages are not sent, larger answers refused.
        local: whether to go over the server's Unix socket where it is on this host.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        tls: TlsOptions | None = None,
        timeout: float = 60.0,
        max_bytes: int = MAX_MESSAGE_BYTES,
        local: bool = LOCAL_SOCKETS,
    ) -> None:
        self.address = address
        self._host, self._port = split_address(address)
        self._token = token
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._context = tls.client_context() if tls else None
        self._server_hostname = (tls.override_hostname if tls else None) or self._host
        self._use_local = local and hasattr(socket, "AF_UNIX")
        self._door: LocalDoor | None = None
        self._lock = threading.Lock()
        self._idle: list[Stream] = []
        self._open: set[Stream] = set()
        self._closed = threading.Event()

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        """Send a message and wait for the answer, `timeout` seconds at most. Its arrays are writable, the first of
        them aligned to 64 bytes.

        Raises:
            ConnectionLostError: nobody answers at the address.
            PermissionError: the token is not the server's.
            TimeoutError: no answer in time.
            ValueError, KeyError, TypeError, FileNotFoundError, StaleNodeError, JobEndedError: raised by the handler.
            RemoteError: the handler raised something else.
        """
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        parts, size = encode_parts(message, max_bytes=self._max_bytes)
        stream: Stream | None = None
        kept = False
        try:
            stream = self._take(deadline)
            send_frame(stream, method, parts, size, deadline)
            _, size = receive_head(stream, deadline)
            body = receive_body(stream, size, self._max_bytes, deadline)
            kept = True
        except OversizeError:
            kept = True
            raise
        except RefusedError:
            raise PermissionError(
                f"{self.address} refused {method}: it belongs to another job (wrong token)."
            ) from None
        except TimeoutError:
            raise TimeoutError(f"{self.address} did not answer {method} within {limit:g} s.") from None
        except OSError as error:
            self._forget_idle()
            raise ConnectionLostError(f"{self.address} cannot be reached for {method}: {error}") from None
        finally:
            if stream is not None:
                self._give_back(stream, kept)
        return checked(decode(body, max_bytes=self._max_bytes, writable=True), self.address, method)

    def close(self) -> None:
        """Close the connections; running calls fail."""
        with self._lock:
            self._closed.set()
            for stream in self._open:
                stream.wake()
        self._forget_idle()

    def _take(self, deadline: float) -> Stream:
        with self._lock:
            if self._closed.is_set():
                raise ConnectionError("the channel is closed")
            if self._idle:
                return self._idle.pop()
        connecting = min(deadline, time.monotonic() + CONNECT_SECONDS)
        try:
            stream = self._dial(connecting)
        except TimeoutError as error:
            if connecting == deadline:
                raise
            raise ConnectionError(f"no connection within {CONNECT_SECONDS:g} s") from error
        with self._lock:
            if not self._closed.is_set():
                self._open.add(stream)
                return stream
        stream.close()
        raise ConnectionError("the channel is closed")

    def _give_back(self, stream: Stream, kept: bool) -> None:
        with self._lock:
            if kept and not self._closed.is_set():
                self._idle.append(stream)
                return
            self._open.discard(stream)
        stream.close()

    def _forget_idle(self) -> None:
        """Close the connections that no call uses: where one broke, the others most likely did."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._open.difference_update(idle)
        for stream in idle:
            stream.close()

    def _dial(self, deadline: float) -> Stream:
        """A new connection: over the Unix socket if that is known and there, else over TCP, where it is asked for."""
        door = self._door
        if door is not None and (stream := self._dial_locally(door, deadline)) is not None:
            return stream
        connected = socket.create_connection(
            (self._host, self._port), max(0.001, deadline - time.monotonic())
        )
        stream = Stream(connected)
        door = self._introduce(stream, self._token, deadline, self._context)
        if not self._use_local or door is None:
            return stream
        self._door = door
        local = self._dial_locally(door, deadline)
        if local is None:
            return stream
        stream.close()
        return local

    def _dial_locally(self, door: LocalDoor, deadline: float) -> Stream | None:
        """A connection over the Unix socket; None where there is none: another host, or a server that is gone."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(max(0.001, deadline - time.monotonic()))
            connected.connect(b"\0" + door.name)
            stream = Stream(connected)
            self._introduce(stream, door.token(self._token), deadline, None)
        except OSError:  # a refusal among them: whoever has taken the name is not the server that told of it
            connected.close()
            self._door = None
            return None
        return stream

    def _introduce(
        self, stream: Stream, token: str, deadline: float, context: ssl.SSLContext | None
    ) -> LocalDoor | None:
        try:
            if context is not None:
                stream.start_tls(context, deadline, self._server_hostname)
            return introduce(stream, token, deadline)
        except BaseException:
            stream.close()
            raise
