"""Pulls, pushes and table specs as messages.

All tables of a request travel in a few arrays: keys one after another, rows flat, and the lengths by table. Rows of a
table begin where those of the one before end, so that tables of one width can be used as one array; where the width
changes, they begin at a multiple of 64 bytes. Rows and gradients are float32, or bfloat16 if the worker so asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import deeprec_spark.embedding._core as _core
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.options import EmbeddingVariableOption
from deeprec_spark.embedding.store import (
    CheckpointFile,
    PullReply,
    PullRequest,
    PushRequest,
    SparseGradient,
    TableSpec,
    UniqueKeys,
)
from deeprec_spark.runtime.messages import Message

Array = npt.NDArray[Any]

WireType = Literal["float32", "bfloat16"]
"""What rows and gradients are on the wire; dense parameters always are float32."""

WIRE_TYPES: tuple[WireType, ...] = ("float32", "bfloat16")

_MAX_COUNT = 1 << 48
_MAX_OCCURRENCES = (1 << 32) - 1
"""Of a key in one request; tables count no further, and the sum of all workers' must not wrap around."""
_ALIGNED_FLOATS = 16
_MAX_RATE = 1e30


@dataclass(frozen=True)
class Sender:
    """Who sends a request: its rank, the incarnation of that rank, and a number that rises with each request.

    A request that is sent again after a lost connection keeps its number, so that it takes effect once.
    """

    rank: int
    incarnation: int
    sequence: int

    def to_header(self) -> dict[str, Any]:
        """The JSON form."""
        return {"rank": self.rank, "incarnation": self.incarnation, "sequence": self.sequence}

    @classmethod
    def of(cls, message: Message) -> Sender:
        """The sender of a message; ValueError if it does not say."""
        values = [message.header.get(name) for name in ("rank", "incarnation", "sequence")]
        if not all(type(value) is int for value in values):
            raise ValueError(f"A request needs integers rank, incarnation, sequence. Received: {values}")
        rank, incarnation, sequence = (int(value) for value in values if value is not None)
        return cls(rank, incarnation, sequence)


def encode_pull(sender: Sender, request: PullRequest, wire: WireType = "float32") -> Message:
    """A pull whose rows are to come as `wire`; see `decode_pull`."""
    tables = list(request.keys)
    parts = [request.keys[table] for table in tables]
    header = {
        **sender.to_header(),
        "tables": tables,
        "train": request.train,
        "dense": request.dense,
        "unknown": request.unknown,
        "wire": wire,
    }
    arrays = {
        "lengths": np.array([len(part.keys) for part in parts], dtype=np.int64),
        "keys": _joined([part.keys for part in parts], np.int64),
        "counts": _joined([part.counts for part in parts], np.int64),
    }
    return Message(header, arrays)


def decode_pull(message: Message) -> PullRequest:
    """The request that `encode_pull` made; ValueError where it is malformed."""
    tables, bounds = _tables(message)
    keys, counts = message.array("keys", np.int64), message.array("counts", np.int64)
    _check_total("keys", keys, bounds[-1])
    _check_total("counts", counts, bounds[-1])
    if len(counts) and int(counts.max()) > _MAX_OCCURRENCES:
        raise ValueError(
            f"A key occurs at most {_MAX_OCCURRENCES} times in a pull. Received: counts of {int(counts.max())}"
        )
    parts = {
        table: UniqueKeys(keys[begin:end], counts[begin:end])
        for table, begin, end in zip(tables, bounds, bounds[1:], strict=False)
    }
    unknown = message.header.get("unknown")
    if unknown not in ("start", "default"):
        raise ValueError(f"A pull says what unknown keys read. Received: unknown={str(unknown)[:100]}")
    return PullRequest(
        parts,
        train=_flag(message, "train"),
        dense=_flag(message, "dense"),
        unknown="default" if unknown == "default" else "start",
    )


def wire_of(message: Message) -> WireType:
    """How the sender of a pull wants its rows; a ValueError if it does not say."""
    wire = message.header.get("wire")
    if wire not in WIRE_TYPES:
        raise ValueError(f"A pull says how rows are sent. Received: wire={str(wire)[:100]}")
    return "bfloat16" if wire == "bfloat16" else "float32"


