"""Checksums of a checkpoint's files: XXH3 with 128 bits, as `xxh3-128:<32 hex digits>`.

They guard against damage, not against forgers, who could change the manifest too. XXH3 (the xxhash package) reads ten
times as fast as SHA-256, which took a fifth of a save's processor time. Checkpoints of older versions have
`sha256:<64 hex digits>`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import xxhash

ALGORITHM = "xxh3-128"
PATTERN = "^(xxh3-128:[0-9a-f]{32}|sha256:[0-9a-f]{64})$"


class Digest(Protocol):
    """What hashlib and xxhash make."""

    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


_ALGORITHMS: Mapping[str, Callable[[], Digest]] = {"xxh3-128": xxhash.xxh3_128, "sha256": hashlib.sha256}


class Checksum:
    """The checksum of bytes that come in pieces.

    Args:
        algorithm: that of a checksum to compare with, from `algorithm_of`; default: that of new files.

    Example:
        >>> checksum = Checksum()
        >>> checksum.update(b"rows")
        >>> str(checksum)
        'xxh3-128:a6b027b67ea9f1eb79b98e5d40656a87'
    """

    def __init__(self, algorithm: str = ALGORITHM) -> None:
        self._algorithm = algorithm
        self._digest = _ALGORITHMS[algorithm]()

    def update(self, data: Any) -> None:
        """Take in the next piece; without the interpreter's lock where it is large."""
        self._digest.update(data)

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._digest.hexdigest()}"


def algorithm_of(checksum: str) -> str:
    """The algorithm that made a checksum; a ValueError if there is no such."""
    algorithm = checksum.partition(":")[0]
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"A checksum begins with one of {sorted(_ALGORITHMS)}. Received: {checksum!r}")
    return algorithm
