"""Main of a node's process: `python -m deeprec_spark.runtime.node`, started by its supervisor.

Reads its job from standard input, which stays open as its lifeline; logs to standard error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.store import EmbeddingStore
from deeprec_spark.runtime import processors
from deeprec_spark.runtime.backup import BackupStore
from deeprec_spark.runtime.context import WorkerContext, load_entry
from deeprec_spark.runtime.errors import JobEndedError, JobError
from deeprec_spark.runtime.gate import StepGate
from deeprec_spark.runtime.job import NodeJob
from deeprec_spark.runtime.lifeline import die_with_parent, kill_own_group
from deeprec_spark.runtime.node_control import (
    Capture,
    NodeControl,
    OrderHandler,
    store_orders,
    worker_orders,
)
from deeprec_spark.runtime.node_log import NODE_LOG_FORMAT
from deeprec_spark.runtime.pace import BackupPace, Pace
from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions
from deeprec_spark.runtime.shard import Shard
from deeprec_spark.runtime.staleness import StepTurns
from deeprec_spark.runtime.worker_client import Heartbeat, NodeClient, WorkerClient
from deeprec_spark.tracing.node import NodeObserver

logger = logging.getLogger("deeprec_spark.runtime.node")


class NodeProcess:
    """One node: connects to the coordinator and plays its role until the job ends."""

    def __init__(self, job: NodeJob) -> None:
        self._job = job
        settings = job.settings
        self._client = WorkerClient(
            settings.coordinator,
            token=settings.token,
            rank=job.rank,
            incarnation=job.incarnation,
            tls=settings.tls,
            max_bytes=settings.max_message_bytes,
        )
        self._observer = NodeObserver(self._client.clock)
        self._gate = StepGate()
        self._capture: list[Capture] = []
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._done = threading.Event()
        self._shard: Shard | None = None

    def run(self) -> int:
        """Play the role until the job ends; the process's exit code."""
        try:
            if self._job.is_server:
                self._serve()
            else:
                self._work()
            return 0
        except JobEndedError:
            return 0
        except Exception as error:  # whatever it is, the driver must hear of it
            return self._report(error)
        finally:
            if self._shard is not None:
                self._shard.stop()
            self._client.close()

    def farewell(self) -> None:
        """Tell the driver that the Spark task of this node is gone, so that it need not wait for a deadline."""
        try:
            self._client.exited(-signal.SIGKILL, reason="its Spark task or executor was killed", timeout=1.0)
        except (JobError, TimeoutError, PermissionError) as error:
            logger.warning("The driver does not hear it: %s", error)

    def _serve(self) -> None:
        shard = self._shard = Shard(self._job, self._observer)
        self._client.announce(shard.address)
        with self._heartbeat(), self._control(shard.orders()):
            # The control's long poll hears of the end at once, the heartbeat in any case.
            self._ended.wait()
            shard.stop()

    def _work(self) -> None:
        settings = self._job.settings
        shard = self._shard = None if self._job.shard is None else Shard(self._job, self._observer)
        self._client.announce(None if shard is None else shard.address)
        with self._heartbeat():
            entry = load_entry(settings.worker_entry)
            store = self._make_store()
            orders = worker_orders(self._gate, lambda: self._capture[-1] if self._capture else None)
            if shard is not None:
                orders |= shard.orders()
            elif isinstance(store, LocalStore):
                orders |= store_orders(store)
                self._observer.tables = store.statistics
            context = WorkerContext(
                rank=self._job.rank,
                worker_index=self._job.rank - settings.num_ps,
                num_workers=settings.num_workers,
                mode=settings.mode,
                client=self._client,
                store=store,
                payload=self._job.payload,
                gate=self._gate,
                pace=self._make_pace(store),
                on_cut=self._capture.append,
                spans=self._observer.spans,
            )
            try:
                with self._control(orders):
                    entry(context)
            finally:
                store.close()

    def _make_store(self) -> EmbeddingStore:
        settings = self._job.settings
        if not settings.server_ranks:
            return LocalStore()
        addresses = self._client.servers(settings.servers_timeout)
        options = RemoteStoreOptions(
            token=settings.token,
            rank=self._job.rank,
            incarnation=self._job.incarnation,
            tls=settings.tls,
            step_timeout=settings.sync_timeout + 30.0,
            max_message_bytes=settings.max_message_bytes,
            wire_dtype=settings.wire_dtype,
            position=self._gate.position if settings.mode == "async" else None,
        )
        shard, number = self._shard, self._job.shard
        local = {} if shard is None or number is None else {number: shard.loopback}
        if settings.semi_sync is not None and settings.semi_sync.backup_workers:
            return BackupStore(addresses, options, local)
        return RemoteStore(addresses, options, local)

    def _make_pace(self, store: EmbeddingStore) -> Pace:
        if isinstance(store, BackupStore):
            return BackupPace(self._job.rank, store)
        if self._job.settings.semi_sync is not None and isinstance(store, RemoteStore):
            return StepTurns(store.ask_first)
        return Pace()

    def _end(self) -> None:
        """The job is over: whoever waits for other nodes in this one need not any more."""
        self._ended.set()
        if self._shard is not None:
            self._shard.wake()

    @contextmanager
    def _control(self, orders: Mapping[str, OrderHandler]) -> Iterator[None]:
        client = NodeClient(
            self._job.settings.coordinator,
            token=self._job.settings.token,
            rank=self._job.rank,
            incarnation=self._job.incarnation,
            tls=self._job.settings.tls,
            max_bytes=self._job.settings.max_message_bytes,
        )
        control = NodeControl(client, {**orders, "observe": self._observer.observe}, self._end)
        try:
            yield
        finally:
            control.close()

    @contextmanager
    def _heartbeat(self) -> Iterator[None]:
        interval, timeout = self._job.heartbeat_interval, self._job.heartbeat_timeout
        beats = Heartbeat(self._client, interval=interval, timeout=timeout, on_stop=self._on_stop)
        try:
            yield
        finally:
            # The thread may be in `_on_stop`, waiting for this: it must be told before it is joined.
            self._done.set()
            beats.close()

    def _on_stop(self, reason: str) -> None:
        """In the heartbeat's thread: the job is over, or over for this copy."""
        logger.info("Ending: %s", reason)
        self._stopped.set()
        self._end()
        grace = self._job.settings.stop_grace
        if not self._done.wait(grace):
            logger.warning("Still at work %.0f s after the end of the job: killed", grace)
            kill_own_group()

    def _report(self, error: Exception) -> int:
        if self._stopped.is_set():
            logger.warning("Failed after the end of the job, most likely because of it", exc_info=error)
            return 0
        logger.error("Failed", exc_info=error)
        try:
            self._client.fail(error)
        except (JobError, TimeoutError, PermissionError) as lost:
            logger.error("The failure could not be reported: %s", lost)
        return 1


def main() -> int:
    """Read the job, tie this process to its supervisor, play the role."""
    stream = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    job = NodeJob.read(stream)
    logging.basicConfig(level=logging.INFO, format=NODE_LOG_FORMAT, stream=sys.stderr)
    processors.configure()
    node = NodeProcess(job)
    die_with_parent(stream, node.farewell)
    return node.run()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Native threads (TensorFlow, gRPC) may not hold up or crash the end of a process that has done its work.
    os._exit(code)
