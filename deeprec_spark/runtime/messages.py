"""The encoding of one message: a JSON header and named arrays, in one buffer, without pickle.

Layout, little-endian; every array starts at a multiple of 64 bytes from the start of the message:

    "DRM1" | uint32 bytes of JSON | uint64 bytes of all | JSON | padding | array | padding | array …

The JSON is `{"header": {...}, "arrays": [[name, dtype, shape, offset], ...]}`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]

ALIGNMENT = 64
MAX_MESSAGE_BYTES = 1 << 30
MAX_JSON_BYTES = 64 << 20
MAX_ARRAYS = 100_000
MAX_DIMENSIONS = 8
_MAX_EXTENT = 1 << 48

_MAGIC = b"DRM1"
_PROLOGUE = struct.Struct("<4sIQ")
_ZEROS = bytes(ALIGNMENT)
_DTYPES = {
    code: np.dtype(code)
    for code in ("<i8", "<i4", "<i2", "<u8", "<u4", "<u2", "|u1", "|i1", "|b1", "<f4", "<f8", "<f2")
}


@dataclass(frozen=True)
class Message:
    """A JSON-able header and named arrays.

    A value of `arrays` may be a list of one-dimensional arrays of one dtype: they travel as one array,
    one after another.

    Example:
        >>> decode(encode(Message({"step": 3}, {"keys": np.arange(2)}))).arrays["keys"].tolist()
        [0, 1]
    """

    header: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array | Sequence[Array]] = field(default_factory=dict)

    def array(self, name: str, dtype: npt.DTypeLike, dimensions: int = 1) -> Array:
        """The array of this name; a ValueError if it is absent or has another dtype or rank."""
        value = self.arrays.get(name)
        if not isinstance(value, np.ndarray):
            raise ValueError(f"The message has no array {name!r}. Received: arrays={sorted(self.arrays)}")
        if value.dtype != np.dtype(dtype) or value.ndim != dimensions:
            raise ValueError(
                f"Array {name!r} must be {np.dtype(dtype)} with {dimensions} dimension(s). "
                f"Received: dtype={value.dtype}, shape={value.shape}"
            )
        return value


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """An uninitialised, writable array whose data starts at a multiple of 64 bytes."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    return np.frombuffer(pa.allocate_buffer(size), dtype=np.uint8)[:size].view(kind).reshape(shape)


def encode(message: Message, *, max_bytes: int = MAX_MESSAGE_BYTES) -> pa.Buffer:
    """The message as one 64-byte-aligned buffer; errors as in `encode_parts`."""
    parts, total = encode_parts(message, max_bytes=max_bytes)
    buffer = pa.allocate_buffer(total)
    out = np.frombuffer(buffer, dtype=np.uint8)
    at = 0
    for part in parts:
        source = np.frombuffer(part, dtype=np.uint8)
        out[at : at + source.size] = source
        at += source.size
    return buffer


def encode_parts(message: Message, *, max_bytes: int = MAX_MESSAGE_BYTES) -> tuple[list[Any], int]:
    """The message as contiguous buffers that make it up one after another, and its bytes. Arrays are not copied.

    Raises:
        ValueError: an array has a dtype that does not travel, or the message exceeds `max_bytes`.
    """
    buffers: list[Any] = []
    described: list[list[Any]] = []
    offset = 0
    for name, value in message.arrays.items():
        parts = [value] if isinstance(value, np.ndarray) else value
        dtype = parts[0].dtype if parts else np.dtype(np.uint8)
        if dtype.str not in _DTYPES or any(part.dtype != dtype for part in parts):
            found = sorted({str(part.dtype) for part in parts})
            raise ValueError(
                f"Array {name!r} cannot be sent: numbers of one dtype only. Received: dtypes={found}"
            )
        shape = list(value.shape) if isinstance(value, np.ndarray) else [sum(part.size for part in parts)]
        described.append([name, dtype.str, shape, offset])
        buffers.extend(np.ascontiguousarray(part) for part in parts if part.size)
        size = sum(part.nbytes for part in parts)
        if size % ALIGNMENT:
            buffers.append(_ZEROS[: -size % ALIGNMENT])
        offset += _padded(size)
    text = json.dumps({"header": message.header, "arrays": described}, separators=(",", ":")).encode()
    start = _padded(_PROLOGUE.size + len(text))
    total = start + offset
    if total > max_bytes or len(text) > MAX_JSON_BYTES:
        raise ValueError(
            f"A message may have {max_bytes} bytes, of which {MAX_JSON_BYTES} JSON; send less at once (a smaller "
            f"batch_size), or raise cluster.max_message_mb. Received: {total} bytes, of which {len(text)} JSON"
        )
    head = (_PROLOGUE.pack(_MAGIC, len(text), total) + text).ljust(start, b"\0")
    return [head, *buffers], total


