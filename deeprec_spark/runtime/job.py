"""What a supervisor hands to the process of its node: a small JSON and the worker's payload, over a pipe."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from deeprec_spark.runtime.messages import MAX_MESSAGE_BYTES
from deeprec_spark.runtime.options import (
    DEFAULT_STEP_SECONDS,
    Mode,
    Placement,
    check_topology,
    describe_rank,
    server_ranks,
)
from deeprec_spark.runtime.semi_sync import SemiSyncOptions
from deeprec_spark.runtime.store_messages import WireType
from deeprec_spark.runtime.transport import TlsOptions

_SIZES = struct.Struct("<QQ")


@dataclass(frozen=True)
class NodeSettings:
    """What all nodes of a job have in common.

    Arguments:
        num_ps, num_workers, mode, placement: the topology.
        coordinator: `host:port` of the driver's coordinator.
        token: the job's secret.
        worker_entry: `package.module:function` that a worker runs.
        servers_timeout: seconds that a worker waits for all servers.
        sync_timeout: seconds that ranks wait for each other in a synchronous step.
        stop_grace: seconds that a worker deep in a step has to end after the job; then it is killed.
        max_message_bytes: larger messages are refused.
        wire_dtype: what rows and gradients are between workers and servers.
        environment: variables added to the node's.
        semi_sync: how far workers may drift apart; see SemiSyncOptions.
    """

    num_ps: int
    num_workers: int
    mode: Mode
    coordinator: str
    token: str = field(repr=False)
    worker_entry: str
    tls: TlsOptions | None = None
    servers_timeout: float = 300.0
    sync_timeout: float = DEFAULT_STEP_SECONDS
    stop_grace: float = 20.0
    max_message_bytes: int = MAX_MESSAGE_BYTES
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    placement: Placement = "separate"
    semi_sync: SemiSyncOptions | None = None
    wire_dtype: WireType = "float32"

    def __post_init__(self) -> None:
        check_topology(self.num_ps, self.num_workers, self.mode, self.placement)

    @property
    def server_ranks(self) -> range:
        """The ranks that answer pulls and pushes; see `options.server_ranks`."""
        return server_ranks(self.num_ps, self.num_workers, self.placement)


@dataclass(frozen=True)
class NodeJob:
    """One node's part: its rank, the incarnation that the coordinator gave it, its heartbeats, its payload."""

    settings: NodeSettings
    rank: int
    incarnation: int
    heartbeat_interval: float
    heartbeat_timeout: float
    payload: bytes = field(default=b"", repr=False)

    @property
    def is_server(self) -> bool:
        """Whether the node is a parameter server and nothing else."""
        return self.rank < self.settings.num_ps

    @property
    def shard(self) -> int | None:
        """Which shard of the tables the node serves to all workers; None if it serves none."""
        ranks = self.settings.server_ranks
        return ranks.index(self.rank) if self.rank in ranks else None

    @property
    def name(self) -> str:
        """`worker 0 (rank 1)`."""
        return describe_rank(self.rank, self.settings.num_ps)

    def write(self, stream: IO[bytes]) -> None:
        """Write the job for `read`."""
        fields = asdict(self)
        payload = fields.pop("payload")
        text = json.dumps(fields).encode()
        stream.write(_SIZES.pack(len(text), len(payload)))
        stream.write(text)
        stream.write(payload)
        stream.flush()

    @classmethod
    def read(cls, stream: IO[bytes]) -> NodeJob:
        """Read what `write` wrote; an EOFError if the writer died meanwhile."""
        text_size, payload_size = _SIZES.unpack(_read(stream, _SIZES.size))
        fields: dict[str, Any] = json.loads(_read(stream, text_size))
        settings = fields.pop("settings")
        tls, semi_sync = settings.pop("tls"), settings.pop("semi_sync")
        common = NodeSettings(
            **settings,
            tls=None if tls is None else TlsOptions(**tls),
            semi_sync=None if semi_sync is None else SemiSyncOptions(**semi_sync),
        )
        return cls(common, **fields, payload=_read(stream, payload_size))


def _read(stream: IO[bytes], size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size and (part := stream.read(size - len(parts))):
        parts += part
    data = bytes(parts)
    if len(data) != size:
        raise EOFError(
            f"The supervisor closed the pipe before the job was read. Received: {len(data)} of {size} bytes"
        )
    return data
