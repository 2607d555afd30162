"""RemoteStore: the embedding store of a worker, spread over the job's parameter servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.store import (
    CheckpointFile,
    PullReply,
    PullRequest,
    PushRequest,
    SparseGradient,
    TableSpec,
    UniqueKeys,
)
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.runtime.calls import retried
from deeprec_spark.runtime.channel import LOCAL_SOCKETS, Channel
from deeprec_spark.runtime.loopback import Caller
from deeprec_spark.runtime.messages import MAX_MESSAGE_BYTES, Message, aligned_empty
from deeprec_spark.runtime.options import DEFAULT_STEP_SECONDS
from deeprec_spark.runtime.placement import split_dense, split_keys
from deeprec_spark.runtime.store_messages import (
    Sender,
    WireType,
    decode_pull_reply,
    encode_pull,
    encode_push,
    file_from_dict,
    spec_to_dict,
)
from deeprec_spark.runtime.transport import TlsOptions

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

# Where each key of each table went: positions[server][table] indexes the request's keys of that table.
Positions = list[list[Int64Array]]


@dataclass(frozen=True)
class RemoteStoreOptions:
    """How a worker talks to its servers. Times are seconds.

    Arguments:
        token: the job's secret.
        rank, incarnation: who this worker is; requests are numbered within them.
        step_timeout: for one pull or push, other ranks' part of a synchronous step included.
        file_timeout: for a save or restore.
        retry_seconds: how long a lost connection is tried again before the error is raised.
        max_message_bytes: larger requests are not sent, larger answers refused.
        local_sockets: whether to go over Unix sockets to servers on this host.
        wire_dtype: what rows and gradients are on the wire; "bfloat16" halves them, and rounds to 8 bits of precision.
        position: where the worker is in the data once its running step is done; every push tells it.
    """

    token: str = field(repr=False)
    rank: int = 0
    incarnation: int = 1
    tls: TlsOptions | None = None
    step_timeout: float = DEFAULT_STEP_SECONDS + 30.0
    file_timeout: float = 3600.0
    retry_seconds: float = 10.0
    max_message_bytes: int = MAX_MESSAGE_BYTES
    local_sockets: bool = LOCAL_SOCKETS
    wire_dtype: WireType = "float32"
    position: Callable[[], Mapping[str, Any]] | None = None


class RemoteStore:
    """Implements `EmbeddingStore` over servers; the training step cannot tell it from `LocalStore`.

    A step costs one round trip to each server for its pull and one for its push; servers work in parallel. Keys go
    to servers by hash bucket, dense parameters in contiguous shards, answers come back in the order of the request.

    Arguments:
        addresses: `host:port` of every server, in rank order.
        options: token, identity and deadlines.
        local: servers that are in this process, by rank among `addresses`: they are called without the network.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        options: RemoteStoreOptions,
        local: Mapping[int, Caller] | None = None,
    ) -> None:
        if not addresses:
            raise ValueError("RemoteStore needs the address of at least one server. Received: addresses=[]")
        self._options = options
        self._connections: list[Caller] = [
            local[server]
            if local is not None and server in local
            else Channel(
                address,
                token=options.token,
                tls=options.tls,
                timeout=options.step_timeout,
                max_bytes=options.max_message_bytes,
                local=options.local_sockets,
            )
            for server, address in enumerate(addresses)
        ]
        self._pool = (
            ThreadPoolExecutor(len(addresses), thread_name_prefix="servers") if len(addresses) > 1 else None
        )
        self._pulls = 0
        self._pushes = 0
        self._closed = threading.Event()

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make the tables on every server; a table that exists with another spec is a ValueError."""
        self._everywhere("create_tables", Message({"specs": [spec_to_dict(spec) for spec in specs]}))

    def init_dense(self, dense: Float32Array, state: Float32Array, optimizer: Optimizer) -> None:
        """Set the dense parameters where the servers have none yet: whole vectors, of which each keeps its part."""
        arrays = {"dense": np.asarray(dense), "state": np.asarray(state)}
        self._everywhere("init_dense", Message({"optimizer": optimizer.to_dict()}, arrays))

    def pull(self, request: PullRequest) -> PullReply:
        """Read the rows and dense parameters of one step."""
        if request.train:
            self._pulls += 1
        sender, wire = self._sender(self._pulls), self._options.wire_dtype
        if len(self._connections) == 1:
            return decode_pull_reply(self._parallel("pull", [encode_pull(sender, request, wire)])[0])
        tables = list(request.keys)
        positions = split_keys([request.keys[table].keys for table in tables], len(self._connections))
        messages = [encode_pull(sender, _part_of(request, tables, places), wire) for places in positions]
        replies = [decode_pull_reply(message) for message in self._parallel("pull", messages)]
        return PullReply(
            {table: _merge_rows(replies, table, index, positions) for index, table in enumerate(tables)},
            dense=_concatenated([reply.dense for reply in replies]),
            state=_concatenated([reply.state for reply in replies]),
            step=max(reply.step for reply in replies),
        )

    def push(self, request: PushRequest) -> int:
        """Apply the gradients of one step; returns the number of updates applied so far."""
        self._pushes += 1
        sender = self._sender(self._pushes)
        position = None if self._options.position is None else self._options.position()
        messages = [
            encode_push(sender, part, position, self._options.wire_dtype)
            for part in self._push_parts(request)
        ]
        return max(int(answer.header["step"]) for answer in self._parallel("push", messages))

    def ask_first(self, method: str, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call a method of the first server in this worker's name; the header of its answer."""
        message = Message({**self._sender(0).to_header(), **header})
        return self._call(self._connections[0], method, message, None).header

    def evict(self) -> Mapping[str, int]:
        """Run each table's eviction policy on every server; returns the rows evicted by table."""
        total: dict[str, int] = {}
        for answer in self._everywhere("evict", Message(), timeout=self._options.file_timeout):
            for table, count in answer.header["evicted"].items():
                total[table] = total.get(table, 0) + count
        return total

    def save(self, directory: str) -> list[CheckpointFile]:
        """Every server writes its shard below `directory`, which all of them must reach under this name."""
        answers = self._everywhere(
            "save", Message({"directory": directory}), timeout=self._options.file_timeout
        )
        return [file_from_dict(entry) for answer in answers for entry in answer.header["files"]]

    def snapshot(self, save_id: str, base: str | None = None) -> None:
        """Every server fixes its state of this moment; see `EmbeddingStore.snapshot`."""
        self._everywhere("snapshot", Message({"save_id": save_id, "base": base}))

    def write_snapshot(self, save_id: str, directory: str) -> list[CheckpointFile]:
        """Every server writes what it fixed below `directory`, which all of them must reach under this name."""
        answers = self._everywhere(
            "write_snapshot",
            Message({"save_id": save_id, "directory": directory}),
            timeout=self._options.file_timeout,
        )
        return [file_from_dict(entry) for answer in answers for entry in answer.header["files"]]

    def drop_snapshot(self, save_id: str) -> None:
        """Every server gives a snapshot up."""
        self._everywhere("drop_snapshot", Message({"save_id": save_id}))

    def restore(
        self, chain: Sequence[str], save_id: str | None = None, warm_start: WarmStart | None = None
    ) -> None:
        """Every server reads its shard of what any number of servers wrote; see `EmbeddingStore.restore`."""
        header = {
            "chain": [chain] if isinstance(chain, str) else list(chain),
            "save_id": save_id,
            "warm_start": None if warm_start is None else warm_start.to_dict(),
        }
        self._everywhere("restore", Message(header), timeout=self._options.file_timeout)

    def statistics(self) -> Mapping[str, Mapping[str, Any]]:
        """Counters of each table, summed over the servers."""
        return merge_statistics(
            [answer.header["tables"] for answer in self._everywhere("statistics", Message())]
        )

    def close(self) -> None:
        """Close the connections; the servers go on."""
        self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for connection in self._connections:
            connection.close()

    def _sender(self, sequence: int) -> Sender:
        return Sender(self._options.rank, self._options.incarnation, sequence)

    def _push_parts(self, request: PushRequest) -> list[PushRequest]:
        servers = len(self._connections)
        if servers == 1:
            return [request]
        tables = list(request.gradients)
        positions = split_keys([request.gradients[table].keys for table in tables], servers)
        dense = _optional_shards(request.dense_gradient, servers)
        state = _optional_shards(request.state_delta, servers)
        parts = []
        for server, places in enumerate(positions):
            gradients = {
                table: SparseGradient(
                    request.gradients[table].keys[place], request.gradients[table].gradient[place]
                )
                for table, place in zip(tables, places, strict=True)
            }
            parts.append(
                PushRequest(
                    gradients,
                    dense_gradient=dense[server],
                    state_delta=state[server],
                    samples=request.samples,
                    sparse_learning_rate=request.sparse_learning_rate,
                    dense_learning_rate=request.dense_learning_rate,
                )
            )
        return parts

    def _everywhere(self, method: str, message: Message, timeout: float | None = None) -> list[Message]:
        return self._parallel(method, [message] * len(self._connections), timeout)

    def _parallel(
        self, method: str, messages: Sequence[Message], timeout: float | None = None
    ) -> list[Message]:
        """Call every server at once; waits for all, then raises the first error in rank order."""
        if self._pool is None:
            return [self._call(self._connections[0], method, messages[0], timeout)]
        futures = [
            self._pool.submit(self._call, connection, method, message, timeout)
            for connection, message in zip(self._connections, messages, strict=True)
        ]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def _call(self, connection: Caller, method: str, message: Message, timeout: float | None) -> Message:
        """One call, sent again with the same number if the connection breaks: it takes effect once."""
        return retried(
            lambda: connection.call(method, message, timeout=timeout),
            self._options.retry_seconds,
            self._closed,
        )


