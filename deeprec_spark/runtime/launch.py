"""Launching a job's nodes as the tasks of one Spark job."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from deeprec_spark.runtime.coordinator import Coordinator
from deeprec_spark.runtime.errors import JobError
from deeprec_spark.runtime.job import NodeSettings
from deeprec_spark.runtime.messages import MAX_MESSAGE_BYTES
from deeprec_spark.runtime.options import DEFAULT_STEP_SECONDS, Mode, Placement
from deeprec_spark.runtime.semi_sync import SemiSyncOptions
from deeprec_spark.runtime.slots import check_slots, is_connect
from deeprec_spark.runtime.store_messages import WireType
from deeprec_spark.runtime.transport import TlsOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_SCHEMA = "rank int, status string"


@dataclass(frozen=True)
class LaunchOptions:
    """What to launch.

    Arguments:
        num_ps, num_workers, mode, placement: the topology; `mode="sync"` makes the Spark stage a barrier stage.
        coordinator: `host:port` of the running coordinator.
        token: the job's secret.
        worker_entry: `package.module:function`, importable on the executors, called with a WorkerContext.
        worker_payload: bytes for it; they travel in Spark's closure, not over the network calls of this package.
        env: variables added to the environment of every node.
        servers_timeout, sync_timeout, max_message_bytes, semi_sync, wire_dtype: see NodeSettings.
    """

    num_ps: int
    num_workers: int
    coordinator: str
    token: str = field(repr=False)
    worker_entry: str
    worker_payload: bytes = field(default=b"", repr=False)
    mode: Mode = "async"
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: TlsOptions | None = None
    servers_timeout: float = 300.0
    sync_timeout: float = DEFAULT_STEP_SECONDS
    max_message_bytes: int = MAX_MESSAGE_BYTES
    placement: Placement = "separate"
    semi_sync: SemiSyncOptions | None = None
    wire_dtype: WireType = "float32"

    @classmethod
    def of(
        cls,
        coordinator: Coordinator,
        worker_entry: str,
        worker_payload: bytes = b"",
        env: Mapping[str, str] | None = None,
        semi_sync: SemiSyncOptions | None = None,
        wire_dtype: WireType = "float32",
    ) -> LaunchOptions:
        """The options that fit a coordinator."""
        common = coordinator.options
        return cls(
            num_ps=common.num_ps,
            num_workers=common.num_workers,
            coordinator=coordinator.address,
            token=common.token,
            worker_entry=worker_entry,
            worker_payload=worker_payload,
            mode=common.mode,
            env=dict(env or {}),
            tls=common.tls,
            servers_timeout=common.registration_timeout,
            sync_timeout=common.step_timeout,
            max_message_bytes=common.max_message_bytes,
            placement=common.placement,
            semi_sync=semi_sync,
            wire_dtype=wire_dtype,
        )

    def settings(self) -> NodeSettings:
        """What every node gets."""
        return NodeSettings(
            num_ps=self.num_ps,
            num_workers=self.num_workers,
            mode=self.mode,
            coordinator=self.coordinator,
            token=self.token,
            worker_entry=self.worker_entry,
            tls=self.tls,
            servers_timeout=self.servers_timeout,
            sync_timeout=self.sync_timeout,
            max_message_bytes=self.max_message_bytes,
            environment=dict(self.env),
            placement=self.placement,
            semi_sync=self.semi_sync,
            wire_dtype=self.wire_dtype,
        )


class NodeGroup:
    """The Spark job that runs the nodes, in a thread of the driver."""

    def __init__(
        self, spark: SparkSession, options: LaunchOptions, on_failure: Callable[[BaseException], None] | None
    ) -> None:
        self._spark = spark
        self._options = options
        self._on_failure = on_failure
        self._tag = f"deeprec-spark-{uuid.uuid4().hex[:12]}"
        self._cancelled = False
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = _driver_thread(spark, self._run)
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """Why the Spark job failed; None while it runs, and if it ended well or was cancelled."""
        return self._error

    def wait(self, timeout: float | None = 60.0) -> None:
        """Wait for the end of all nodes, after `Coordinator.stop`.

        Raises:
            TimeoutError: they still run after `timeout` seconds; `cancel` ends them.
            JobError: the Spark job failed.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"The Spark job of the nodes still runs after {timeout} s; cancel() ends it.")
        if self._error is not None:
            raise self._error

    def cancel(self, timeout: float = 60.0) -> None:
        """Cancel the Spark job, if it still runs: its tasks are interrupted and their nodes killed."""
        if self._ended.is_set():
            return
        self._cancelled = True
        if is_connect(self._spark):
            self._spark.interruptTag(self._tag)
        else:
            self._spark.sparkContext.cancelJobGroup(self._tag)
        if not self._ended.wait(timeout):
            logger.warning(
                "The Spark job of the nodes did not end within %.0f s of its cancellation", timeout
            )

    def _run(self) -> None:
        try:
            self._tag_job()
            nodes = self._options.num_ps + self._options.num_workers
            frame = self._spark.range(0, nodes, 1, nodes)
            body = task_body(self._options.settings(), self._options.worker_payload)
            frame.mapInArrow(body, _SCHEMA, barrier=self._options.mode == "sync").collect()
        except Exception as error:  # any failure of the job belongs to whoever waits for it
            if not self._cancelled:
                self._error = JobError(f"Spark gave up the nodes' job: {_shortened(error)}")
                self._error.__cause__ = error
        finally:
            self._ended.set()
            if self._error is not None and self._on_failure is not None:
                self._on_failure(self._error)

    def _tag_job(self) -> None:
        if is_connect(self._spark):
            self._spark.addTag(self._tag)
        else:
            options = self._options
            description = (
                f"deeprec-spark: {options.num_ps} servers, {options.num_workers} workers, {options.mode}, "
                f"{options.placement}"
            )
            self._spark.sparkContext.setJobGroup(self._tag, description, interruptOnCancel=True)


