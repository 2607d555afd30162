"""What a fit tells of itself: time by stage, load by shard."""

from deeprec_spark.tracing.observer import FitObserver
from deeprec_spark.tracing.options import TracingOptions
from deeprec_spark.tracing.recorder import FitRecorder
from deeprec_spark.tracing.report import FitReport, ShardReport, SkewReport, WorkerReport
from deeprec_spark.tracing.stages import STAGES, StageClock

__all__ = [
    "STAGES",
    "FitObserver",
    "FitRecorder",
    "FitReport",
    "ShardReport",
    "SkewReport",
    "StageClock",
    "TracingOptions",
    "WorkerReport",
]
