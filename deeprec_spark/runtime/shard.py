"""A shard of all tables and of the dense parameters in a node, and the server that answers for it."""

from __future__ import annotations

import logging
from typing import Any

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.runtime.backup import BackupServer
from deeprec_spark.runtime.channel_server import ChannelServer
from deeprec_spark.runtime.errors import JobEndedError
from deeprec_spark.runtime.job import NodeJob
from deeprec_spark.runtime.loopback import Loopback
from deeprec_spark.runtime.node_control import OrderHandler, server_orders, store_orders
from deeprec_spark.runtime.server import ParameterServer, ServerOptions
from deeprec_spark.runtime.staleness import StalenessBound
from deeprec_spark.runtime.transport import local_host_towards
from deeprec_spark.tracing.node import NodeObserver

logger = logging.getLogger(__name__)


class Shard:
    """What a parameter server is; with `placement="colocated"` every worker has one beside its training thread.

    Arguments:
        job: of a node that serves; `job.shard` says which shard.
        observer: told of each call, and where the tables' counters are.
    """

    def __init__(self, job: NodeJob, observer: NodeObserver) -> None:
        settings, shard = job.settings, job.shard
        if shard is None:
            raise ValueError(f"Only nodes that serve hold a shard. Received: {job.name}")
        self._store = LocalStore(shard_index=shard, num_shards=len(settings.server_ranks))
        options = ServerOptions(
            settings.num_ps,
            settings.num_workers,
            mode=settings.mode,
            sync_timeout=settings.sync_timeout,
            placement=settings.placement,
        )
        semi_sync = settings.semi_sync
        self._service: ParameterServer | BackupServer
        if semi_sync is not None and semi_sync.backup_workers:
            self._service = BackupServer(self._store, options, semi_sync.backup_workers)
        else:
            self._service = ParameterServer(self._store, options)
        observer.tables = self._store.statistics
        handlers = observer.timed(self._service.handlers())
        self._bound: StalenessBound | None = None
        if shard == 0 and semi_sync is not None and semi_sync.max_staleness is not None:
            self._bound = StalenessBound(semi_sync, options.worker_ranks, settings.num_ps)
            handlers = self._bound.around(handlers)
        self._server = ChannelServer(
            handlers,
            host=local_host_towards(settings.coordinator),
            token=settings.token,
            tls=settings.tls,
            max_bytes=settings.max_message_bytes,
        )
        self._open = True
        self.loopback = Loopback(handlers)
        """For calls from this process."""
        logger.info("Serving at %s", self.address)

    @property
    def address(self) -> str:
        """`host:port` for calls from other nodes."""
        return self._server.address

    def orders(self) -> dict[str, OrderHandler]:
        """What the driver may order: its part of saves and restores."""
        return {**store_orders(self._store), **server_orders(self._fence)}

    def wake(self) -> None:
        """The job has ended: calls that wait for other ranks fail."""
        self._service.stop()
        if self._bound is not None:
            self._bound.fail(JobEndedError("The job has ended."))

    def stop(self) -> None:
        """Answer no more calls, and free the tables. May be repeated."""
        if not self._open:
            return
        self._open = False
        self.wake()
        self._server.stop()
        self._store.close()

    def _fence(self, rank: int, incarnation: int) -> Any:
        """A worker was lost: its pushes are refused, and nobody waits for it."""
        position = self._service.fence(rank, incarnation)
        if self._bound is not None:
            self._bound.lost(rank, incarnation)
        return position
