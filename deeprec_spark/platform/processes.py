"""Child processes whose output is kept, watched for a line, and that never outlive their parent."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

# Asks the kernel to end the process when its parent is gone, then becomes the program itself: a demo or a test
# that is killed leaves no JVM behind. (A `preexec_fn` could do it too, but is unsafe beside threads.)
_TIED = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform == 'linux':\n"
    "    ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "    if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


class ProcessError(RuntimeError):
    """A child process ended, or stayed silent, before it was ready."""


class LoggedProcess:
    """A child process with its output in a file.

    The process ends with this one at the latest. Start it from a thread that lives as long as it is needed:
    Linux ties the child to the thread that made it.

    Args:
        command: Program and arguments.
        log: File that standard output and error go to.
        env: The whole environment of the child.
        name: What errors call it.

    Example:
        >>> with LoggedProcess(["echo", "port 1234"], log=tmp / "echo.log", env={}, name="echo") as process:
        ...     process.wait_for(r"port (\\d+)", timeout=5).group(1)
        '1234'
    """

    def __init__(self, command: Sequence[str], *, log: Path, env: Mapping[str, str], name: str) -> None:
        self.name = name
        self.log = log
        self._lines: deque[str] = deque(maxlen=2000)
        self._changed = threading.Condition()
        self._closed = False
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name=f"{name}-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id; also that of the program itself, which takes the starter's place."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def wait_for(self, pattern: str, timeout: float) -> re.Match[str]:
        """Wait until a line of the output matches; a ProcessError tells what it said instead."""
        compiled = re.compile(pattern)
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for line in self._lines:
                    if match := compiled.search(line):
                        return match
                if self._closed:
                    raise ProcessError(f"{self.name} ended before it was ready. {self.tail()}")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise ProcessError(f"{self.name} was not ready in {timeout:.0f} s. {self.tail()}")

    def tail(self, lines: int = 15) -> str:
        """The last lines of the output, and where the rest is."""
        last = "\n".join(list(self._lines)[-lines:])
        return f"Its log is {self.log} and ends:\n{last}"

    def stop(self, grace: float = 10.0) -> None:
        """End the process: a polite signal, then after `grace` seconds a hard one."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(grace)
            except subprocess.TimeoutExpired:
                logger.warning("%s did not end within %.0f s and is killed", self.name, grace)
                self._process.kill()
                self._process.wait(grace)
        self._reader.join(grace)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def __enter__(self) -> LoggedProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self.log.open("w", encoding="utf-8") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                with self._changed:
                    self._lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
