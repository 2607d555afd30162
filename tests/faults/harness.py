"""What the fault tests share: drivers in processes of their own, and the nodes that they started."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deeprec_spark.platform.standalone import StandaloneCluster
from tests.command_lines import command_line

MAIN = Path(__file__).with_name("driver_main.py")
NODE = "deeprec_spark.runtime.node"
EPOCHS = 2

Event = dict[str, Any]


class FaultTestError(AssertionError):
    """What was waited for did not come; the message ends with the driver's log."""


@dataclass(frozen=True)
class Data:
    """Parquet folders of the training and the test rows, and how many the former are."""

    train: str
    test: str
    rows: int


@dataclass(frozen=True)
class Nodes:
    """The processes of a running job, and the executors above them."""

    servers: tuple[psutil.Process, ...]
    workers: tuple[psutil.Process, ...]

    @staticmethod
    def executor(node: psutil.Process) -> psutil.Process:
        """The JVM that the node's Spark task belongs to."""
        return next(parent for parent in node.parents() if parent.name() == "java")


class Driver:
    """A process with a SparkSession on the cluster, that fits when told to.

    Its JVM and all nodes are gone after `close`, `kill` or the end of this process.
    """

    def __init__(self, cluster: StandaloneCluster, folder: Path, executors: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"driver-{time.monotonic_ns()}.log"
        settings = {
            **cluster.conf(executors),
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.local.dir": str(folder / "scratch"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.task.maxFailures": "8",
            "spark.excludeOnFailure.enabled": "false",
            # Connections of Unix sockets cannot be cut from outside.
            "spark.executorEnv.DEEPREC_SPARK_LOCAL_SOCKETS": "0",
        }
        self._cluster = cluster
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(MAIN), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "DEEPREC_SPARK_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"},
                text=True,
            )
        self._events: queue.Queue[Event | None] = queue.Queue()
        self.told: list[Event] = []
        self._run = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.application = str(self.wait_for("ready", timeout=180)["application"])

    @property
    def pid(self) -> int:
        """The driver's Python."""
        return self._process.pid

    def send(self, wanted: Mapping[str, Any]) -> None:
        """Start a fit."""
        self._run += 1
        self.told = []
        self._log_start = self.log.stat().st_size
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**wanted, "run": self._run}) + "\n")
        self._process.stdin.flush()

    def wait_for(
        self, *kinds: str, timeout: float, where: Callable[[Event], bool] = lambda event: True
    ) -> Event:
        """The next event of one of these kinds (that fulfils a condition); those before it are dropped."""
        end = time.monotonic() + timeout
        while True:
            try:
                event = self._events.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                raise FaultTestError(f"No {kinds} in {timeout:.0f} s. {self.tail()}") from None
            if event is None:
                raise FaultTestError(f"The driver has ended. {self.tail()}")
            if event["run"] != self._run:
                continue  # of a fit that an earlier test has left behind
            if event["event"] in kinds and where(event):
                return event
            if event["event"] == "failed" and "failed" not in kinds:
                raise FaultTestError(f"The fit failed: {event['text']}\n{self.tail()}")

    def wait_for_log(self, pattern: str, timeout: float) -> re.Match[str]:
        """Wait until the driver's log, of the running fit, has a match."""
        end = time.monotonic() + timeout
        pause = threading.Event()
        while True:
            with self.log.open(errors="replace") as log:
                log.seek(self._log_start)
                found = re.search(pattern, log.read())
            if found:
                return found
            if time.monotonic() > end:
                raise FaultTestError(f"No {pattern!r} in {timeout:.0f} s. {self.tail()}")
            pause.wait(0.1)

    def nodes(self, servers: int, workers: int, timeout: float = 60.0) -> Nodes:
        """The nodes of the job that runs; those that listen for calls are servers."""
        end = time.monotonic() + timeout
        pause = threading.Event()
        while True:
            found = [process for process in self._executors_children() if NODE in command_line(process)]
            listening = [process for process in found if _listens(process)]
            others = [process for process in found if process not in listening]
            if len(listening) == servers and len(others) == workers:
                return Nodes(tuple(listening), tuple(others))
            if time.monotonic() > end:
                raise FaultTestError(f"{len(listening)} servers, {len(others)} workers run. {self.tail()}")
            pause.wait(0.1)

    def _executors_children(self) -> list[psutil.Process]:
        spark_worker = psutil.Process(self._cluster.processes["worker-0"].pid)
        found = []
        for executor in spark_worker.children():
            if self.application in " ".join(command_line(executor)):
                with suppress(psutil.NoSuchProcess):
                    found += executor.children(recursive=True)
        return found

    def kill(self) -> list[psutil.Process]:
        """Kill the driver's Python and its JVM, both at once, as the system does when memory is out.

        Returns what was running below its executors.
        """
        left = self._executors_children()
        family = psutil.Process(self.pid).children(recursive=True)
        self._process.kill()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(30)
        self.close()
        return left

    def close(self) -> None:
        """End the driver, politely if it still runs."""
        family = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.pid).children(recursive=True)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and self._process.poll() is not None:
                with suppress(OSError):
                    stream.close()
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(30)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._reader.join(10)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def tail(self, size: int = 6000) -> str:
        """The end of the driver's log."""
        return f"Its log is {self.log} and ends:\n{self.log.read_text(errors='replace')[-size:]}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                event = json.loads(line[1:])
                event["at"] = time.monotonic()
                self.told.append(event)
                self._events.put(event)
        self._events.put(None)


