"""Servers of one program each, that tests run against: built with Go, started on a free port, ended by their id."""

from __future__ import annotations

import abc
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.servers.cache import cached, needs, run

_START_SECONDS = 60.0
_TRIES = 5


def go_program(module: str, version: str, why: str) -> Path:
    """A program from the Go module proxy, built at first use (a minute or two); skips the test where Go is missing."""
    go = needs("go", why)
    name = module.rpartition("/")[2]

    def build(folder: Path) -> None:
        run([go, "install", f"{module}@{version}"], GOBIN=str(folder), GOFLAGS="-buildvcs=false")

    return cached(f"{name}-{version}", build) / name


class ServerProcess(abc.ABC):
    """A server that runs inside the context; again on another port where somebody has taken its own meanwhile.

    Arguments:
        program: what `command` starts.
        log: what it writes.
    """

    def __init__(self, program: Path, log: Path) -> None:
        self.program = program
        self._log = log
        self.port = 0

    @abc.abstractmethod
    def command(self) -> Sequence[str]:
        """What starts it on `port`."""

    @abc.abstractmethod
    def answers(self) -> bool:
        """Whether it is ready; asked again and again."""

    def environment(self) -> Mapping[str, str]:
        """What it needs beside this process' own environment."""
        return {}

    def __enter__(self) -> Self:
        for _ in range(_TRIES):
            self.port = free_port()
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    self.command(),
                    env={**os.environ, **self.environment()},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            if self._wait():
                return self
            self._end()
        name = self.program.name
        raise RuntimeError(f"{name} does not start. Received: {self._log.read_text()[-2000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _wait(self) -> bool:
        """Whether the server answers; False if it ended, as it does where another took its port."""
        deadline = time.monotonic() + _START_SECONDS
        pause = threading.Event()
        while time.monotonic() < deadline and self._process.poll() is None:
            if self.answers():
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


def free_port() -> int:
    """A port of this host that nobody has right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
