"""Options of a job's runtime: who takes part, and how long each may be silent."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from deeprec_spark.runtime.messages import MAX_MESSAGE_BYTES
from deeprec_spark.runtime.transport import TlsOptions

Mode = Literal["async", "sync"]
Placement = Literal["separate", "colocated"]

DEFAULT_STEP_SECONDS = 900.0
"""Longer than a worker may wait for a data file that another one fetches into the cache of its host (600 s)."""


def check_topology(num_ps: int, num_workers: int, mode: str, placement: str = "separate") -> None:
    """ValueError unless these make a job."""
    if num_ps < 0 or num_workers < 1:
        raise ValueError(
            f"A job needs num_ps >= 0 and at least one worker. Received: num_ps={num_ps}, num_workers={num_workers}"
        )
    if placement not in ("separate", "colocated"):
        raise ValueError(f"placement must be 'separate' or 'colocated'. Received: placement={placement!r}")
    if placement == "colocated" and num_ps != 0:
        raise ValueError(
            "placement='colocated' keeps a shard of the tables in each worker, so there are no servers beside them: "
            f"set num_ps=0. Received: placement='colocated', num_ps={num_ps}"
        )
    if placement == "separate" and num_ps == 0 and num_workers != 1:
        raise ValueError(
            "num_ps=0 keeps the tables inside the one worker; for more workers set num_ps >= 1, or "
            "placement='colocated'. "
            f"Received: num_ps=0, num_workers={num_workers}"
        )
    if mode not in ("async", "sync"):
        raise ValueError(f"mode must be 'async' or 'sync'. Received: mode={mode!r}")


def server_ranks(num_ps: int, num_workers: int, placement: Placement) -> range:
    """The ranks that answer pulls and pushes over the network, in the order of their shards.

    Servers of their own; or all workers, where each holds a shard; or none, where the one worker holds all tables.
    """
    if placement == "colocated" and num_workers > 1:
        return range(num_workers)
    return range(num_ps)


def describe_rank(rank: int, num_ps: int) -> str:
    """`server 0 (rank 0)` or `worker 0 (rank 1)`."""
    return f"server {rank} (rank {rank})" if rank < num_ps else f"worker {rank - num_ps} (rank {rank})"


@dataclass(frozen=True)
class DeadlineOptions:
    """After what time a job takes something for lost; every wait has such an end. All in seconds.

    Args:
        registration_secs: from the start of a job until all its nodes must have registered.
        heartbeat_secs: without a sign of life for so long, a node is lost; nodes report four times as often, or every
            two seconds. A process that dies is noticed at once, whatever this is.
        rejoin_secs: in async mode, how long the job waits for Spark to start a lost worker again.
        stall_secs: how long a worker that is alive may make no progress.
        step_secs: how long the workers of a synchronous step wait for the slowest of them. In every mode, a server's
            answer to a pull or push may take half a minute longer than this.
        file_secs: how long a node may take to write or read its part of a checkpoint.
    """

    registration_secs: float = 300.0
    heartbeat_secs: float = 30.0
    rejoin_secs: float = 120.0
    stall_secs: float = 3600.0
    step_secs: float = DEFAULT_STEP_SECONDS
    file_secs: float = 6 * 3600.0

    def __post_init__(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if not 0 < value < float("inf"):
                raise ValueError(
                    f"{field_.name} must be a positive number of seconds. Received: {field_.name}={value}"
                )

    def coordinator_options(self) -> dict[str, Any]:
        """The same as arguments of CoordinatorOptions."""
        return {
            "registration_timeout": self.registration_secs,
            "heartbeat_timeout": self.heartbeat_secs,
            "heartbeat_interval": min(2.0, self.heartbeat_secs / 4),
            "rejoin_timeout": self.rejoin_secs,
            "stall_timeout": self.stall_secs,
            "step_timeout": self.step_secs,
            "file_timeout": self.file_secs,
        }


@dataclass(frozen=True)
class CoordinatorOptions:
    """Options of the driver's coordinator. Times are seconds.

    Arguments:
        num_ps, num_workers, mode, placement: the job's topology; ranks below num_ps are servers, the rest workers.
            With `placement="colocated"` num_ps is 0, and each worker holds a shard of the tables.
        token: the job's secret, carried by every call.
        host: the address under which executors reach the driver (`spark.driver.host`).
        bind_host: the interface to bind if that is another one; port 0 takes a free port.
        registration_timeout: from the start until every node must have registered.
        start_timeout: from a node's process start until it must serve or ask for work (imports included).
        heartbeat_interval, heartbeat_timeout: how often a node reports, and after what silence it is lost.
        rejoin_timeout: async: how long the job waits for Spark to start a lost worker again.
        stall_timeout: how long a worker may make no progress in a phase, though it is alive.
        step_timeout: how long the workers of a synchronous step wait for each other; nodes are told it at their launch.
        max_message_bytes: larger messages are refused, by all nodes of the job.
        order_timeout: how long a node may take to answer an order that reads and writes no files.
        file_timeout: how long one may take to write or read its part of a checkpoint.
        failure_grace: how long to collect further reports after a first failure, to name the cause.
    """

    num_ps: int
    num_workers: int
    mode: Mode = "async"
    placement: Placement = "separate"
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    host: str = "127.0.0.1"
    bind_host: str | None = None
    port: int = 0
    tls: TlsOptions | None = None
    registration_timeout: float = 300.0
    start_timeout: float = 180.0
    heartbeat_interval: float = 2.0
    heartbeat_timeout: float = 30.0
    rejoin_timeout: float = 120.0
    stall_timeout: float = 3600.0
    step_timeout: float = DEFAULT_STEP_SECONDS
    order_timeout: float = 300.0
    file_timeout: float = 6 * 3600.0
    failure_grace: float = 2.0
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        check_topology(self.num_ps, self.num_workers, self.mode, self.placement)
        if self.heartbeat_interval * 2 > self.heartbeat_timeout:
            raise ValueError(
                "heartbeat_timeout must be at least twice heartbeat_interval. Received: "
                f"heartbeat_interval={self.heartbeat_interval}, heartbeat_timeout={self.heartbeat_timeout}"
            )

    @property
    def num_nodes(self) -> int:
        """Servers and workers together."""
        return self.num_ps + self.num_workers

    @property
    def worker_ranks(self) -> range:
        """The ranks of the workers."""
        return range(self.num_ps, self.num_nodes)

    @property
    def server_ranks(self) -> range:
        """The ranks that answer pulls and pushes; see `server_ranks`."""
        return server_ranks(self.num_ps, self.num_workers, self.placement)

    @property
    def table_ranks(self) -> range:
        """The ranks that hold tables."""
        return self.server_ranks or range(1)
