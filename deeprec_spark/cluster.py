"""A cluster of nodes for one job: coordinator in the driver, servers and workers on Spark executors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deeprec_spark.runtime.coordinator import Coordinator
from deeprec_spark.runtime.core_share import core_share
from deeprec_spark.runtime.cut import Cutter
from deeprec_spark.runtime.launch import LaunchOptions, NodeGroup, launch_nodes
from deeprec_spark.runtime.messages import MAX_MESSAGE_BYTES
from deeprec_spark.runtime.options import CoordinatorOptions, DeadlineOptions, Mode, Placement, check_topology
from deeprec_spark.runtime.orders import Answer
from deeprec_spark.runtime.phases import Phase, PhaseResult, Progress
from deeprec_spark.runtime.processors import ExecutorPolicy, check_policy, node_environment
from deeprec_spark.runtime.semi_sync import SemiSyncOptions
from deeprec_spark.runtime.store_messages import WireType
from deeprec_spark.runtime.transport import TlsOptions
from deeprec_spark.training.worker import ENTRY, WorkerJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterOptions:
    """How many nodes, and how they train together. `num_ps=0` is one worker that holds the tables itself, or with
    `placement="colocated"` any number of workers that each hold a shard.

    `tls` encrypts the calls between driver and nodes; messages above `max_message_bytes` are refused; `deadlines` say
    when something that does not answer is lost; `wire_dtype` is what rows and gradients are between nodes.
    """

    num_ps: int = 0
    num_workers: int = 1
    mode: Mode = "async"
    tls: TlsOptions | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES
    deadlines: DeadlineOptions = field(default_factory=DeadlineOptions)
    placement: Placement = "separate"
    semi_sync: SemiSyncOptions | None = None
    wire_dtype: WireType = "float32"
    executor_policy: ExecutorPolicy = "default"

    def __post_init__(self) -> None:
        check_topology(self.num_ps, self.num_workers, self.mode, self.placement)
        check_policy(self.executor_policy)
        if self.semi_sync is not None:
            self.semi_sync.check(self.mode, self.num_workers)

    @property
    def sync_workers(self) -> int:
        """How many workers' gradients make one step."""
        return self.num_workers if self.mode == "sync" else 1

    @property
    def drops_samples(self) -> bool:
        """Whether steps go on without the samples of late workers."""
        return self.semi_sync is not None and self.semi_sync.backup_workers > 0


class TrainingCluster:
    """Starts the nodes when entered, runs phases on them, and ends them when left."""

    def __init__(self, spark: SparkSession, options: ClusterOptions, job: WorkerJob) -> None:
        self.options = options
        self._spark = spark
        self._job = job
        self._coordinator: Coordinator | None = None
        self._nodes: NodeGroup | None = None

    def __enter__(self) -> TrainingCluster:
        options = self.options
        coordinator = Coordinator(
            CoordinatorOptions(
                num_ps=options.num_ps,
                num_workers=options.num_workers,
                mode=options.mode,
                placement=options.placement,
                host=self._spark.conf.get("spark.driver.host", None) or "127.0.0.1",
                bind_host=self._spark.conf.get("spark.driver.bindAddress", None),
                tls=options.tls,
                max_message_bytes=options.max_message_bytes,
                **options.deadlines.coordinator_options(),
            )
        )
        try:
            launch = LaunchOptions.of(
                coordinator,
                ENTRY,
                self._job.to_bytes(),
                env=self._node_environment(),
                semi_sync=options.semi_sync,
                wire_dtype=options.wire_dtype,
            )
            self._nodes = launch_nodes(self._spark, launch, on_failure=coordinator.abort)
        except BaseException:
            coordinator.stop()
            raise
        self._coordinator = coordinator
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._coordinator is not None  # __enter__ has set both
        assert self._nodes is not None
        try:
            # The coordinator answers until the Spark job has ended: a task that is started again just now, for a node
            # that was lost, must hear that there is nothing to do.
            self._coordinator.finish(timeout=30.0 if error is None else 5.0)
            if error is None:
                self._nodes.wait()
        finally:
            self._nodes.cancel()
            self._coordinator.stop(timeout=5.0)

    def wait_ready(self, on_tick: Callable[[], None] | None = None) -> None:
        """Wait until all nodes run; a RegistrationError names those that do not."""
        self._running().wait_ready(on_tick=on_tick)
        logger.info(
            "Nodes are running: %d servers, %d workers", self.options.num_ps, self.options.num_workers
        )

    def run(
        self,
        phase: Phase,
        on_progress: Callable[[Sequence[Progress]], None] | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> list[PhaseResult]:
        """Run one phase on the workers; results in rank order."""
        return self._running().run_phase(phase, on_progress=on_progress, on_tick=on_tick)

    def observe(self, payload: Mapping[str, Any], everyone: bool) -> dict[int, Answer]:
        """What the nodes with tables tell of themselves, or all nodes, by rank; see `NodeObserver.observe`."""
        return self._running().order("observe", payload, None if everyone else self.cutter.table_ranks)

    @property
    def cutter(self) -> Cutter:
        """Takes consistent cuts, and restores them."""
        return Cutter(self._running())

    @property
    def next_phase(self) -> int:
        """The number that the next phase will have, as a cut through it tells."""
        return self._running().next_phase

    def first_worker(self) -> int:
        """The rank of a worker that runs, to ask for what any of them can tell."""
        running = self._running().running_workers()
        return running[0] if running else self.options.num_ps

    def _node_environment(self) -> dict[str, str]:
        """Beside the processors: TensorFlow's start-up notes are the same on every node, and would bury the log."""
        share = core_share(self._spark, self.options.num_ps + self.options.num_workers)
        return {
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
            **node_environment(
                self.options.executor_policy, share.node_cores, share.executor_cores, share.nodes
            ),
        }

    def _running(self) -> Coordinator:
        if self._coordinator is None:
            raise RuntimeError(
                "Use the cluster as a context manager. Received: a cluster that was not entered"
            )
        return self._coordinator
