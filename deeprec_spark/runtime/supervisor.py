"""The body of a Spark task: starts a node's process, forwards its output, and outlives it by nothing."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any

from deeprec_spark.redaction import redact
from deeprec_spark.runtime.calls import retried
from deeprec_spark.runtime.errors import ConnectionLostError, JobError, describe_exit
from deeprec_spark.runtime.job import NodeJob, NodeSettings
from deeprec_spark.runtime.membership import LOG_TAIL_LINES
from deeprec_spark.runtime.worker_client import NodeClient

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.5
_MAX_BATCH = 1000
_MAX_LINE = 8000
_CONNECT_SECONDS = 15.0
# A step's messages are several MB, and glibc would take their memory from the system afresh each time: a pull of 4 MB
# took 12 ms, now 6. 32 MiB is the most that every glibc takes for the first (those before 2.35 ignore more); the second
# alone would make it worse, since it ends glibc's own adaptation, and all above 128 KiB would be mapped and unmapped.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


class NodeProcessError(JobError):
    """A node's process ended with an error; the message holds its last lines."""


def supervise(settings: NodeSettings, rank: int, attempt: str, payload: bytes) -> str:
    """Run the node of this rank until it ends; returns in words how.

    A copy of a rank that lives elsewhere waits here, ready to take over.

    Raises:
        NodeProcessError: the node failed.
        ConnectionLostError: the driver cannot be reached from this host.
    """
    client = NodeClient(settings.coordinator, token=settings.token, rank=rank, tls=settings.tls)
    try:
        accepted = _claim(client, attempt)
        if accepted is None:
            return "not needed"
        job = NodeJob(
            settings,
            rank,
            client.incarnation,
            heartbeat_interval=accepted["heartbeat_interval"],
            heartbeat_timeout=accepted["heartbeat_timeout"],
            payload=b"" if rank < settings.num_ps else payload,
        )
        code, tail = run_node(job, client)
        _report_exit(client, code)
        if code != 0:
            lines = "\n".join(f"    {line}" for line in tail)
            raise NodeProcessError(
                f"{job.name} on {socket.gethostname()} {describe_exit(code)}. Its last lines:\n{lines}"
            )
        return "ended"
    finally:
        client.close()


def run_node(job: NodeJob, client: NodeClient) -> tuple[int, list[str]]:
    """Start the process, hand it its job, wait for it; its exit code and last lines. It never survives this call."""
    process = subprocess.Popen(
        # The name is for those who look at the list of processes.
        [sys.executable, "-u", "-m", "deeprec_spark.runtime.node", job.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=node_environment(job.settings.environment),
        start_new_session=True,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("subprocess gave no pipes")
    forwarder = LogForwarder(client, process.stdout, secrets=(job.settings.token,))
    try:
        try:
            job.write(process.stdin)
        except BrokenPipeError:
            logger.warning("%s ended before it had read its job", job.name)
        code = process.wait()
    finally:
        _kill(process)
        process.stdin.close()
        tail = forwarder.finish()
    return code, tail


def node_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a node: this process's, with the same import path, and `extra` on top."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**_MALLOC, **os.environ, "PYTHONPATH": path, **extra}


class LogForwarder:
    """Reads a process's output and sends its lines to the driver's log, in batches; keeps the last ones.

    `secrets` and the passwords of URIs are masked.
    """

    def __init__(self, client: NodeClient, stream: IO[bytes], secrets: Sequence[str] = ()) -> None:
        self._client = client
        self._secrets = secrets
        self._stream = stream
        self._condition = threading.Condition()
        self._pending: deque[str] = deque(maxlen=100 * _MAX_BATCH)
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="node-output", daemon=True)
        self._sender = threading.Thread(target=self._send, name="node-log", daemon=True)
        self._reader.start()
        self._sender.start()

    def finish(self, timeout: float = 10.0) -> list[str]:
        """Send what is left, after the process has ended; the last lines."""
        self._reader.join(timeout)
        with self._condition:
            self._ended = True
            self._condition.notify_all()
        self._sender.join(timeout)
        return list(self._tail)

    def _read(self) -> None:
        for raw in iter(self._stream.readline, b""):
            line = redact(raw.decode("utf-8", "replace").rstrip("\r\n")[:_MAX_LINE], self._secrets)
            with self._condition:
                self._pending.append(line)
                self._tail.append(line)
                if len(self._pending) >= _MAX_BATCH:
                    self._condition.notify_all()
        self._stream.close()

    def _send(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._ended or len(self._pending) >= _MAX_BATCH, _FLUSH_SECONDS
                )
                batch = [self._pending.popleft() for _ in range(min(len(self._pending), _MAX_BATCH))]
                if not batch and self._ended:
                    return
            if batch:
                self._forward(batch)

    def _forward(self, batch: list[str]) -> None:
        try:
            self._client.log(batch)
        except (JobError, TimeoutError, PermissionError) as error:
            # The executor's own log is what is left when the driver is out of reach.
            logger.warning("%d log lines could not be sent to the driver: %s", len(batch), error)
            for line in batch:
                logger.info("%s", line)


def _claim(client: NodeClient, attempt: str) -> Mapping[str, Any] | None:
    host = socket.gethostname()
    try:
        answer = retried(lambda: client.claim(attempt, host, timeout=0.0), _CONNECT_SECONDS)
    except ConnectionLostError as error:
        raise ConnectionLostError(
            f"The executor on {host} cannot reach the driver's coordinator; set spark.driver.host to an address of the "
            f"driver that executors reach, and open its ports. Received: {error}"
        ) from error
    while answer["status"] == "standby":
        answer = client.claim(attempt, host)
    return answer if answer["status"] == "accepted" else None


def _report_exit(client: NodeClient, code: int) -> None:
    try:
        client.exited(code)
    except (JobError, TimeoutError) as error:
        logger.warning("The end of the node could not be reported to the driver: %s", error)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the node, if it still runs, and all that it started: it led a process group of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        logger.debug("Nothing is left of the node's process group")
    process.wait(30.0)
