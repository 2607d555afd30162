"""Slots are checked before anything starts, and nodes run as the tasks of a real Spark job."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deeprec_spark.runtime import slots
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions
from deeprec_spark.runtime.errors import SlotsError
from deeprec_spark.runtime.launch import LaunchOptions, launch_nodes

TESTS = Path(__file__).parent


def test_fewer_slots_than_nodes_is_an_error_at_once_with_both_numbers(spark):
    with Coordinator(CoordinatorOptions(num_ps=1, num_workers=4)) as coordinator:
        started = time.monotonic()
        with pytest.raises(SlotsError) as caught:
            launch_nodes(spark, LaunchOptions.of(coordinator, "runtime_entries:stay"))
    assert time.monotonic() - started < 5
    text = str(caught.value)
    assert "needs 5 task slots at once (1 servers + 4 workers), the cluster has 2" in text
    assert "local[5]" in text
    assert "num_ps and workers_per_node" in text
    slots.check_slots(spark, 1, 1)


class Executors:
    """A stand-in for the SparkContext of a cluster whose executors register over time."""

    def __init__(self, counts, conf=None, age=0.0):
        self._counts = list(counts)
        self._conf = {"spark.executor.cores": "1", **(conf or {})}
        self.master = "spark://host:1"
        self.startTime = (time.time() - age) * 1000
        self._jsc = SimpleNamespace(sc=lambda: self)
        self.asked = 0

    def resourceProfileManager(self):  # noqa: N802  # Spark's name
        return SimpleNamespace(defaultResourceProfile=lambda: "default")

    def maxNumConcurrentTasks(self, profile):  # noqa: N802  # Spark's name
        self.asked += 1
        return self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]

    def getConf(self):  # noqa: N802  # Spark's name
        return self._conf


def session(context):
    return SimpleNamespace(sparkContext=context)


def test_executors_that_are_still_registering_are_waited_for():
    slots.check_slots(session(Executors([0, 0, 1, 2, 3])), 1, 2)


def test_an_application_that_started_long_ago_is_not_waited_for():
    context = Executors([2], age=3600)
    with pytest.raises(SlotsError, match=r"needs 3 task slots.*has 2: raise spark.executor.instances"):
        slots.check_slots(session(context), 1, 2)
    assert context.asked <= 2


def test_the_wait_for_executors_ends(monkeypatch):
    monkeypatch.setattr(slots, "_SETTLE_SECONDS", 0.3)
    with pytest.raises(SlotsError, match="has 1"):
        slots.check_slots(session(Executors([1])), 1, 2)
    with pytest.raises(SlotsError, match="has 0: see why no executor has registered"):
        slots.check_slots(session(Executors([0])), 1, 2, startup_seconds=0.5)


def test_no_wait_once_all_promised_executors_are_there():
    context = Executors([1, 2], {"spark.cores.max": "2", "spark.executor.instances": "9"})
    with pytest.raises(SlotsError, match="has 2"):
        slots.check_slots(session(context), 1, 2)
    assert context.asked == 2
    context = Executors([0, 4], {"spark.executor.instances": "2", "spark.executor.cores": "2"})
    context.master = "yarn"
    with pytest.raises(SlotsError, match="has 4"):
        slots.check_slots(session(context), 1, 4)
    assert context.asked == 2


def test_promised_executors_get_more_time(monkeypatch):
    monkeypatch.setattr(slots, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(slots, "_PROMISED_SECONDS", 30.0)
    slots.check_slots(session(Executors([1, 1, 1, 1, 3], {"spark.cores.max": "3"})), 1, 2)


def test_dynamic_allocation_may_still_grow():
    conf = {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "2"}
    grown = {**conf, "spark.executor.cores": "2", "spark.task.cpus": "1"}
    slots.check_slots(session(Executors([1], grown, age=3600)), 1, 3)
    with pytest.raises(SlotsError, match="has 2"):
        slots.check_slots(session(Executors([1], conf, age=3600)), 1, 3)


def test_the_message_names_the_settings_to_change():
    text = slots.explain_slots(
        4, 3, 1, 3, "spark://h:1", {"spark.executor.instances": "3", "spark.cores.max": "unset"}
    )
    for word in (
        "spark.executor.instances=3",
        "spark.executor.cores",
        "spark.cores.max=unset",
        "num_ps",
        "spark.task.cpus",
    ):
        assert word in text


_LOCAL = """
import json
import sys
import numpy as np
from pyspark.sql import SparkSession
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions, Phase
from deeprec_spark.runtime.errors import JobError, NodeError
from deeprec_spark.runtime.launch import LaunchOptions, launch_nodes

