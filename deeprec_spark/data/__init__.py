"""Reading prepared Parquet data: row ranges that workers lease, and batches for the training step."""

from deeprec_spark.data.batch import Batch, Groups
from deeprec_spark.data.dataset import ParquetDataset, RowRange
from deeprec_spark.data.reader import BatchReader, ReaderOptions, Step, Work
from deeprec_spark.data.shuffle import RowBuffer

__all__ = [
    "Batch",
    "BatchReader",
    "Groups",
    "ParquetDataset",
    "ReaderOptions",
    "RowBuffer",
    "RowRange",
    "Step",
    "Work",
]
