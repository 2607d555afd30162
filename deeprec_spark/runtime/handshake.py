"""How both ends of a channel prove that they know the job's token, without sending it, before anything else is read.

    server -> client    "DRH1" | nonce, 32 random bytes
    client -> server    "DRH1" | nonce, 32 random bytes | HMAC-SHA256(token, "client" | both nonces)
    server -> client    "DRH1" | 0 or 1: refused        | HMAC-SHA256(token, "server" | both nonces) | name | key

Name (64 bytes) and key (32) are of the server's Unix socket, 0 where it has none. There the same handshake is done, but
its token is the job's with the key behind it: names of sockets are no secret on a host, so a peer must show that it was
told of it over TCP, where it has shown its certificate if one is asked for.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from typing import Any

from deeprec_spark.runtime.stream import Stream

MAGIC = b"DRH1"
_NONCE = 32
_PROOF = 32
_NAME = 64
_KEY = 32
ANSWER_BYTES = len(MAGIC) + 1 + _PROOF + _NAME + _KEY


class RefusedError(PermissionError):
    """The server does not take the token."""


class StrangerError(ConnectionError):
    """The other side is no server of this job."""


@dataclass(frozen=True)
class LocalDoor:
    """The abstract name of a server's Unix socket, and what a client needs there beside the job's token."""

    name: bytes
    key: bytes = field(repr=False)

    @classmethod
    def new(cls) -> LocalDoor:
        """One that nobody knows."""
        return cls(f"deeprec-spark-{secrets.token_hex(16)}".encode(), secrets.token_bytes(_KEY))

    def token(self, token: str) -> str:
        """What is proven there, for a job's token."""
        return token + self.key.hex()


def welcome(stream: Stream, token: str, door: LocalDoor | None, deadline: float) -> bool:
    """The server's side; False if the client does not know the token, and was told so. Others are told of the door."""
    mine = secrets.token_bytes(_NONCE)
    stream.send([MAGIC + mine], deadline)
    request = _receive(stream, len(MAGIC) + _NONCE + _PROOF, deadline)
    theirs, proof = request[len(MAGIC) : -_PROOF], request[-_PROOF:]
    expected = _proof(token, b"client", mine + theirs)
    # Of whatever was sent: nothing is looked at before.
    if not hmac.compare_digest(request[: len(MAGIC)] + proof, MAGIC + expected):
        stream.send([(MAGIC + b"\1").ljust(ANSWER_BYTES, b"\0")], deadline)
        return False
    where = b"" if door is None else door.name.ljust(_NAME, b"\0") + door.key
    answer = MAGIC + b"\0" + _proof(token, b"server", mine + theirs) + where
    stream.send([answer.ljust(ANSWER_BYTES, b"\0")], deadline)
    return True


def introduce(stream: Stream, token: str, deadline: float) -> LocalDoor | None:
    """The client's side; returns where the server is to be met on its own host.

    Raises:
        RefusedError: the server has another token.
        StrangerError: what answers is no server of this protocol, or does not know the token itself.
    """
    greeting = _receive(stream, len(MAGIC) + _NONCE, deadline)
    if greeting[: len(MAGIC)] != MAGIC:
        raise StrangerError("what answers there is no server of this job")
    theirs, mine = greeting[len(MAGIC) :], secrets.token_bytes(_NONCE)
    stream.send([MAGIC + mine + _proof(token, b"client", theirs + mine)], deadline)
    answer = _receive(stream, ANSWER_BYTES, deadline)
    if answer[: len(MAGIC)] != MAGIC:
        raise StrangerError("what answers there is no server of this job")
    if answer[len(MAGIC)]:
        raise RefusedError("wrong token")
    proof, where = answer[len(MAGIC) + 1 : -_NAME - _KEY], answer[-_NAME - _KEY :]
    if not hmac.compare_digest(proof, _proof(token, b"server", theirs + mine)):
        raise StrangerError("what answers there does not know the job's token")
    name = where[:_NAME].rstrip(b"\0")
    return LocalDoor(name, where[_NAME:]) if name else None


def _proof(token: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), side + nonces, "sha256")


def _receive(stream: Stream, size: int, deadline: float) -> bytes:
    buffer: Any = bytearray(size)
    stream.receive(memoryview(buffer), deadline)
    return bytes(buffer)
