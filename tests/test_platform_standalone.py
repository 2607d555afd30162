"""The standalone cluster: real processes, a real application, nothing left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from deeprec_spark.platform.processes import LoggedProcess, ProcessError
from deeprec_spark.platform.standalone import StandaloneCluster
from tests.conftest import RunPython

JOB = """
import json, os, sys
from pyspark.sql import SparkSession
builder = SparkSession.builder
for key, value in json.loads(sys.argv[1]).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
def task(rows):
    yield os.getppid(), sys.prefix
found = spark.sparkContext.parallelize(range(6), 6).mapPartitions(task).collect()
print(len({parent for parent, _ in found}), {prefix for _, prefix in found} == {sys.prefix})
spark.stop()
"""


@pytest.mark.cluster
def test_executors_of_the_cluster_run_this_python(
    spark_cluster: StandaloneCluster, run_python: RunPython
) -> None:
    import json

    assert [worker["state"] for worker in spark_cluster.state()["workers"]] == ["ALIVE"]
    done = run_python(JOB, json.dumps(spark_cluster.conf()), timeout=120)
    executors, same_python = done.stdout.split()
    assert 1 <= int(executors) <= 3
    assert same_python == "True"


@pytest.mark.cluster
def test_stop_leaves_no_process(tmp_path: Path) -> None:
    with StandaloneCluster(workers=2, executors=2, directory=tmp_path / "cluster") as cluster:
        pids = [process.pid for process in cluster.processes.values()]
        assert len(pids) == 3
        assert all("java" in psutil.Process(pid).name() for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert (tmp_path / "cluster" / "worker-1.log").stat().st_size > 0


def test_no_workers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Received: workers=2, executors=1"):
        StandaloneCluster(workers=2, executors=1)


def test_a_process_that_ends_early_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such port'); raise SystemExit(3)"]
    with (
        LoggedProcess(command, log=tmp_path / "log", env=os.environ, name="server") as process,
        pytest.raises(ProcessError, match=r"server ended before it was ready(.|\n)*no such port"),
    ):
        process.wait_for("ready", timeout=20)


def test_a_silent_process_meets_the_deadline(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with LoggedProcess(command, log=tmp_path / "log", env=os.environ, name="server") as process:
        with pytest.raises(ProcessError, match="not ready in 0 s"):
            process.wait_for("ready", timeout=0.3)
        assert process.running
    assert not psutil.pid_exists(process.pid)


def test_a_child_ends_with_its_parent(run_python: RunPython, tmp_path: Path) -> None:
    """A parent that is killed hard, with no chance to clean up, takes its child along."""
    code = f"""
import os, signal, sys
from pathlib import Path
from deeprec_spark.platform.processes import LoggedProcess
child = LoggedProcess([sys.executable, "-u", "-c", "print('up'); import signal; signal.pause()"],
                      log=Path({str(tmp_path / "log")!r}), env=os.environ, name="child")
child.wait_for("up", timeout=20)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_python(code, check=False)
    pid = int(done.stdout)
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(timeout=10)
