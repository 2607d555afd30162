"""Nodes are real processes here: they serve, report, and never outlive their supervisor."""

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from deeprec_spark.runtime.context import load_entry
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions, Phase
from deeprec_spark.runtime.errors import ConnectionLostError, NodeError, describe_exit
from deeprec_spark.runtime.job import NodeJob, NodeSettings
from deeprec_spark.runtime.supervisor import NodeProcessError, node_environment, supervise
from deeprec_spark.runtime.transport import TlsOptions
from deeprec_spark.runtime.worker_client import NodeClient

TESTS = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def importable_entries(monkeypatch):
    monkeypatch.syspath_prepend(TESTS)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(6) as pool:
        yield pool


def start(num_ps=0, num_workers=1, mode="async", **options):
    defaults = {"heartbeat_interval": 0.5, "failure_grace": 0.5, "registration_timeout": 60}
    return Coordinator(CoordinatorOptions(num_ps, num_workers, mode, **{**defaults, **options}))


def settings_of(coordinator, entry, **more):
    options = coordinator.options
    return NodeSettings(
        options.num_ps, options.num_workers, options.mode, coordinator.address, options.token,
        f"runtime_entries:{entry}", **more,
    )  # fmt: skip


def launch(pool, coordinator, entry, payload=b"hello"):
    settings = settings_of(coordinator, entry)
    return [
        pool.submit(supervise, settings, rank, f"attempt {rank}", payload)
        for rank in range(coordinator.options.num_nodes)
    ]


def gone(pid, seconds=20.0):
    """Whether the process ends within so many seconds; a zombie has ended."""
    end = time.monotonic() + seconds
    pause = threading.Event()
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        pause.wait(0.05)
    return False


def rows_of(result):
    return np.frombuffer(result.blob, np.float32).reshape(-1, 4)


@pytest.mark.parametrize(
    ("num_ps", "num_workers", "mode"), [(0, 1, "async"), (2, 2, "async"), (1, 2, "sync")]
)
def test_a_whole_job(pool, caplog, num_ps, num_workers, mode):
    caplog.set_level(logging.INFO, logger="deeprec_spark.node")
    with start(num_ps, num_workers, mode) as coordinator:
        nodes = launch(pool, coordinator, "count_items")
        keys = list(range(-2, 3))
        before = coordinator.run_phase(Phase("read", {"keys": keys}))[0]
        items = [{"key": key} for key in keys * 4]
        if mode == "async":
            results = coordinator.run_phase(Phase("train", items=items))
        else:
            results = coordinator.run_phase(Phase("train", assignment=[items[:10], items[10:]]))
        assert sum(result.data["done"] for result in results) == 20
        after = coordinator.run_phase(Phase("read", {"keys": keys}))
        # A synchronous step averages the workers' gradients, so two items in one step count as one.
        expected = 4 if mode == "async" else 2
        for one in after:
            np.testing.assert_allclose(rows_of(one) - rows_of(before), expected, rtol=1e-5)
        assert after[0].data["dense"] == [expected * 5.0] * 5
        assert after[0].data["step"] == expected * 5
        coordinator.stop()
        assert [node.result(30) for node in nodes] == ["ended"] * len(nodes)
    assert "[worker 0] runtime_entries: worker 0 starts with hello" in caplog.messages


def test_a_worker_that_raises_fails_the_job_with_its_traceback(pool):
    with start() as coordinator:
        (node,) = launch(pool, coordinator, "fail_at_once")
        with pytest.raises(NodeError, match="ValueError: bad model") as caught:
            coordinator.run_phase(Phase("train"))
        assert "in fail_at_once" in str(caught.value)
        with pytest.raises(
            NodeProcessError, match=r"(?s)worker 0 \(rank 0\).*exit code 1.*a line on standard output"
        ):
            node.result(30)


def test_an_entry_that_cannot_be_imported_fails_the_job(pool):
    with start() as coordinator:
        (node,) = launch(pool, coordinator, "no_such_function")
        with pytest.raises(NodeError, match="no function 'no_such_function'"):
            coordinator.run_phase(Phase("train"))
        with pytest.raises(NodeProcessError):
            node.result(30)


