"""Frames on a stream: a head of 64 bytes, little-endian, then a message as `runtime.messages` lays it out.

"DRF1" | 4 bytes 0 | uint64 bytes of the message | method, 48 bytes, padded with 0; empty in answers
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from deeprec_spark.runtime.stream import Stream

HEAD_BYTES = 64
METHOD_BYTES = 48
_HEAD = struct.Struct("<4s4xQ48s")
_MAGIC = b"DRF1"
_DRAIN_BYTES = 1 << 20
_MAX_SIZE = 1 << 31
"""What may be announced; whatever is above the receiver's own limit, but below this, is received and dropped."""


class FrameError(ConnectionError):
    """What came is no frame; nothing that follows can be understood."""


class OversizeError(ValueError):
    """A frame larger than may be: it was received and dropped."""


def send_frame(stream: Stream, method: str, parts: Sequence[Any], size: int, deadline: float | None) -> None:
    """Send a message of `size` bytes, as `messages.encode_parts` gave it.

    Raises:
        ValueError: the method's name is too long; nothing was sent.
    """
    name = method.encode()
    if len(name) > METHOD_BYTES:
        raise ValueError(f"A method's name has at most {METHOD_BYTES} bytes. Received: {method[:100]!r}")
    stream.send([_HEAD.pack(_MAGIC, size, name), *parts], deadline)


def receive_head(stream: Stream, deadline: float | None) -> tuple[str, int]:
    """The method and size of the frame that follows.

    Raises:
        FrameError: this is no frame.
    """
    head = bytearray(HEAD_BYTES)
    stream.receive(memoryview(head), deadline)
    magic, size, name = _HEAD.unpack(head)
    if magic != _MAGIC or size > _MAX_SIZE:
        raise FrameError(f"Not a frame. Received: magic={magic!r}, size={size}")
    return name.rstrip(b"\0").decode(errors="replace"), size


def receive_body(stream: Stream, size: int, max_bytes: int, deadline: float | None) -> pa.Buffer:
    """The message of a frame, 64-byte aligned.

    Raises:
        OversizeError: it exceeds `max_bytes`; the stream stands behind it.
    """
    if size > max_bytes:
        scratch = memoryview(bytearray(min(size, _DRAIN_BYTES)))
        for start in range(0, size, len(scratch)):
            stream.receive(scratch[: size - start], deadline)
        raise OversizeError(
            f"A message may have {max_bytes} bytes (cluster.max_message_mb). Received: {size} bytes"
        )
    buffer: Any = pa.allocate_buffer(size)
    into: Any = np.frombuffer(buffer, np.uint8)
    if size:
        stream.receive(memoryview(into), deadline)
    return buffer