def encode_pull_reply(reply: PullReply, tables: Sequence[str], wire: WireType = "float32") -> Message:
    """A reply with the rows of these tables, in this order."""
    parts = [reply.rows[table] for table in tables]
    flat: list[Array] = []
    end = 0
    for part, start in zip(parts, _row_starts([part.shape for part in parts]), strict=True):
        if start > end:
            flat.append(np.zeros(start - end, np.float32))
        flat.append(np.ascontiguousarray(part).reshape(-1))
        end = start + part.size
    arrays: dict[str, Array | Sequence[Array]] = {"rows": _on_wire(flat, wire)}
    if reply.dense is not None:
        arrays["dense"] = reply.dense
    if reply.state is not None:
        arrays["state"] = reply.state
    shapes = [[len(part), part.shape[1]] for part in parts]
    return Message({"tables": list(tables), "shapes": shapes, "step": reply.step}, arrays)


def decode_pull_reply(message: Message) -> PullReply:
    """The reply that `encode_pull_reply` made; its arrays are views of the message where nothing had to be widened."""
    rows = _from_wire(message, "rows")
    found: dict[str, npt.NDArray[np.float32]] = {}
    tables, shapes = message.header["tables"], message.header["shapes"]
    for table, (count, dim), at in zip(tables, shapes, _row_starts(shapes), strict=True):
        found[table] = rows[at : at + count * dim].reshape(count, dim)
    return PullReply(
        found,
        dense=_optional(message, "dense"),
        state=_optional(message, "state"),
        step=message.header["step"],
    )


def encode_push(
    sender: Sender,
    request: PushRequest,
    position: Mapping[str, Any] | None = None,
    wire: WireType = "float32",
) -> Message:
    """A push; see `decode_push`. `position` says where its worker is in the data once it is applied."""
    tables = list(request.gradients)
    parts = [request.gradients[table] for table in tables]
    header = {
        **sender.to_header(),
        "tables": tables,
        "dims": [part.gradient.shape[1] for part in parts],
        "samples": request.samples,
        "sparse_learning_rate": request.sparse_learning_rate,
        "dense_learning_rate": request.dense_learning_rate,
    }
    if position is not None:
        header["position"] = dict(position)
    arrays: dict[str, Array | Sequence[Array]] = {
        "lengths": np.array([len(part.keys) for part in parts], dtype=np.int64),
        "keys": _joined([part.keys for part in parts], np.int64),
        "gradients": _on_wire([np.ascontiguousarray(part.gradient).reshape(-1) for part in parts], wire),
    }
    if request.dense_gradient is not None:
        arrays["dense_gradient"] = request.dense_gradient
    if request.state_delta is not None:
        arrays["state_delta"] = request.state_delta
    return Message(header, arrays)


def decode_push(message: Message) -> PushRequest:
    """The request that `encode_push` made; ValueError where it is malformed."""
    tables, bounds = _tables(message)
    dims = message.header.get("dims")
    if (
        not isinstance(dims, list)
        or len(dims) != len(tables)
        or not all(type(d) is int and d > 0 for d in dims)
    ):
        raise ValueError(f"A push needs the dimension of each table. Received: dims={str(dims)[:100]}")
    keys, flat = message.array("keys", np.int64), _from_wire(message, "gradients")
    _check_total("keys", keys, bounds[-1])
    sizes = [(end - begin) * dim for begin, end, dim in zip(bounds, bounds[1:], dims, strict=False)]
    _check_total("gradients", flat, sum(sizes))
    gradients: dict[str, SparseGradient] = {}
    at = 0
    for table, begin, end, dim, size in zip(tables, bounds, bounds[1:], dims, sizes, strict=False):
        gradients[table] = SparseGradient(keys[begin:end], flat[at : at + size].reshape(end - begin, dim))
        at += size
    samples = message.header.get("samples")
    if type(samples) is not int or not 0 <= samples <= _MAX_COUNT:
        raise ValueError(f"A push needs its number of samples. Received: samples={str(samples)[:100]}")
    return PushRequest(
        gradients,
        dense_gradient=_optional(message, "dense_gradient"),
        state_delta=_optional(message, "state_delta"),
        samples=samples,
        sparse_learning_rate=_rate(message, "sparse_learning_rate"),
        dense_learning_rate=_rate(message, "dense_learning_rate"),
    )


