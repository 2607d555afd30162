"""How many of an executor's cores are one node's, as the driver knows it before it starts the nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeprec_spark.runtime.processors import allowed_cpus
from deeprec_spark.runtime.slots import is_connect, is_local, registered_executors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class CoreShare:
    """A node, and the cores of its executor.

    Arguments:
        node_cores: those of one node: the executor's divided by its nodes, at least `spark.task.cpus`.
        executor_cores: all of them; None where Spark is local or does not tell: nodes then use what they may.
        nodes: how many nodes the executor has that has most of them.
    """

    node_cores: int
    executor_cores: int | None
    nodes: int


def core_share(spark: SparkSession, nodes: int) -> CoreShare:
    """The share of each of so many nodes, by the executors that are there, else by what the configuration promises.

    Call it when the cluster has slots for them (`check_slots`). A Spark Connect client sees the configuration alone.
    """
    there = [] if is_connect(spark) else registered_executors(spark.sparkContext)
    return share_of(lambda name: spark.conf.get(name, None), there, nodes)


def share_of(conf: Callable[[str], str | None], there: Sequence[int], nodes: int) -> CoreShare:
    """The same, from Spark's configuration and the cores of the executors that are there.

    Spark gives each executor a task in turn, so nodes spread over all that have a free slot.

    Example:
        >>> share_of({"spark.executor.cores": "8", "spark.executor.instances": "2"}.get, [], 4)
        CoreShare(node_cores=4, executor_cores=8, nodes=2)
    """
    task = int(conf("spark.task.cpus") or 1)
    master = conf("spark.master") or ""
    if is_local(master):
        inside = master.partition("[")[2].partition("]")[0].partition(",")[0]
        total = int(inside) if inside.isdigit() else len(allowed_cpus())
        return CoreShare(max(task, min(total, len(allowed_cpus())) // nodes, 1), None, nodes)
    cores = int(conf("spark.executor.cores") or 0) or min(there, default=0) or _default_cores(master)
    if cores is None:
        return CoreShare(task, None, 1)
    needed = math.ceil(nodes / max(1, cores // task))
    # Executors that are still to come take no nodes of a job for which those that are there have slots enough.
    executors = len(there) if len(there) >= needed else max(needed, _promised(conf, master, cores))
    most = math.ceil(nodes / executors)
    return CoreShare(max(task, cores // most, 1), cores, most)


def _default_cores(master: str) -> int | None:
    """What `spark.executor.cores` is where it is not set: 1, but on a standalone cluster all that a worker has."""
    return 1 if master == "yarn" or master.startswith("k8s://") else None


def _promised(conf: Callable[[str], str | None], master: str, cores: int) -> int:
    """How many executors of so many cores the configuration asks for; 0 where it asks for all there are."""
    limit = conf("spark.cores.max")
    if limit and master.startswith("spark://"):
        return int(limit) // cores
    return int(conf("spark.executor.instances") or 0)
