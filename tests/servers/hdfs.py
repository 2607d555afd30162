"""A real HDFS of one name node and one data node in a JVM of its own."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

from tests.servers.cache import cached, needs, run

_HERE = Path(__file__).resolve().parent / "hdfs_server"
_START_SECONDS = 120.0


def jars() -> Path:
    """The folder of Hadoop's jars, from Maven at first use (about 80 MB)."""
    maven = needs("mvn", "it fetches the HDFS that these tests run against")

    def fetch(folder: Path) -> None:
        shutil.copy(_HERE / "pom.xml", folder)
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={folder}"]
        run([maven, "-q", "-B", "-f", str(folder / "pom.xml"), *goal])

    return cached("hdfs-3.3.4", fetch)


class HdfsServer:
    """A running HDFS; a context manager. It ends by itself with this process, which holds its standard input."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._java = needs("java", "HDFS runs in a JVM")
        self._jars = jars()
        self.port = 0

    @property
    def uri(self) -> str:
        """Where it is."""
        return f"hdfs://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process of the name node and the data node."""
        return self._process.pid

    def __enter__(self) -> HdfsServer:
        ready = self._folder / "port"
        self._log = self._folder / "hdfs.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    self._java,
                    "--add-opens",
                    "java.base/java.lang=ALL-UNNAMED",
                    "-Xmx384m",
                    "-cp",
                    f"{self._jars}/*",
                    str(_HERE / "MiniDfs.java"),
                    str(self._folder / "data"),
                    str(ready),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
            )
        deadline = time.monotonic() + _START_SECONDS
        pause = threading.Event()
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end()
                raise RuntimeError(f"HDFS does not start. Received: {self._log.read_text()[-2000:]}")
            pause.wait(0.1)
        self.port = int(ready.read_text())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
