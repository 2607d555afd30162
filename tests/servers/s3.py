"""A real S3 server over a folder (versitygw), whose files tests may look at and damage."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.servers.process import ServerProcess, go_program

ACCESS, SECRET = "tester", "a-secret-of-tests"
BUCKET = "bucket"


def program() -> Path:
    """The server's program, built at first use."""
    why = "it builds the S3 server (versitygw) that these tests run against"
    return go_program("github.com/versity/versitygw/cmd/versitygw", "v1.8.0", why)


def client_environment(port: int) -> dict[str, str]:
    """What leads S3 clients to the server, or a proxy before it, at this port."""
    return {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


class S3Server(ServerProcess):
    """A running server with one bucket; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "s3"
        (self.folder / BUCKET).mkdir(parents=True)
        super().__init__(program(), folder / "versitygw.log")

    def command(self) -> Sequence[str]:
        """What starts it."""
        at = f"127.0.0.1:{self.port}"
        return [str(self.program), "--port", at, "--quiet", "posix", str(self.folder)]

    def environment(self) -> Mapping[str, str]:
        """Who may come."""
        return {"ROOT_ACCESS_KEY": ACCESS, "ROOT_SECRET_KEY": SECRET}

    def answers(self) -> bool:
        """Whether it does, with whatever."""
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            return False
        return True

    def place(self, *names: str) -> Path:
        """Where an object lies in the server's folder."""
        return Path(self.folder, BUCKET, *names)
