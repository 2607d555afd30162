"""Which server holds what: keys by hash bucket, dense parameters in contiguous shards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deeprec_spark.embedding.dense import dense_range
from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


def split_dense(vector: Float32Array, num_servers: int) -> list[Float32Array]:
    """Each server's contiguous part of a flat vector, as views."""
    return [vector[slice(*dense_range(len(vector), server, num_servers))] for server in range(num_servers)]


def server_of(keys: Int64Array, num_servers: int) -> Int64Array:
    """The server of each key, int64 `[n]`."""
    servers: Int64Array = bucket(keys).astype(np.int64) * num_servers // NUM_BUCKETS
    return servers


def split_keys(keys: Sequence[Int64Array], num_servers: int) -> list[list[Int64Array]]:
    """Positions of each table's keys by server: `result[server][table]` indexes `keys[table]`, in rising order.

    All tables are split in one pass: no work in Python grows with the number of keys.
    """
    num_tables = len(keys)
    if num_servers == 1:
        return [[np.arange(len(part), dtype=np.int64) for part in keys]]
    lengths = np.fromiter((len(part) for part in keys), dtype=np.int64, count=num_tables)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    everything = np.concatenate(keys) if num_tables else np.empty(0, dtype=np.int64)
    table = np.repeat(np.arange(num_tables, dtype=np.int64), lengths)
    group = server_of(everything, num_servers) * num_tables + table
    groups = num_servers * num_tables
    # numpy sorts 16-bit integers by radix, several times faster.
    small = group.astype(np.uint16) if groups <= np.iinfo(np.uint16).max else group
    order = np.argsort(small, kind="stable")
    bounds = np.concatenate(([0], np.cumsum(np.bincount(group, minlength=groups)))).tolist()
    return [
        [
            order[bounds[server * num_tables + table] : bounds[server * num_tables + table + 1]]
            - starts[table]
            for table in range(num_tables)
        ]
        for server in range(num_servers)
    ]
