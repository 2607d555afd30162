"""A real S3 server over a folder (versitygw), whose files tests may look at and damage."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from tests.servers.cache import cached, needs, run

VERSION = "v1.8.0"
ACCESS, SECRET = "tester", "a-secret-of-tests"
BUCKET = "bucket"
_START_SECONDS = 60.0
_TRIES = 5


def client_environment(port: int) -> dict[str, str]:
    """What leads S3 clients to the server, or a proxy before it, at this port."""
    return {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def versitygw() -> Path:
    """The server's program, built from the Go module proxy at first use (about a minute)."""
    go = needs("go", "it builds the S3 server (versitygw) that these tests run against")

    def build(folder: Path) -> None:
        module = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
        run([go, "install", module], GOBIN=str(folder), GOFLAGS="-buildvcs=false")

    return cached(f"versitygw-{VERSION}", build) / "versitygw"


class S3Server:
    """A running server with one bucket; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "s3"
        (self.folder / BUCKET).mkdir(parents=True)
        self._log = folder / "versitygw.log"
        self._program = versitygw()
        self.port = 0

    def __enter__(self) -> S3Server:
        for _ in range(_TRIES):
            self.port = free_port()
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [
                        str(self._program),
                        "--port",
                        f"127.0.0.1:{self.port}",
                        "--quiet",
                        "posix",
                        str(self.folder),
                    ],
                    env={**os.environ, "ROOT_ACCESS_KEY": ACCESS, "ROOT_SECRET_KEY": SECRET},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            if self._wait():
                return self
            self._end()
        raise RuntimeError(f"The S3 server does not start. Received: {self._log.read_text()[-2000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def place(self, *names: str) -> Path:
        """Where an object lies in the server's folder."""
        return Path(self.folder, BUCKET, *names)

    def _wait(self) -> bool:
        """Whether the server answers; False if it ended, as it does where another took its port."""
        deadline = time.monotonic() + _START_SECONDS
        pause = threading.Event()
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=5).close()
            except urllib.error.HTTPError as error:
                error.close()
                return True
            except OSError:
                pause.wait(0.05)
            else:
                return True
        return False

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)


def free_port() -> int:
    """A port of this host that nobody has right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
