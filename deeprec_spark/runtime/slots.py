"""Task slots: whether the cluster can run all nodes of a job at once, known before they are launched."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from deeprec_spark.runtime.errors import SlotsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

# Executors register one after another when an application starts. How long to wait for the next one, where the
# configuration promises enough of them, and where it promises less or nothing …
_PROMISED_SECONDS = 20.0
_SETTLE_SECONDS = 5.0
# … and for the first one, and in all, from the application's start.
_STARTUP_SECONDS = 120.0
_POLL_SECONDS = 0.2


def check_slots(
    spark: SparkSession, num_ps: int, num_workers: int, *, startup_seconds: float = _STARTUP_SECONDS
) -> None:
    """Return when the cluster has a task slot for each node, or cannot tell (Spark Connect).

    Waits for executors that are still registering after the application's start.

    Raises:
        SlotsError: there are fewer slots; both numbers and the settings to change are in the message.
    """
    if is_connect(spark):
        logger.info("Spark Connect does not tell the number of task slots; the registration deadline decides")
        return
    needed = num_ps + num_workers
    context = spark.sparkContext
    slots = count_slots(context)
    master = str(context.master)
    if slots < needed and not is_local(master):
        slots = _wait_for_executors(context, needed, startup_seconds)
    possible = max(slots, _dynamic_slots(context))
    if possible < needed:
        raise SlotsError(explain_slots(needed, possible, num_ps, num_workers, master, _settings(context)))


def count_slots(context: Any) -> int:
    """Tasks that the registered executors can run at once: cores / spark.task.cpus, other resources counted in."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def registered_executors(context: Any) -> list[int]:
    """The cores of each executor that has registered; none where Spark is local."""
    found = context._jsc.sc().statusStore().executorList(True)
    executors = [found.apply(number) for number in range(found.size())]
    return [int(one.totalCores()) for one in executors if one.id() != "driver"]


def explain_slots(
    needed: int, slots: int, num_ps: int, num_workers: int, master: str, settings: dict[str, str]
) -> str:
    """The message of a SlotsError."""
    if is_local(master):
        remedy = f"use a master of local[{needed}] or more"
    else:
        remedy = (
            "raise spark.executor.instances or spark.executor.cores (and spark.cores.max on a standalone cluster; "
            "lower spark.task.cpus if it is above 1)"
        )
    if slots == 0:
        remedy = (
            f"see why no executor has registered (is the cluster busy with other applications?), {remedy}"
        )
    found = ", ".join(f"{name}={value}" for name, value in settings.items())
    return (
        f"The job needs {needed} task slots at once ({num_ps} servers + {num_workers} workers), "
        f"the cluster has {slots}: {remedy}, or ask for less with num_ps and workers_per_node. "
        f"Received: master={master}, {found}"
    )


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a Spark Connect client, without a JVM of its own."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local(master: str) -> bool:
    """Whether the tasks of this master run in the driver's JVM."""
    return master == "local" or master.startswith("local[")


def _wait_for_executors(context: Any, needed: int, startup_seconds: float) -> int:
    now = time.monotonic()
    age = max(0.0, time.time() - context.startTime / 1000.0)
    end = now + startup_seconds - age
    promised = _promised_slots(context)
    patience = _SETTLE_SECONDS if promised is None or promised < needed else _PROMISED_SECONDS
    slots, changed = count_slots(context), now
    pause = threading.Event()
    while slots < needed and slots != promised and (now := time.monotonic()) < end:
        if slots > 0 and now - changed > patience:
            break
        pause.wait(_POLL_SECONDS)
        latest = count_slots(context)
        if latest != slots:
            slots, changed = latest, time.monotonic()
    return slots


def _promised_slots(context: Any) -> int | None:
    """The slots that the configuration asks the cluster for; None where it asks for all there are."""
    conf = context.getConf()
    cpus = int(conf.get("spark.task.cpus", "1"))
    cores, instances, limit = (
        conf.get(name, None)
        for name in ("spark.executor.cores", "spark.executor.instances", "spark.cores.max")
    )
    if limit is not None and context.master.startswith("spark://"):
        return int(limit) // cpus
    if instances is not None:
        return int(instances) * (int(cores or "1") // cpus)
    return None


def _dynamic_slots(context: Any) -> int:
    """What dynamic allocation may still add up to; 0 where it is off."""
    conf = context.getConf()
    if conf.get("spark.dynamicAllocation.enabled", "false").lower() != "true":
        return 0
    executors = int(conf.get("spark.dynamicAllocation.maxExecutors", str(2**31 - 1)))
    return executors * int(conf.get("spark.executor.cores", "1")) // int(conf.get("spark.task.cpus", "1"))


def _settings(context: Any) -> dict[str, str]:
    conf = context.getConf()
    names = ("spark.executor.instances", "spark.executor.cores", "spark.cores.max", "spark.task.cpus")
    return {name: conf.get(name, "unset") for name in names}
