"""Keras layers over the embedding engine."""

from deeprec_spark.layers.groups import ExpandGroups
from deeprec_spark.layers.multi_hash import MultiHashEmbedding
from deeprec_spark.layers.sparse_embedding import SparseEmbedding
from deeprec_spark.layers.tables import bind, bind_local, find_layers, table_specs

__all__ = [
    "ExpandGroups",
    "MultiHashEmbedding",
    "SparseEmbedding",
    "bind",
    "bind_local",
    "find_layers",
    "table_specs",
]