def launch_nodes(
    spark: SparkSession, options: LaunchOptions, on_failure: Callable[[BaseException], None] | None = None
) -> NodeGroup:
    """Start every node of a job on the executors and return at once.

    Arguments:
        on_failure: called if the Spark job fails; pass `coordinator.abort`, so that its waits end.

    Raises:
        SlotsError: the cluster has fewer task slots than the job has nodes.
    """
    check_slots(spark, options.num_ps, options.num_workers)
    return NodeGroup(spark, options, on_failure)


def task_body(
    settings: NodeSettings, payload: bytes
) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    """The function that Spark runs for each partition: one row in, its id is the rank."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        from deeprec_spark.runtime.supervisor import supervise

        context: Any = TaskContext.get()
        attempt = (
            f"stage {context.stageId()}, attempt {context.attemptNumber()}, task {context.taskAttemptId()}"
        )
        ranks = [rank for batch in batches for rank in batch.column(0).to_pylist()]
        statuses = [supervise(settings, rank, attempt, payload) for rank in ranks]
        yield pa.record_batch([pa.array(ranks, pa.int32()), pa.array(statuses)], names=["rank", "status"])

    return run


def _driver_thread(spark: SparkSession, target: Callable[[], None]) -> threading.Thread:
    if is_connect(spark):
        return threading.Thread(target=target, name="spark-nodes", daemon=True)
    from pyspark import InheritableThread

    # Inherits the caller's scheduler pool, and gives its JVM thread back at its end.
    thread: threading.Thread = InheritableThread(target=target, name="spark-nodes", daemon=True)
    return thread


def _shortened(error: Exception) -> str:
    """The part of a Spark error that tells the cause: without the JVM's stack."""
    lines = str(error).splitlines()
    kept = [line for line in lines if not line.lstrip().startswith(("at ", "..."))]
    text = "\n".join(kept[:80])
    return text[:6000]


__all__ = ["LaunchOptions", "NodeGroup", "launch_nodes", "task_body"]