def test_a_killed_worker_fails_the_job_with_its_log(pool):
    with start() as coordinator:
        (node,) = launch(pool, coordinator, "count_items")
        with pytest.raises(NodeError, match=r"(?s)was killed by SIGKILL.*worker 0 starts with hello"):
            coordinator.run_phase(Phase("kill"))
        with pytest.raises(NodeProcessError, match="was killed by SIGKILL"):
            node.result(30)


def _hanging(coordinator, pool):
    """Sends the hanging phase; the process ids of the worker and its child, and the running phase."""
    pids, reported = {}, threading.Event()

    def on_progress(reports):
        pids.update(reports[0].data)
        reported.set()

    running = pool.submit(coordinator.run_phase, Phase("hang"), on_progress)
    assert reported.wait(60)
    return pids, running


def test_what_a_node_started_ends_with_it(pool):
    with start() as coordinator:
        (node,) = launch(pool, coordinator, "stay")
        pids, running = _hanging(coordinator, pool)
        os.kill(pids["pid"], signal.SIGTERM)
        with pytest.raises(NodeProcessError, match="was killed by SIGTERM"):
            node.result(30)
        assert gone(pids["child"])
        with pytest.raises(NodeError, match="was killed by SIGTERM"):
            running.result(30)


def test_a_worker_that_does_not_return_is_killed_after_the_end_of_the_job(pool):
    with start(heartbeat_interval=0.2) as coordinator:
        settings = settings_of(coordinator, "stay", stop_grace=0.3)
        node = pool.submit(supervise, settings, 0, "first", b"")
        pids, running = _hanging(coordinator, pool)
        coordinator.stop()
        with pytest.raises(NodeProcessError, match=r"(?s)was killed by SIGKILL.*Still at work 0 s"):
            node.result(30)
        assert gone(pids["pid"])
        assert gone(pids["child"])
        with pytest.raises(NodeError, match="was stopped"):
            running.result(30)


def test_a_copy_of_a_rank_waits_and_takes_over(pool):
    with start(1, 1, rejoin_timeout=60) as coordinator:
        settings = settings_of(coordinator, "stay")
        nodes = [pool.submit(supervise, settings, rank, "first", b"") for rank in range(2)]
        first = coordinator.run_phase(Phase("pid"))[0].data["pid"]
        copy = pool.submit(supervise, settings, 1, "copy", b"")
        assert coordinator.run_phase(Phase("pid"))[0].data["pid"] == first
        os.kill(first, signal.SIGKILL)
        with pytest.raises(NodeProcessError):
            nodes[1].result(30)
        second = coordinator.run_phase(Phase("pid"))[0].data["pid"]
        assert second != first
        coordinator.stop()
        assert copy.result(30) == nodes[0].result(30) == "ended"


def test_a_copy_is_not_needed_when_the_job_ends(pool):
    with start() as coordinator:
        settings = settings_of(coordinator, "stay")
        first = pool.submit(supervise, settings, 0, "first", b"")
        coordinator.run_phase(Phase("pid"))
        copy = pool.submit(supervise, settings, 0, "copy", b"")
        coordinator.stop()
        assert first.result(30) == "ended"
        assert copy.result(30) == "not needed"


_SUPERVISOR = """
import sys
sys.path.insert(0, {tests!r})
from deeprec_spark.runtime.job import NodeSettings
from deeprec_spark.runtime.supervisor import supervise
supervise(NodeSettings(0, 1, "async", {address!r}, {token!r}, "runtime_entries:stay"), 0, "only", b"")
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_no_orphan_survives_the_death_of_its_supervisor(pool, stopped):
    """kill -9 of the process that plays Spark's Python worker; also while the node is stopped by a signal."""
    with start() as coordinator:
        source = _SUPERVISOR.format(tests=TESTS, address=coordinator.address, token=coordinator.token)
        supervisor = subprocess.Popen([sys.executable, "-c", source])
        try:
            pids, running = _hanging(coordinator, pool)
            if stopped:
                os.kill(pids["pid"], signal.SIGSTOP)
            supervisor.kill()
            supervisor.wait(30)
            assert gone(pids["pid"])
            assert gone(pids["child"])
            with pytest.raises(NodeError, match="its Spark task or executor was killed"):
                running.result(10)
        finally:
            supervisor.kill()
            supervisor.wait(30)


