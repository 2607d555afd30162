"""A server that speaks Google Cloud Storage (fake-gcs-server), with one bucket, in its own memory."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.servers.process import ServerProcess, go_program

BUCKET = "bucket"


def program() -> Path:
    """The server's program, built at first use."""
    why = "it builds the server of Google Cloud Storage (fake-gcs-server) that these tests run against"
    return go_program("github.com/fsouza/fake-gcs-server", "v1.56.1", why)


class GcsServer(ServerProcess):
    """A running server with one bucket; a context manager."""

    def __init__(self, folder: Path) -> None:
        super().__init__(program(), folder / "fake-gcs-server.log")

    def command(self) -> Sequence[str]:
        """What starts it."""
        at = ["-host", "127.0.0.1", "-port", str(self.port), "-public-host", f"127.0.0.1:{self.port}"]
        return [str(self.program), "-scheme", "http", "-backend", "memory", *at]

    def answers(self) -> bool:
        """Make the bucket; False where nobody listens yet, an HTTPError for an answer that is no success."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/storage/v1/b?project=tests",
            json.dumps({"name": BUCKET}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except urllib.error.HTTPError:
            raise
        except OSError:
            return False
        return True

    def uri(self, name: str) -> str:
        """The URI of a folder in the bucket."""
        return f"gs://anonymous@{BUCKET}/{name}?scheme=http&endpoint_override=127.0.0.1:{self.port}"
