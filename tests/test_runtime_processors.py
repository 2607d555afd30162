"""Threads and CPUs of a node: what a container grants, CPUs of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from deeprec_spark.cluster import ClusterOptions
from deeprec_spark.runtime import processors
from deeprec_spark.training.options import DenseStepOptions, TrainerOptions
from deeprec_spark.training.pipeline import PipelineOptions
from deeprec_spark.training.worker import WorkerJob, threads_of_an_operation
from tests.counting import SPEC, counting

NODE = """
import json, os, sys
import pyarrow as pa
from deeprec_spark.runtime import processors
found = processors.configure()
affinity, engine = sorted(os.sched_getaffinity(0)), os.environ["DEEPREC_NUM_THREADS"]
arrow = pa.cpu_count()
print(json.dumps([found.policy, found.threads, found.cpus, affinity, engine, arrow, found.part]), flush=True)
sys.stdin.read()
"""


# Processes, network and user of its own, as a container has, without its files.
CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--net"]


@pytest.fixture
def container() -> list[str]:
    """The start of a command line for a process in a container; the test is skipped where that is not allowed."""
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    return CONTAINER


def started(
    folder: Path,
    policy: processors.ExecutorPolicy,
    cores: int,
    executor: int | None = None,
    nodes: int = 1,
    *,
    around: Sequence[str] = (),
    errors: IO[str] | None = None,
    **variables: str,
) -> tuple[subprocess.Popen[str], list[Any]]:
    """A process that has configured itself, and what it found; its CPU locks are in a folder, unless told otherwise."""
    told = processors.node_environment(policy, cores, executor, nodes)
    environment = {**os.environ, **told, "DEEPREC_CPU_LOCKS": str(folder), **variables}
    environment.pop("DEEPREC_NUM_THREADS", None)
    environment = {name: value for name, value in environment.items() if value}
    process = subprocess.Popen(
        [*around, sys.executable, "-c", NODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@pytest.mark.timeout(60)
def test_pinned_nodes_of_a_host_have_cpus_of_their_own(tmp_path: Path) -> None:
    allowed = processors.allowed_cpus()
    running = []
    try:
        taken: list[int] = []
        for _ in allowed:
            process, (policy, threads, cpus, affinity, engine, *_) = started(tmp_path, "pinned", 1)
            running.append(process)
            assert (policy, threads, engine) == ("pinned", 1, "1")
            assert cpus == affinity
            taken += cpus
        assert sorted(taken) == allowed
        # One too many is not pinned; a CPU comes back when its process ends, even if it is killed.
        process, (_, _, cpus, affinity, *_) = started(tmp_path, "pinned", 1)
        running.append(process)
        assert (cpus, affinity) == ([], allowed)
        running[0].kill()
        running[0].wait(10)
        process, (_, _, cpus, *_) = started(tmp_path, "pinned", 1)
        running.append(process)
        assert cpus == [taken[0]]
    finally:
        for process in running:
            process.kill()
            process.communicate(timeout=10)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shared", ["network", "folder"])
def test_pinned_nodes_see_each_other_by_the_network_or_by_a_folder(
    tmp_path: Path, container: list[str], shared: str
) -> None:
    """As containers with temporary files of their own, or with a network of their own and a folder of the host."""
    every = len(processors.allowed_cpus())
    around = container if shared == "folder" else []
    running, taken = [], []
    try:
        for number in range(2):
            own = tmp_path / str(number)
            own.mkdir()
            locks = str(tmp_path / "host") if shared == "folder" else ""
            process, (_, _, cpus, *_) = started(
                own, "pinned", every, around=around, DEEPREC_CPU_LOCKS=locks, TMPDIR=str(own)
            )
            running.append(process)
            taken.append(set(cpus))
    finally:
        for process in running:
            process.communicate(timeout=10)
    assert not taken[0] & taken[1]
    if shared == "folder":
        assert taken == [set(processors.allowed_cpus()), set()]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("locks", ["", "shared"])
def test_a_pinned_node_in_a_container_warns_that_others_may_have_its_cpus(
    tmp_path: Path, container: list[str], locks: str
) -> None:
    told = str(tmp_path / locks) if locks else ""
    with (tmp_path / "errors").open("w+") as errors:
        process, (_, _, cpus, *_) = started(
            tmp_path,
            "pinned",
            1,
            around=container,
            errors=errors,
            DEEPREC_CPU_LOCKS=told,
            TMPDIR=str(tmp_path),
        )
        process.communicate(timeout=10)
        errors.seek(0)
        said = errors.read()
    assert len(cpus) == 1
    everything = len(processors.allowed_cpus()) == os.cpu_count()
    assert ("another container of this host may have taken the same" in said) == (everything and not locks)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["default", "inline"])
def test_other_policies_leave_the_affinity(tmp_path: Path, policy: str) -> None:
    process, (name, threads, cpus, affinity, engine, *_) = started(tmp_path, policy, 1)
    process.communicate(timeout=10)
    assert (name, cpus, affinity) == (policy, [], processors.allowed_cpus())
    assert threads == processors.usable_cpus()
    assert engine == str(threads)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["default", "pinned"])
def test_arrow_has_the_threads_of_the_node(tmp_path: Path, policy: str) -> None:
    """Not what Spark tells Python workers: that is spark.task.cpus."""
    for told in ("1", "7"):
        process, (_, threads, _, _, _, arrow, _) = started(
            tmp_path, policy, processors.usable_cpus(), OMP_NUM_THREADS=told
        )
        process.communicate(timeout=10)
        assert arrow == threads == processors.usable_cpus()


def test_what_a_cgroup_grants(tmp_path: Path) -> None:
    assert processors.cgroup_cpus(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert processors.cgroup_cpus(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert processors.cgroup_cpus(tmp_path) == 1.5
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert processors.cgroup_cpus(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("400000\n")
    assert processors.cgroup_cpus(tmp_path) == 4.0


@pytest.mark.parametrize("policy", ["default", "inline"])
@pytest.mark.parametrize(("executor", "nodes"), [(None, 1), (1, 1), (1000, 1), (None, 1000)])
def test_nodes_have_no_more_threads_than_their_executor_has_cores(
    tmp_path: Path, policy: str, executor: int | None, nodes: int
) -> None:
    process, (_, threads, _, _, engine, _, part) = started(tmp_path, policy, 1, executor, nodes)
    with process:
        process.communicate(timeout=10)
    assert process.returncode == 0
    cores = min(processors.usable_cpus(), executor or 1000)
    assert (threads, engine) == (processors.shared_threads(cores, nodes), str(threads))
    assert part == max(1, cores // nodes)


@pytest.mark.parametrize(
    ("cores", "nodes", "threads"),
    [(1, 1, 1), (1, 4, 1), (2, 1, 2), (2, 2, 2), (2, 4, 2), (4, 2, 4), (16, 1, 16), (16, 8, 4), (16, 64, 2)],
)
def test_nodes_of_one_executor_share_its_cores(cores: int, nodes: int, threads: int) -> None:
    """Two nodes have all of them each, as when they were measured; many nodes do not take all of them each."""
    assert processors.shared_threads(cores, nodes) == threads


@pytest.mark.parametrize(
    ("workers", "pipeline", "dense", "threads"),
    [
        (1, PipelineOptions(max_staleness=0), DenseStepOptions(), 4),
        (1, PipelineOptions(max_staleness=1, parallel_steps=1), DenseStepOptions(), 4),
        (1, PipelineOptions(max_staleness=1), DenseStepOptions(xla=True), 4),
        (1, PipelineOptions(max_staleness=1), DenseStepOptions(micro_batch=32), 4),
        (1, PipelineOptions(max_staleness=1), DenseStepOptions(), 2),
        (2, PipelineOptions(max_staleness=0), DenseStepOptions(), 2),
    ],
)
def test_operations_are_split_among_all_threads_where_one_step_has_them_all(
    workers: int, pipeline: PipelineOptions, dense: DenseStepOptions, threads: int
) -> None:
    job = WorkerJob(counting, {}, SPEC, TrainerOptions(dense_step=dense), pipeline=pipeline)
    chosen = processors.Processors("default", threads=4, part=2)
    assert threads_of_an_operation(chosen, job, workers) == threads


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="executor_policy='fast'"):
        ClusterOptions(executor_policy="fast")  # type: ignore[arg-type]
