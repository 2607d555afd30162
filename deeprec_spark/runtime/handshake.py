"""How both ends of a channel prove that they know the job's token, without sending it, before anything else is read.

    server -> client    "DRH1" | nonce, 32 random bytes
    client -> server    "DRH1" | nonce, 32 random bytes | HMAC-SHA256(token, "client" | both nonces)
    server -> client    "DRH1" | 0 or 1: refused        | HMAC-SHA256(token, "server" | both nonces) | local name, 64

The local name is that of the server's Unix socket, empty where it has none.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from deeprec_spark.runtime.stream import Stream

MAGIC = b"DRH1"
LOCAL_NAME_BYTES = 64
_NONCE = 32
_PROOF = 32


class RefusedError(PermissionError):
    """The server does not take the token."""


class StrangerError(ConnectionError):
    """The other side is no server of this job."""


def welcome(stream: Stream, token: str, local_name: bytes, deadline: float) -> bool:
    """The server's side; False if the client does not know the token, and was told so."""
    mine = secrets.token_bytes(_NONCE)
    stream.send([MAGIC + mine], deadline)
    request = _receive(stream, len(MAGIC) + _NONCE + _PROOF, deadline)
    theirs, proof = request[len(MAGIC) : -_PROOF], request[-_PROOF:]
    expected = _proof(token, b"client", mine + theirs)
    # Of whatever was sent: nothing is looked at before.
    if not hmac.compare_digest(request[: len(MAGIC)] + proof, MAGIC + expected):
        stream.send([MAGIC + b"\1" + bytes(_PROOF + LOCAL_NAME_BYTES)], deadline)
        return False
    answer = (
        MAGIC + b"\0" + _proof(token, b"server", mine + theirs) + local_name.ljust(LOCAL_NAME_BYTES, b"\0")
    )
    stream.send([answer], deadline)
    return True


def introduce(stream: Stream, token: str, deadline: float) -> bytes:
    """The client's side; returns the local name.

    Raises:
        RefusedError: the server has another token.
        StrangerError: what answers is no server of this protocol, or does not know the token itself.
    """
    greeting = _receive(stream, len(MAGIC) + _NONCE, deadline)
    if greeting[: len(MAGIC)] != MAGIC:
        raise StrangerError("what answers there is no server of this job")
    theirs, mine = greeting[len(MAGIC) :], secrets.token_bytes(_NONCE)
    stream.send([MAGIC + mine + _proof(token, b"client", theirs + mine)], deadline)
    answer = _receive(stream, len(MAGIC) + 1 + _PROOF + LOCAL_NAME_BYTES, deadline)
    if answer[: len(MAGIC)] != MAGIC:
        raise StrangerError("what answers there is no server of this job")
    if answer[len(MAGIC)]:
        raise RefusedError("wrong token")
    proof = answer[len(MAGIC) + 1 : -LOCAL_NAME_BYTES]
    if not hmac.compare_digest(proof, _proof(token, b"server", theirs + mine)):
        raise StrangerError("what answers there does not know the job's token")
    return answer[-LOCAL_NAME_BYTES:].rstrip(b"\0")


def _proof(token: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), side + nonces, "sha256")


def _receive(stream: Stream, size: int, deadline: float) -> bytes:
    buffer: Any = bytearray(size)
    stream.receive(memoryview(buffer), deadline)
    return bytes(buffer)