spark = (
    SparkSession.builder.master("local[3]").config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.memory", "1g")
    .config("spark.ui.showConsoleProgress", "false").getOrCreate()
)

def job(num_ps, num_workers, mode, body, entry="count_items"):
    options = CoordinatorOptions(num_ps, num_workers, mode, heartbeat_interval=0.5, registration_timeout=90)
    with Coordinator(options) as coordinator:
        launch = LaunchOptions.of(coordinator, "runtime_entries:" + entry, b"payload")
        group = launch_nodes(spark, launch, on_failure=coordinator.abort)
        result = body(coordinator)
        coordinator.stop()
        return result, group

def train(coordinator):
    items = [{"key": key} for key in range(6)]
    if coordinator.options.mode == "async":
        results = coordinator.run_phase(Phase("train", items=items))
    else:
        results = coordinator.run_phase(Phase("train", assignment=[items[:3], items[3:]]))
    return sum(result.data["done"] for result in results)

def fail(coordinator):
    try:
        coordinator.run_phase(Phase("fail"))
    except NodeError as error:
        return str(error)

found = {}
for mode in ("async", "sync"):
    found[mode], group = job(1, 2, mode, train)
    group.wait()
found["embedded"], group = job(0, 1, "async", train)
group.wait()
found["failure"], group = job(1, 2, "async", fail)
try:
    group.wait()
except JobError as error:
    found["spark"] = str(error)
found["cancelled"], group = job(0, 1, "async", lambda coordinator: coordinator.wait_ready(), "stay")
group.cancel()
found["after_cancel"] = repr(group.error)
spark.stop()
print("FOUND", json.dumps(found))
"""


@pytest.mark.timeout(240)
def test_jobs_on_local_spark(run_python):
    """One server and two workers, async and sync; embedded; a worker's failure; a second job after each."""
    import json

    done = run_python(_LOCAL, env={"PYTHONPATH": str(TESTS)})
    found = json.loads(done.stdout.split("FOUND ", 1)[1].splitlines()[0])
    assert (found["async"], found["sync"], found["embedded"]) == (6, 6, 6)
    assert "ZeroDivisionError: as the test wanted" in found["failure"]
    assert "exit code 1" in found["spark"]
    assert found["after_cancel"] == "None"


_LATE = """
import os
import signal
from pyspark.sql import SparkSession
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions, Phase
from deeprec_spark.runtime.launch import LaunchOptions, launch_nodes

spark = (
    SparkSession.builder.master("local[3,4]").config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.memory", "1g")
    .config("spark.ui.showConsoleProgress", "false").getOrCreate()
)
with Coordinator(CoordinatorOptions(1, 2, "async", heartbeat_interval=0.5, registration_timeout=90)) as coordinator:
    group = launch_nodes(
        spark, LaunchOptions.of(coordinator, "runtime_entries:count_items", b""), on_failure=coordinator.abort
    )
    results = coordinator.run_phase(Phase("train", items=[{"key": key} for key in range(6)]))
    os.kill(results[1].data["pid"], signal.SIGKILL)
    coordinator.finish()
    group.wait(120)
print("ENDED WELL", group.error)
spark.stop()
"""


@pytest.mark.timeout(240)
def test_a_worker_that_is_lost_when_all_is_done_costs_nothing(run_python):
    """Spark starts its task again after the job's end: that task must be able to hear so."""
    assert "ENDED WELL None" in run_python(_LATE, env={"PYTHONPATH": str(TESTS)}).stdout
