"""A server that speaks Google Cloud Storage (fake-gcs-server), with one bucket, in its own memory."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from tests.servers.cache import cached, needs, run
from tests.servers.s3 import free_port

VERSION = "v1.56.1"
BUCKET = "bucket"
_START_SECONDS = 60.0
_TRIES = 5


def fake_gcs_server() -> Path:
    """The server's program, built from the Go module proxy at first use (about two minutes)."""
    go = needs(
        "go", "it builds the server of Google Cloud Storage (fake-gcs-server) that these tests run against"
    )

    def build(folder: Path) -> None:
        module = f"github.com/fsouza/fake-gcs-server@{VERSION}"
        run([go, "install", module], GOBIN=str(folder), GOFLAGS="-buildvcs=false")

    return cached(f"fake-gcs-server-{VERSION}", build) / "fake-gcs-server"


class GcsServer:
    """A running server with one bucket; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "fake-gcs-server.log"
        self._program = fake_gcs_server()
        self.port = 0

    def __enter__(self) -> GcsServer:
        for _ in range(_TRIES):
            self.port = free_port()
            at = ["-host", "127.0.0.1", "-port", str(self.port), "-public-host", f"127.0.0.1:{self.port}"]
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [str(self._program), "-scheme", "http", "-backend", "memory", *at],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            if self._make_bucket():
                return self
            self._end()
        raise RuntimeError(f"The server does not start. Received: {self._log.read_text()[-2000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def uri(self, name: str) -> str:
        """The URI of a folder in the bucket."""
        return f"gs://anonymous@{BUCKET}/{name}?scheme=http&endpoint_override=127.0.0.1:{self.port}"

    def _make_bucket(self) -> bool:
        """Make the bucket once the server answers; False if it ended, as it does where another took its port."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/storage/v1/b?project=tests",
            json.dumps({"name": BUCKET}).encode(),
            {"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + _START_SECONDS
        pause = threading.Event()
        while time.monotonic() < deadline and self._process.poll() is None:
            if _answered(request):
                return True
            pause.wait(0.05)
        return False

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)


def _answered(request: urllib.request.Request) -> bool:
    """Whether somebody listens already; an HTTPError for an answer that is no success."""
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            raise
        return False
    return True
