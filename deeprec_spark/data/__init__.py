"""Reading prepared Parquet data: row ranges that workers lease, and batches for the training step."""

from deeprec_spark.data.batch import Batch, Groups
from deeprec_spark.data.dataset import ParquetDataset, RowRange
from deeprec_spark.data.reader import BatchReader, ReaderOptions, Step, Work

__all__ = ["Batch", "BatchReader", "Groups", "ParquetDataset", "ReaderOptions", "RowRange", "Step", "Work"]