def spec_to_dict(spec: TableSpec) -> dict[str, Any]:
    """A table spec as JSON values."""
    return {
        "name": spec.name,
        "embedding_dim": spec.embedding_dim,
        "option": spec.option.to_dict(),
        "optimizer": None if spec.optimizer is None else spec.optimizer.to_dict(),
        "seed": spec.seed,
    }


def spec_from_dict(data: Mapping[str, Any]) -> TableSpec:
    """Read back what `spec_to_dict` gave."""
    try:
        optimizer = data["optimizer"]
        return TableSpec(
            name=str(data["name"]),
            embedding_dim=int(data["embedding_dim"]),
            option=EmbeddingVariableOption.from_dict(data["option"]),
            optimizer=None if optimizer is None else Optimizer.from_dict(optimizer),
            seed=int(data["seed"]),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"Not a table's spec: {error}. Received: {str(data)[:200]}") from None


def file_to_dict(file: CheckpointFile) -> dict[str, Any]:
    """A checkpoint file's entry as JSON values."""
    return {
        "path": file.path,
        "table": file.table,
        "rows": file.rows,
        "num_bytes": file.num_bytes,
        "checksum": file.checksum,
    }


def file_from_dict(data: Mapping[str, Any]) -> CheckpointFile:
    """Read back what `file_to_dict` gave."""
    return CheckpointFile(**data)


def _joined(parts: Sequence[Array], dtype: npt.DTypeLike) -> Array | Sequence[Array]:
    if not parts:
        return np.empty(0, dtype=dtype)
    return [np.asarray(part, dtype=dtype) for part in parts]


def _row_starts(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Where the rows of each table begin in the flat array, by their shapes."""
    starts: list[int] = []
    end, width = 0, 0
    for count, dim in shapes:
        if dim != width:
            end = -(-end // _ALIGNED_FLOATS) * _ALIGNED_FLOATS
        starts.append(end)
        end, width = end + count * dim, dim
    return starts


def _on_wire(parts: Sequence[Array], wire: WireType) -> Array | Sequence[Array]:
    if wire == "bfloat16":
        return _core.to_bfloat16([np.asarray(part, np.float32) for part in parts])
    return _joined(parts, np.float32)


def _from_wire(message: Message, name: str) -> npt.NDArray[np.float32]:
    """An array of float32 or bfloat16 as float32."""
    array = message.arrays.get(name)
    if isinstance(array, np.ndarray) and array.dtype == np.uint16:
        return _core.from_bfloat16(message.array(name, np.uint16))
    return message.array(name, np.float32)


def _tables(message: Message) -> tuple[list[str], list[int]]:
    """The tables, and where each one's keys begin and end."""
    tables, lengths = message.header.get("tables"), message.array("lengths", np.int64)
    if (
        not isinstance(tables, list)
        or len(set(map(str, tables))) != len(tables)
        or len(tables) != len(lengths)
    ):
        raise ValueError(
            f"A request names each table once, with its length. Received: tables={str(tables)[:200]}"
        )
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"Lengths must not be negative. Received: lengths={lengths.tolist()[:20]}")
    # Summed as Python's integers: those of numpy would wrap around.
    return [str(table) for table in tables], [0, *accumulate(lengths.tolist())]


def _check_total(name: str, array: Array, expected: int) -> None:
    if len(array) != expected:
        raise ValueError(f"Array {name!r} must hold {expected} values by the lengths. Received: {len(array)}")


def _flag(message: Message, name: str) -> bool:
    value = message.header.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"The message needs a flag {name!r}. Received: {name}={value!r}")
    return value


def _rate(message: Message, name: str) -> float | None:
    value = message.header.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not abs(value) <= _MAX_RATE:
        raise ValueError(f"{name} must be a finite number or null. Received: {name}={str(value)[:100]}")
    return value


def _optional(message: Message, name: str) -> npt.NDArray[np.float32] | None:
    return message.array(name, np.float32) if name in message.arrays else None