def merge_statistics(shards: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Sum the numbers of each table over the servers; what is no number is kept where all agree."""
    merged: dict[str, dict[str, Any]] = {}
    for shard in shards:
        for table, values in shard.items():
            into = merged.setdefault(table, {})
            for name, value in values.items():
                if name not in into:
                    into[name] = value
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    into[name] += value
    return merged


def _part_of(request: PullRequest, tables: Sequence[str], places: Sequence[Int64Array]) -> PullRequest:
    keys = {
        table: UniqueKeys(request.keys[table].keys[place], request.keys[table].counts[place])
        for table, place in zip(tables, places, strict=True)
    }
    return replace(request, keys=keys)


def _merge_rows(replies: Sequence[PullReply], table: str, index: int, positions: Positions) -> Float32Array:
    count = sum(len(places[index]) for places in positions)
    dim = replies[0].rows[table].shape[1]
    merged: Float32Array = aligned_empty((count, dim), np.float32)
    for reply, places in zip(replies, positions, strict=True):
        merged[places[index]] = reply.rows[table]
    return merged


def _optional_shards(vector: Float32Array | None, servers: int) -> Sequence[Float32Array | None]:
    return [None] * servers if vector is None else split_dense(vector, servers)


def _aligned(parts: Sequence[Float32Array]) -> Float32Array:
    """The parts one after another in a 64-byte-aligned, writable array."""
    first = parts[0]
    joined: Float32Array = aligned_empty((sum(len(part) for part in parts), *first.shape[1:]), np.float32)
    np.concatenate(parts, out=joined)
    return joined


def _concatenated(parts: Sequence[Float32Array | None]) -> Float32Array | None:
    present = [part for part in parts if part is not None]
    return _aligned(present) if present else None
