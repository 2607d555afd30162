"""Options of an Estimator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeprec_spark.cluster import ClusterOptions
from deeprec_spark.data.file_cache import CacheOptions
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.recovery import RestartOptions
from deeprec_spark.runtime.options import DeadlineOptions, Mode, Placement
from deeprec_spark.runtime.processors import ExecutorPolicy, check_policy
from deeprec_spark.runtime.semi_sync import SemiSyncOptions
from deeprec_spark.runtime.store_messages import WIRE_TYPES, WireType
from deeprec_spark.runtime.transport import TlsOptions
from deeprec_spark.saving import CheckpointOptions
from deeprec_spark.tracing import TracingOptions
from deeprec_spark.training.options import DenseStepOptions
from deeprec_spark.training.pipeline import PipelineOptions

WARMUP_UPDATES = 500
"""Updates before which no pull runs ahead, unless a job says otherwise: what they cost in quality is in
docs/performance.md."""

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class EstimatorOptions:
    """What an Estimator is made of, beside the model creator and its config.

    Args:
        num_ps: parameter servers; 0 keeps the tables inside the one worker, or with `placement="colocated"` in all.
        num_workers: workers; None is `workers_per_node` for each executor that is left to workers.
        workers_per_node: Orca's number of workers for each executor.
        mode: "async" applies each worker's updates at once; "sync" sums a global batch, and repeats bit for bit.
        placement: "separate" has parameter servers beside the workers; "colocated" keeps a shard of the tables in each
            worker, with num_ps=0.
        semi_sync: bounds what a slow worker costs: how far async workers may drift apart, or how many a sync step does
            not wait for; None is neither.
        sparse_optimizer: updates the embedding rows; None takes the kind and settings of the compiled optimizer.
        model_dir: for checkpoints and staged data: a path that driver and executors have mounted alike, or a URI that
            pyarrow or fsspec opens (s3, hdfs, gs, abfs); None is a temporary folder.
        feature_spec: how columns are prepared; None reads it beside the data or infers it from the schema.
        seed: initial weights, table rows, shuffling.
        warm_start: what the model takes over from another checkpoint while model_dir has none.
        tls: certificates for the calls between driver and nodes; None leaves them unencrypted.
        max_message_mb: larger messages between them are refused; at most 2047.
        checkpoints: when `fit` saves, beside its end.
        restarts: how often `fit` starts its nodes again after a failure.
        cache_dir: folder on each host for copies of remote files (data on s3, hdfs, …), which later epochs read; None
            reads them remotely each time.
        cache_mb: room for the copies of a host.
        tracing: what `fit` writes about itself: TensorBoard logs, a Chrome trace, a page; None writes nothing.
        shuffle_rows: rows of several row groups that `fit` shuffles together; a worker holds two such buffers in
            memory. 0 shuffles the leases, and the rows within each, which lie together in the data.
        pipeline: how far stages of later steps run ahead; with servers in async mode a worker pulls the rows of its
            next step before it has pushed its last one, unless `max_staleness=0` says otherwise.
        wire_dtype: what rows and gradients are on the network, "float32" or "bfloat16"; dense parameters are float32.
        dense_step: how TensorFlow computes the dense part of a step: XLA, micro batches.
        executor_policy: threads and CPUs of the nodes: "default", "pinned" or "inline" (docs/performance.md).
        deadlines: after what time a node or a driver that does not answer is taken for lost.
    """

    num_ps: int = 0
    num_workers: int | None = None
    workers_per_node: int = 1
    mode: Mode = "async"
    placement: Placement = "separate"
    semi_sync: SemiSyncOptions | None = None
    sparse_optimizer: Optimizer | None = None
    model_dir: str | None = None
    feature_spec: FeatureSpec | None = None
    seed: int = 0
    warm_start: WarmStart | None = None
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    restarts: RestartOptions = field(default_factory=RestartOptions)
    tracing: TracingOptions | None = None
    shuffle_rows: int = 0
    cache_dir: str | None = None
    cache_mb: int = 10_240
    log_to_driver: bool = True
    tls: TlsOptions | None = None
    max_message_mb: int = 1024
    pipeline: PipelineOptions | None = None
    wire_dtype: WireType = "float32"
    deadlines: DeadlineOptions = field(default_factory=DeadlineOptions)
    dense_step: DenseStepOptions = field(default_factory=DenseStepOptions)
    executor_policy: ExecutorPolicy = "default"

    def __post_init__(self) -> None:
        if self.cache_mb < 1:
            raise ValueError(f"cache_mb must be at least 1. Received: cache_mb={self.cache_mb}")
        if self.cache_dir is not None:
            CacheOptions(self.cache_dir)
        check_policy(self.executor_policy)
        if self.shuffle_rows < 0:
            raise ValueError(f"shuffle_rows must not be negative. Received: shuffle_rows={self.shuffle_rows}")
        if not 1 <= self.max_message_mb <= 2047:
            raise ValueError(
                f"max_message_mb must be within [1, 2047]. Received: max_message_mb={self.max_message_mb}"
            )

        if self.wire_dtype not in WIRE_TYPES:
            raise ValueError(
                f"wire_dtype must be one of {', '.join(WIRE_TYPES)}. Received: wire_dtype={self.wire_dtype!r}"
            )
        if self.mode == "sync" and self.pipeline is not None and self.pipeline.staleness > 0:
            raise ValueError(
                "mode='sync' repeats bit for bit, so its pulls see all pushes: set max_staleness=0. "
                f"Received: mode='sync', pipeline={self.pipeline}"
            )

    @property
    def pipeline_options(self) -> PipelineOptions:
        """The pipeline of each worker, with numbers for `max_staleness` and `warmup_updates`."""
        pipeline = self.pipeline or PipelineOptions()
        if pipeline.max_staleness is not None:
            return replace(pipeline, warmup_updates=pipeline.warmup_updates or 0)
        # With servers, pushes of others come between a pull and its push in any case; a worker alone stays exact.
        ahead = self.mode == "async" and (self.num_ps > 0 or self.placement == "colocated")
        warmup = WARMUP_UPDATES if pipeline.warmup_updates is None else pipeline.warmup_updates
        return replace(
            pipeline,
            max_staleness=1 if ahead and pipeline.depth else 0,
            warmup_updates=warmup if ahead else 0,
        )

    @property
    def cache(self) -> CacheOptions | None:
        """Where workers keep copies of remote files."""
        return None if self.cache_dir is None else CacheOptions(self.cache_dir, self.cache_mb << 20)

    def cluster(self, spark: SparkSession) -> ClusterOptions:
        """The nodes: where the number of workers is left open, Orca's rule decides it, less the servers."""
        return ClusterOptions(
            num_ps=self.num_ps,
            num_workers=self._num_workers(spark),
            mode=self.mode,
            placement=self.placement,
            semi_sync=self.semi_sync,
            tls=self.tls,
            max_message_bytes=self.max_message_mb << 20,
            wire_dtype=self.wire_dtype,
            deadlines=self.deadlines,
            executor_policy=self.executor_policy,
        )

    def _num_workers(self, spark: SparkSession) -> int:
        if self.num_workers is not None:
            return self.num_workers
        if self.num_ps == 0 and self.placement == "separate":
            return 1
        executors = int(spark.conf.get("spark.executor.instances", "1") or 1)
        return max(1, executors - self.num_ps) * self.workers_per_node
