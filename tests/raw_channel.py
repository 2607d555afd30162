"""Whatever bytes a test likes, sent to a ChannelServer after a right handshake."""

from __future__ import annotations

import socket
import threading
import time

from deeprec_spark.runtime.frames import METHOD_BYTES, receive_body, receive_head, send_frame
from deeprec_spark.runtime.handshake import introduce
from deeprec_spark.runtime.messages import MAX_MESSAGE_BYTES, Message, decode
from deeprec_spark.runtime.stream import Stream
from deeprec_spark.runtime.transport import split_address

SECONDS = 10.0


def dial(address: str, token: str) -> Stream:
    """A stream over TCP whose handshake is done."""
    stream = Stream(socket.create_connection(split_address(address), SECONDS))
    introduce(stream, token, time.monotonic() + SECONDS)
    return stream


class RawChannel:
    """Calls with bodies of any bytes, from any number of threads, each over a stream of its own."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._mine = threading.local()
        self._streams: list[Stream] = []

    def call(self, method: str, body: bytes) -> Message:
        """The answer to one body; errors of the connection are raised, and the next call dials anew."""
        deadline = time.monotonic() + SECONDS
        stream: Stream | None = getattr(self._mine, "stream", None)
        if stream is None:
            stream = self._mine.stream = dial(self._address, self._token)
            self._streams.append(stream)
        name = method.encode(errors="replace")[:METHOD_BYTES].decode(errors="ignore")
        try:
            send_frame(stream, name, [body] if body else [], len(body), deadline)
            _, size = receive_head(stream, deadline)
            return decode(receive_body(stream, size, MAX_MESSAGE_BYTES, deadline))
        except OSError:
            self._mine.stream = None
            raise

    def close(self) -> None:
        """Close all streams."""
        for stream in self._streams:
            stream.close()
