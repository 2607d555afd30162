"""A real Spark standalone cluster on this machine: master and worker processes of the pip-installed Spark."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deeprec_spark.platform.processes import LoggedProcess, ProcessError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"

# The master's and workers' own logs: one line each on standard error, read by LoggedProcess.
_LOG4J2 = """\
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""


def spark_home() -> Path:
    """The folder of the Spark that pyspark brings, or SPARK_HOME."""
    if home := os.environ.get("SPARK_HOME"):
        return Path(home)
    import pyspark

    return Path(pyspark.__file__).parent


class StandaloneCluster:
    """A master and workers, started on entry and ended on exit; no ssh, no fixed port.

    Args:
        workers: Worker processes.
        executors: Executors that fit into the whole cluster, of one core each.
        executor_memory_mb: JVM memory of one executor, MiB.
        directory: Where logs and scratch files go; kept. Default: a temporary folder, removed on exit unless
            the cluster failed.
        env: Additional environment of the workers, thus of the executors.
        start_timeout: Seconds until master and workers must be there.

    Raises:
        ProcessError: A process died or did not register in time; the message ends with its log.

    Example:
        >>> with StandaloneCluster(executors=3) as cluster:
        ...     subprocess.run(["spark-submit", *cluster.submit_arguments(), "job.py"], check=True)
    """

    def __init__(
        self,
        workers: int = 1,
        executors: int = 3,
        *,
        executor_memory_mb: int = 1024,
        directory: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        if workers < 1 or executors < workers:
            raise ValueError(
                f"A cluster needs at least one worker, and one executor on each. "
                f"Received: workers={workers}, executors={executors}"
            )
        self.workers = workers
        self.executors = executors
        self.executor_memory_mb = executor_memory_mb
        self._keep = directory is not None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="deeprec-standalone-"))
        self._env = dict(env or {})
        self._start_timeout = start_timeout
        self._stack = ExitStack()
        self._web_url = ""
        self.master_url = ""
        self.processes: dict[str, LoggedProcess] = {}

    def start(self) -> StandaloneCluster:
        """Start all processes and wait until every worker is registered."""
        deadline = time.monotonic() + self._start_timeout
        self.directory.mkdir(parents=True, exist_ok=True)
        conf_dir = self.directory / "conf"
        conf_dir.mkdir(exist_ok=True)
        (conf_dir / "log4j2.properties").write_text(_LOG4J2, encoding="utf-8")
        try:
            master = self._launch(
                "master",
                "org.apache.spark.deploy.master.Master",
                "--host",
                HOST,
                "--port",
                "0",
                "--webui-port",
                "0",
            )
            self.master_url = master.wait_for(
                r"Starting Spark master at (spark://\S+)", deadline - time.monotonic()
            ).group(1)
            port = master.wait_for(
                r"MasterWebUI.* started at https?://[^\s:]+:(\d+)", deadline - time.monotonic()
            ).group(1)
            self._web_url = f"http://{HOST}:{port}"
            for index in range(self.workers):
                cores = self.executors // self.workers + (index < self.executors % self.workers)
                self._launch(
                    f"worker-{index}",
                    "org.apache.spark.deploy.worker.Worker",
                    *("--host", HOST, "--port", "0", "--webui-port", "0"),
                    *("--cores", str(cores), "--memory", f"{cores * self.executor_memory_mb}M"),
                    *("--work-dir", str(self.directory / f"work-{index}"), self.master_url),
                )
            self._wait_for_workers(deadline)
        except BaseException:
            self._keep = True
            self.stop()
            raise
        logger.info("Spark standalone cluster %s with %d executors is ready", self.master_url, self.executors)
        return self

    def state(self) -> dict[str, Any]:
        """The master's own view: what its /json/ page says."""
        with urllib.request.urlopen(f"{self._web_url}/json/", timeout=5) as response:
            state: dict[str, Any] = json.load(response)
        return state

    def conf(self, executors: int | None = None) -> dict[str, str]:
        """Spark properties of an application on this cluster that takes `executors` (default: all) of one core."""
        wanted = str(self.executors if executors is None else executors)
        return {
            "spark.master": self.master_url,
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.executor.instances": wanted,
            "spark.executor.cores": "1",
            "spark.executor.memory": f"{self.executor_memory_mb}m",
            "spark.cores.max": wanted,
            "spark.pyspark.python": sys.executable,
            "spark.ui.enabled": "false",
        }

    def submit_arguments(self, executors: int | None = None) -> list[str]:
        """The same properties as arguments of spark-submit."""
        return [word for item in self.conf(executors).items() for word in ("--conf", "=".join(item))]

    def stop(self) -> None:
        """End every process this cluster started, workers first; waits until they are gone."""
        self._stack.close()
        if self._keep:
            logger.info("Logs of the Spark standalone cluster: %s", self.directory)
        else:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> StandaloneCluster:
        return self.start()

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        self._keep = self._keep or exc_type is not None
        self.stop()

    def _launch(self, name: str, main_class: str, *arguments: str) -> LoggedProcess:
        env = {
            **os.environ,
            "SPARK_HOME": str(spark_home()),
            "SPARK_CONF_DIR": str(self.directory / "conf"),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": str(self.directory / "scratch"),
            "SPARK_DAEMON_MEMORY": "512m",
            "PYSPARK_PYTHON": sys.executable,
            **self._env,
        }
        process = LoggedProcess(
            [str(spark_home() / "bin" / "spark-class"), main_class, *arguments],
            log=self.directory / f"{name}.log",
            env=env,
            name=f"Spark {name}",
        )
        self.processes[name] = process
        self._stack.callback(process.stop)
        return process

    def _wait_for_workers(self, deadline: float) -> None:
        pause = threading.Event()
        alive = 0
        while time.monotonic() < deadline:
            for process in self.processes.values():
                if not process.running:
                    raise ProcessError(f"{process.name} ended at start. {process.tail()}")
            try:
                alive = sum(worker["state"] == "ALIVE" for worker in self.state()["workers"])
            except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
                logger.debug("The master's page does not answer yet: %s", error)
            if alive == self.workers:
                return
            pause.wait(0.1)
        raise ProcessError(
            f"{alive} of {self.workers} workers registered at {self.master_url} in {self._start_timeout:.0f} s. "
            f"{self.processes['worker-0'].tail()}"
        )
