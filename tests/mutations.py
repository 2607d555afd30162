"""Seeded mutations of valid messages: what fuzz tests send."""

from __future__ import annotations

import copy
import json
import pickle
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deeprec_spark.runtime import messages
from deeprec_spark.runtime.messages import Message, encode

ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    -(2**63),
    10**300,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "../../../etc/passwd",
    "x" * 5000,
    "\0\n\x1b[2J",
    [],
    {},
    [[]],
    {"type": "SGD"},
    {"type": "os.system"},
    [1, "a", None],
]

_EXTREMES = struct.Struct("<q")


class Exploit:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


class Mutator:
    """Bodies made of valid messages: bytes flipped, cut, spliced; headers, array entries, numbers replaced; noise.

    `marker` is a file that comes into being if a pickle among them is ever loaded.
    """

    def __init__(self, seed: int, base: Sequence[tuple[str, Message]], marker: Path) -> None:
        self._random = random.Random(seed)
        self._base = [(method, bytes(encode(message).to_pybytes())) for method, message in base]
        self._exploit = pickle.dumps(Exploit(marker))
        self._kinds = (
            *(self._flipped, self._flipped, self._cut, self._spliced),
            *(self._header, self._header, self._entries, self._noise, self._extreme),
        )

    def next(self) -> tuple[str, bytes]:
        """A method and a body."""
        method, body = self._random.choice(self._base)
        kind = self._random.choice(self._kinds)
        if self._random.random() < 0.03:
            method = self._random.choice(["", "nothing", "__init__", "x" * 3000, "púll", "pull\0"])
        return method, kind(body)

    def of(self, index: int) -> bytes:
        """A body made of one of the messages."""
        return self._random.choice(self._kinds)(self._base[index][1])

    def _flipped(self, body: bytes) -> bytes:
        data = bytearray(body)
        for _ in range(self._random.randint(1, 8)):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        return bytes(data)

    def _extreme(self, body: bytes) -> bytes:
        """A few numbers of arrays replaced by the largest and smallest ones, and by such as are none."""
        content, rest = _taken_apart(body)
        data = bytearray(rest)
        for _ in range(self._random.randint(1, 4)):
            if len(data) >= _EXTREMES.size:
                at = self._random.randrange(0, len(data) - _EXTREMES.size + 1, _EXTREMES.size)
                value = self._random.choice((2**63 - 1, 2**62, -(2**63), -1, 0x7FC000007FC00000, 1 << 40))
                _EXTREMES.pack_into(data, at, value)
        return _put_together(content, bytes(data))

    def _cut(self, body: bytes) -> bytes:
        if self._random.random() < 0.3:
            return body + self._random.randbytes(self._random.randrange(1, 200))
        return body[: self._random.randrange(len(body))]

    def _spliced(self, body: bytes) -> bytes:
        _, other = self._random.choice(self._base)
        return body[: self._random.randrange(len(body))] + other[self._random.randrange(len(other)) :]

    def _noise(self, body: bytes) -> bytes:
        return self._random.choice((b"", self._exploit, self._random.randbytes(self._random.randrange(4000))))

    def _header(self, body: bytes) -> bytes:
        content, rest = _taken_apart(body)
        for _ in range(self._random.randint(1, 2)):
            self._replace_one(content["header"])
        return _put_together(content, rest)

    def _entries(self, body: bytes) -> bytes:
        content, rest = _taken_apart(body)
        entries = content["arrays"]
        if not entries or self._random.random() < 0.1:
            content["arrays"] = self._odd()
        else:
            entry = self._random.choice(entries)
            place = self._random.randrange(4)
            odd: list[Any] = [
                *ODD_VALUES,
                "|O",
                "O8",
                "<U4",
                "<f4",
                "<i8",
                [2**62, 4],
                [0, 2**62],
                [-1],
                64,
                2**40,
            ]
            entry[place] = copy.deepcopy(self._random.choice(odd))
        return _put_together(content, rest)

    def _odd(self) -> Any:
        return copy.deepcopy(self._random.choice(ODD_VALUES))

    def _replace_one(self, node: Any) -> None:
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                return
            key = self._random.choice(keys)
            inner = node[key]
            if isinstance(inner, (dict, list)) and inner and self._random.random() < 0.7:
                node = inner
                continue
            if isinstance(node, dict) and self._random.random() < 0.2:
                del node[key]
            else:
                node[key] = self._odd()
            return


def _taken_apart(body: bytes) -> tuple[dict[str, Any], bytes]:
    _, size, _ = messages._PROLOGUE.unpack_from(body)
    start = messages._PROLOGUE.size
    return json.loads(body[start : start + size]), body[_padded(start + size) :]


def _put_together(content: dict[str, Any], rest: bytes) -> bytes:
    text = json.dumps(content).encode()
    start = messages._PROLOGUE.size
    total = _padded(start + len(text)) + len(rest)
    return (messages._PROLOGUE.pack(b"DRM1", len(text), total) + text).ljust(
        _padded(start + len(text)), b"\0"
    ) + rest


def _padded(size: int) -> int:
    return -(-size // messages.ALIGNMENT) * messages.ALIGNMENT