class FaultRun:
    """One fit that something happens to."""

    def __init__(self, driver: Driver, data: Data, model_dir: Path | str, **wanted: Any) -> None:
        self.driver = driver
        self.num_ps = wanted.setdefault("num_ps", 1)
        self.num_workers = wanted.setdefault("num_workers", 2)
        self.colocated = wanted.get("estimator", {}).get("placement") == "colocated"
        self.fault_at = 0.0
        together = self.num_workers if wanted.get("mode") == "sync" else 1
        config = {"seconds": 0.05, "counting_workers": together, **wanted.pop("config", {})}
        wanted = {"mode": "async", "epochs": EPOCHS, "train": data.train, "test": data.test, **wanted}
        driver.send({**wanted, "config": config, "rows": data.rows, "model_dir": str(model_dir)})

    def in_the_middle(self, steps: int = 30) -> Nodes:
        """Wait until training is under way; the nodes that do it."""
        self.driver.wait_for("progress", timeout=240, where=lambda event: event["steps"] >= steps)
        # Workers that hold tables answer calls as servers do.
        serving, others = (self.num_workers, 0) if self.colocated else (self.num_ps, self.num_workers)
        return self.driver.nodes(serving, others)

    def saved(self, kind: str = "incremental", timeout: float = 240.0) -> int:
        """Wait for a checkpoint of this kind; the step it is of."""
        return int(self.driver.wait_for_log(rf"Saved step (\d+) \({kind}", timeout).group(1))

    def fault(self) -> None:
        """Now something happens: the time from here on counts."""
        self.fault_at = time.monotonic()

    def recovered(self, timeout: float = 240.0, known_at: float | None = None) -> float:
        """Wait until training is further than it was; the seconds since the fault.

        `known_at` is when it was found out, if that took a while: reports that were under way until then do not count.
        """
        before = self.fault_at if known_at is None else known_at
        reached = (event for event in self.driver.told if event["at"] <= before)
        furthest = max(map(_place, reached), default=(0, 0))
        event = self.driver.wait_for(
            "progress",
            timeout=timeout,
            where=lambda event: event["at"] > before and _place(event) > furthest,
        )
        return float(event["at"] - self.fault_at)

    def done(self, timeout: float = 240.0) -> Event:
        """Wait for the end of the fit."""
        return self.driver.wait_for("done", timeout=timeout)

    def refused(self, timeout: float = 240.0) -> Event:
        """Wait for the fit to fail; the event has `type`, `text`, and the seconds since the fault."""
        event = self.driver.wait_for("failed", "done", timeout=timeout)
        if event["event"] == "done":
            raise FaultTestError(f"The fit went through. {self.driver.tail()}")
        return {**event, "after": event["at"] - (self.fault_at or event["at"] - event["seconds"])}


def _place(event: Event) -> tuple[int, int]:
    return event.get("epoch", 0), event.get("steps", 0)


def _listens(process: psutil.Process) -> bool:
    try:
        return any(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))
    except psutil.Error:
        return False
