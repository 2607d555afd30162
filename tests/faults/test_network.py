"""Connections of a running job are cut, and strangers knock at its ports."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from deeprec_spark.runtime.channel import Channel
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.transport import Connection
from tests.faults import checks
from tests.faults.harness import Data, Driver, FaultRun
from tests.faults.record import Outcome, Recorder
from tests.servers.cache import needs

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.fixture
def run(fault_driver: Driver, fault_data: Data, undisturbed: dict[str, Any], tmp_path: Path) -> FaultRun:
    """A fit. (The undisturbed one has run before.)"""
    return FaultRun(fault_driver, fault_data, tmp_path / "model")


def ports(process: psutil.Process) -> list[int]:
    """Where a process listens."""
    found = process.net_connections("tcp")
    return sorted({one.laddr.port for one in found if one.status == psutil.CONN_LISTEN})


def cut(port: int) -> int:
    """Have the kernel end all connections to a port at once; how many there were."""
    ss = needs("ss", "it cuts connections (Debian's iproute2)")
    done = subprocess.run(
        [ss, "-K", "-n", "-H", "dport", "=", f":{port}"], capture_output=True, text=True, check=False
    )
    if "not permitted" in done.stderr or "not supported" in done.stderr:
        pytest.skip(f"the kernel does not let us cut connections: {done.stderr.strip()}")
    return len(done.stdout.splitlines())


def test_connections_cut_in_the_middle(
    run: FaultRun, recorder: Recorder, undisturbed: dict[str, Any]
) -> None:
    nodes = run.in_the_middle()
    [port] = ports(nodes.servers[0])
    pause = threading.Event()
    cuts = 0
    run.fault()
    for _ in range(20):
        cuts += cut(port)
        pause.wait(0.05)
    seconds = run.recovered()
    done = run.done()
    assert cuts >= 10
    assert done["restarts"] == 0
    how = f"{cuts} cuts of the workers' connections to the server; each push takes effect exactly once"
    checks.recovered(recorder, "connections cut in the middle of pushes", how, done, undisturbed, seconds)


def test_wrong_and_missing_tokens(run: FaultRun, recorder: Recorder, undisturbed: dict[str, Any]) -> None:
    nodes = run.in_the_middle()
    job: list[tuple[int, str, type[Channel | Connection]]]
    job = [(port, "statistics", Channel) for port in ports(nodes.servers[0])]
    refused = 0
    job += [(port, "claim", Connection) for port in ports(psutil.Process(run.driver.pid))]
    for port, method, kind in job:
        for token in ("", "wrong"):
            connection = kind(f"127.0.0.1:{port}", token=token, timeout=5)
            with pytest.raises((PermissionError, ConnectionError, RuntimeError, TimeoutError)) as caught:
                connection.call(method, Message({"rank": 1, "attempt": "x", "host": "x", "timeout": 0.0}))
            refused += isinstance(caught.value, PermissionError)
            connection.close()
    done = run.done()
    assert refused == 4  # twice by the server, twice by the coordinator
    recorder(
        Outcome("wrong or missing token", "refused", "each call is refused at once; the job goes on", 0.0)
    )
    checks.recovered(Recorder(None), "", "", done, undisturbed, None)
