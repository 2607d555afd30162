"""Nodes on a real standalone cluster: launch, too few slots, and kill -9 of everything that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).resolve().parent.parent
HELPERS = '''
import json, os, signal, sys, threading, time
import numpy as np
import psutil
from pyspark.sql import SparkSession
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions, Phase
from deeprec_spark.runtime.errors import NodeError, SlotsError
from deeprec_spark.runtime.launch import LaunchOptions, launch_nodes

builder = SparkSession.builder.master(sys.argv[1]).appName("runtime-tests")
for name, value in {
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.driver.memory": "1g",
    "spark.executor.cores": "1", "spark.executor.memory": "512m", "spark.cores.max": "3",
    "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false",
}.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
spark.sparkContext.addPyFile(sys.argv[2])  # nodes import what Spark ships

def start(num_ps, num_workers, mode, **more):
    defaults = {"heartbeat_interval": 0.5, "registration_timeout": 120, "failure_grace": 1.0}
    return Coordinator(CoordinatorOptions(num_ps, num_workers, mode, **{**defaults, **more}))

def launch(coordinator, entry="count_items"):
    options = LaunchOptions.of(coordinator, "runtime_entries:" + entry, b"hello")
    return launch_nodes(spark, options, on_failure=coordinator.abort)

def java_above(pid):
    """The executor's JVM above a node."""
    return next(parent for parent in psutil.Process(pid).parents() if parent.name() == "java")

def gone(pid, seconds=30):
    end = time.monotonic() + seconds
    pause = threading.Event()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
        if time.monotonic() > end:
            return False
        pause.wait(0.1)
    return True

def report(**found):
    print("FOUND", json.dumps(found), flush=True)
'''

SCENES = """
def too_few_slots():
    started = time.monotonic()
    with start(1, 5, "async") as coordinator:
        try:
            launch(coordinator)
        except SlotsError as error:
            return {"text": str(error), "seconds": time.monotonic() - started}

def train(mode):
    with start(1, 2, mode) as coordinator:
        group = launch(coordinator)
        items = [{"key": key} for key in range(-3, 3)] * 4
        phase = Phase("train", items=items) if mode == "async" else Phase("train", assignment=[items[:12], items[12:]])
        done = sum(result.data["done"] for result in coordinator.run_phase(phase))
        dense = coordinator.run_phase(Phase("read", {"keys": [0]}))[0].data["dense"]
        coordinator.finish()
        group.wait()
        return done, dense

def executor_killed():
    "Asynchronous: the executor of one worker dies in the middle; Spark starts the task again and the job goes on."
    with start(1, 2, "async", rejoin_timeout=90) as coordinator:
        group = launch(coordinator)

        def processes():
            "Assigned work waits for every worker, where leased items end without one that comes late."
            results = coordinator.run_phase(Phase("train", assignment=[[], []]))
            return {result.rank: result.data["pid"] for result in results}

        pids = processes()
        killed = []

        def on_progress(reports):
            if not killed:
                killed.append(pids[2])
                java_above(pids[2]).kill()

        results = coordinator.run_phase(Phase("train", items=[{"key": n % 7} for n in range(600)]), on_progress)
        node_gone = gone(pids[2])
        dense = coordinator.run_phase(Phase("read", {"keys": [0]}))[0].data["dense"]
        replaced = processes()[2] != pids[2]
        coordinator.finish()
        group.wait(90)
        done = sum(result.data["done"] for result in results)
        return {"done": done, "dense": dense[0], "gone": node_gone, "replaced": replaced}

def task_killed():
    "Synchronous: kill -9 of the Python process of one task; the job fails, says who, and leaves nobody behind."
    with start(1, 2, "sync") as coordinator:
        group = launch(coordinator, "stay")
        pids = {result.rank: result.data["pid"] for result in coordinator.run_phase(Phase("pid"))}
        psutil.Process(pids[1]).parent().kill()
        try:
            coordinator.run_phase(Phase("hang"))
        except NodeError as error:
            text = str(error)
        group.cancel()
        return {"text": text, "gone": {rank: gone(pid) for rank, pid in pids.items()}}

scenes = {
    "slots": too_few_slots(), "async": train("async"), "sync": train("sync"),
    "task": task_killed(), "executor": executor_killed(),
}
report(**scenes)
spark.stop()
"""

DRIVER_KILLED = """
with start(1, 2, "async") as coordinator:
    group = launch(coordinator, "stay")
    pids = [result.data["pid"] for result in coordinator.run_phase(Phase("pid"))]
    report(pids=pids, driver=os.getpid(), jvms=[java_above(pid).pid for pid in pids])
    threading.Event().wait(300)
"""


def found_in(output: str) -> dict:
    return json.loads(output.split("FOUND ", 1)[1].splitlines()[0])


@pytest.fixture(scope="module")
def scenes(standalone_cluster, tmp_path_factory):
    """What one driver saw in all scenes: a JVM for each would cost more than the scenes themselves."""
    script = tmp_path_factory.mktemp("driver") / "driver.py"
    script.write_text(HELPERS + SCENES, encoding="utf-8")
    command = [sys.executable, str(script), standalone_cluster, str(TESTS / "runtime_entries.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return found_in(done.stdout)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_too_few_slots_are_an_error_with_both_numbers(scenes):
    assert "needs 6 task slots at once (1 servers + 5 workers), the cluster has 3" in scenes["slots"]["text"]
    assert "spark.cores.max=3" in scenes["slots"]["text"]
    assert scenes["slots"]["seconds"] < 40


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_jobs_in_both_modes(scenes):
    assert scenes["async"] == [24, [24.0] * 5]
    assert scenes["sync"] == [24, [12.0] * 5]


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_an_asynchronous_job_outlives_an_executor(scenes):
    found = scenes["executor"]
    assert found["replaced"]
    assert found["gone"]
    # Each item was completed once; the one in the killed worker's hands may have been pushed before it died.
    assert 600 <= found["dense"] <= 601
    assert found["done"] <= 600


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_synchronous_job_fails_clearly_and_leaves_no_orphans(scenes):
    assert scenes["task"]["gone"] == {"1": True, "2": True}
    assert "worker 0 (rank 1)" in scenes["task"]["text"]
    assert "was killed" in scenes["task"]["text"]


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_no_node_outlives_a_killed_driver(standalone_cluster, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(HELPERS + DRIVER_KILLED, encoding="utf-8")
    command = [sys.executable, str(script), standalone_cluster, str(TESTS / "runtime_entries.py")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert driver.stdout is not None
    nodes = []
    try:
        line = next(line for line in driver.stdout if line.startswith("FOUND"))
        found = found_in(line)
        nodes = [psutil.Process(pid) for pid in found["pids"] + found["jvms"]]
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        for process in family:  # the driver's JVM too: both halves die at once, as in an out-of-memory kill
            process.kill()
        _, alive = psutil.wait_procs(nodes, timeout=60)
        assert not alive
    finally:
        driver.kill()
        driver.wait(30)
        driver.stdout.close()
        for process in nodes:
            if process.is_running():
                os.kill(process.pid, 9)