def decode(buffer: pa.Buffer, *, max_bytes: int = MAX_MESSAGE_BYTES, writable: bool = False) -> Message:
    """The message in this buffer; its arrays are views that keep the buffer alive, writable if so asked.

    Raises:
        ValueError: the bytes are no message, or exceed `max_bytes`; nothing outside the buffer is ever read.
    """
    size = buffer.size
    if size < _PROLOGUE.size:
        raise ValueError(f"Not a message: shorter than its prologue. Received: {size} bytes")
    if size > max_bytes:
        raise ValueError(
            f"A message may have {max_bytes} bytes (cluster.max_message_mb). Received: {size} bytes"
        )
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if buffer.address % 8:
        raw = _aligned_copy(raw)
    if not writable:
        raw.flags.writeable = False
    magic, json_size, total = _PROLOGUE.unpack_from(raw.data, 0)
    if magic != _MAGIC or total != size or json_size > min(MAX_JSON_BYTES, size - _PROLOGUE.size):
        raise ValueError(f"Not a message. Received: magic={magic!r}, sizes={json_size}/{total}, {size} bytes")
    try:
        content = json.loads(bytes(raw[_PROLOGUE.size : _PROLOGUE.size + json_size]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Not a message: its header is not JSON. Received: {error}") from None
    header = content.get("header") if isinstance(content, dict) else None
    described = content.get("arrays") if isinstance(content, dict) else None
    if not isinstance(header, dict) or not isinstance(described, list) or len(described) > MAX_ARRAYS:
        raise ValueError(f"Not a message: it needs `header` and `arrays`. Received: {type(content).__name__}")
    start = _padded(_PROLOGUE.size + json_size)
    return Message(header, dict(_read_array(raw, entry, start) for entry in described))


def _read_array(raw: npt.NDArray[np.uint8], entry: Any, start: int) -> tuple[str, Array]:
    if not isinstance(entry, list) or len(entry) != 4:
        raise ValueError(
            f"Not a message: an array needs name, dtype, shape, offset. Received: {str(entry)[:200]}"
        )
    name, code, shape, offset = entry
    valid = (
        isinstance(name, str)
        and isinstance(code, str)
        and code in _DTYPES
        and isinstance(shape, list)
        and len(shape) <= MAX_DIMENSIONS
        and all(type(extent) is int and 0 <= extent <= _MAX_EXTENT for extent in shape)
        and type(offset) is int
        and offset >= 0
        and offset % ALIGNMENT == 0
    )
    if not valid:
        raise ValueError(f"Not a message: a malformed array entry. Received: {str(entry)[:200]}")
    dtype = _DTYPES[code]
    nbytes = math.prod(shape) * dtype.itemsize
    begin = start + offset
    if begin + nbytes > raw.size:
        raise ValueError(
            f"Not a message: array {name!r} reaches past its end. Received: shape={shape}, offset={offset}"
        )
    return name, raw[begin : begin + nbytes].view(dtype).reshape(shape)


def _aligned_copy(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Offsets are multiples of 64 from the start of the message, but a transport may place that start anywhere."""
    copy: npt.NDArray[np.uint8] = aligned_empty(raw.shape, np.uint8)
    np.copyto(copy, raw)
    return copy


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