def test_a_node_ends_when_the_driver_is_gone(pool):
    """The supervisor lives, the coordinator does not answer any more: the heartbeat ends the node."""
    coordinator = start(heartbeat_interval=0.2, heartbeat_timeout=1.0)
    (node,) = launch(pool, coordinator, "stay")
    pid = coordinator.run_phase(Phase("pid"))[0].data["pid"]
    coordinator._server.stop()
    # It may end by itself or, if it is deep in a call, be killed after its grace: gone it must be.
    with contextlib.suppress(NodeProcessError):
        node.result(60)
    assert gone(pid)
    coordinator.stop(timeout=0)


def test_an_unreachable_driver_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setattr("deeprec_spark.runtime.supervisor._CONNECT_SECONDS", 0.2)
    with start() as coordinator:
        settings = settings_of(coordinator, "stay")
    with pytest.raises(ConnectionLostError, match=r"cannot reach the driver.*spark\.driver\.host"):
        supervise(settings, 0, "late", b"")


def test_a_wrong_token_is_refused():
    with start() as coordinator:
        client = NodeClient(coordinator.address, token="wrong", rank=0)
        with pytest.raises(PermissionError):
            client.claim("attempt", "host")
        client.close()


def test_the_job_survives_the_pipe():
    settings = NodeSettings(
        1,
        2,
        "sync",
        "host:1",
        "secret",
        "a:b",
        tls=TlsOptions(ca_certificate="ca.pem"),
        environment={"A": "1"},
    )
    job = NodeJob(settings, 2, 7, 1.0, 5.0, payload=bytes(range(256)) * 1000)
    stream = io.BytesIO()
    job.write(stream)
    stream.seek(0)
    assert NodeJob.read(stream) == job
    assert (job.is_server, job.name) == (False, "worker 1 (rank 2)")
    assert "secret" not in repr(job)
    with pytest.raises(EOFError, match="closed the pipe"):
        NodeJob.read(io.BytesIO(stream.getvalue()[:-1]))


def test_nodes_import_from_where_their_supervisor_does(monkeypatch):
    monkeypatch.syspath_prepend("/some/files.zip")
    found = node_environment({"EXTRA": "1"})
    assert found["PYTHONPATH"].split(os.pathsep)[0] == "/some/files.zip"
    assert found["EXTRA"] == "1"


def test_the_allocators_defaults_give_way_to_the_users(monkeypatch):
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert node_environment({})["MALLOC_MMAP_THRESHOLD_"] == str(32 << 20)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "7")
    assert node_environment({})["MALLOC_MMAP_THRESHOLD_"] == "7"


def test_every_glibc_takes_the_allocators_defaults(monkeypatch):
    """Before 2.35 it ignores an mmap threshold of more than half of a heap, which is 64 MiB at most."""
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert int(node_environment({})["MALLOC_MMAP_THRESHOLD_"]) <= (64 << 20) // 2


# Two messages of a step at a time, in the main thread and in another one.
BUFFERS = """
import resource, threading
def step():
    sent, received = bytearray(16 << 20), bytearray(4 << 20)
def faults(steps):
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
faults(20)
thread = threading.Thread(target=faults, args=(20,))
thread.start()
thread.join()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kept", [True, False])
def test_nodes_keep_the_memory_of_their_messages(monkeypatch, kept):
    """Without the mmap threshold, as where glibc refuses it, every buffer would be made of new pages."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    environment = node_environment({})
    if not kept:
        del environment["MALLOC_MMAP_THRESHOLD_"]
    done = subprocess.run(
        [sys.executable, "-c", BUFFERS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    pages = (20 << 20) // os.sysconf("SC_PAGESIZE")
    for faults in map(int, done.stdout.split()):
        assert (faults < 2 * pages) == kept, f"{faults} page faults in 20 steps of {pages} pages"


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ("no_colon", ValueError, "Received: 'no_colon'"),
        ("json:nothing", ValueError, "no function 'nothing'"),
        ("no.such.module:main", ImportError, "No module named"),
    ],
)
def test_entries_are_checked(entry, error, message):
    with pytest.raises(error, match=message):
        load_entry(entry)


def test_exit_codes_in_words():
    assert describe_exit(3) == "ended with exit code 3"
    assert "SIGKILL" in describe_exit(-9)
    assert "memoryOverhead" in describe_exit(-9)
    assert describe_exit(-11) == "was killed by SIGSEGV"
