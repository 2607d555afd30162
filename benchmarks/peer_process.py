"""The processes and environments of the peers that a benchmark compares, and how the benchmark speaks with them.

A peer answers JSON lines on its standard input and output; see `benchmarks.peers.protocol`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
ANSWER_SECONDS = 900
END_SECONDS = 60


class PeerProcess:
    """A peer's running process; ended when left as a context manager.

    With `pause` it is stopped while it has no request, since idle threads of some libraries spin.

    Raises:
        RuntimeError: the peer died, or was silent for ANSWER_SECONDS; with the end of its log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: IO[str],
        *,
        environment: Mapping[str, str] | None = None,
        pause: bool = False,
    ) -> None:
        self.name = name
        self._log = log
        self._pause = pause
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            self.ready: dict[str, Any] = self._answer()
        except BaseException:
            self._end()
            raise
        if pause:
            self._process.send_signal(signal.SIGSTOP)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        assert self._process.stdin is not None
        if self._pause:
            self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(dict(request)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()
        answer = self._answer()
        if self._pause:
            self._process.send_signal(signal.SIGSTOP)
        return answer

    def kill(self) -> None:
        """End the process at once; `close` afterwards."""
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        if self._pause:
            self._process.send_signal(signal.SIGCONT)
        self._end()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            # Something has failed, or the benchmark was told to end: nobody needs a farewell.
            self.kill()
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = threading.Timer(ANSWER_SECONDS, self._process.kill)
        deadline.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    parsed: dict[str, Any] = json.loads(line)
                    return parsed
        finally:
            deadline.cancel()
        self._died()
        raise AssertionError  # _died has raised

    def _died(self) -> None:
        code = self._process.wait(END_SECONDS)
        self._log.flush()
        raise RuntimeError(
            f"The peer {self.name} died. Received: exit code {code} (-9: killed, by its deadline or for want of "
            f"memory), log {self._log.name}:\n{Path(self._log.name).read_text()[-2000:]}"
        )

    def _end(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # where it is gone already
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


def environment_python(name: str, packages: Sequence[str], probe: str, *, pinless: Sequence[str] = ()) -> str:
    """The interpreter of a peer's own environment, made at first use below the user's cache directory.

    Arguments:
        name: of the environment.
        packages: with all that they depend on.
        probe: a statement that fails there if the environment has to be made.
        pinless: packages whose own pins cannot be met; installed without what they depend on.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = cache / "deeprec-spark" / "benchmarks" / name
    python = home / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0:
        return str(python)
    say(f"making the environment of {name}: {', '.join(packages)}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, timeout=1800)
    if pinless:
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *pinless]
        subprocess.run(command, check=True, timeout=1800)
    return str(python)


def end_on_sigterm() -> None:
    """Let SIGTERM unwind the main thread, so that contexts end their processes; stopped ones would stay for ever."""

    def unwind(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, unwind)


def say(message: str) -> None:
    """One line to the user."""
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


def bar_chart(rates: Mapping[str, float], title: str, *, unit: str, ours: Sequence[str] = ()) -> str:
    """An SVG of horizontal bars by name; the bars of `ours` stand out."""
    top, height, left, width = 46, 34, 160, 420
    longest = max(rates.values())
    bars = []
    for position, (name, rate) in enumerate(rates.items()):
        y = top + position * height
        bar = width * rate / longest
        color = "#1f77b4" if name in ours else "#b0b0b0"
        bars.append(
            f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{name}</text>'
            f'<rect x="{left}" y="{y}" width="{bar:.0f}" height="24" fill="{color}"/>'
            f'<text x="{left + bar + 6:.0f}" y="{y + 17}">{rate:,.0f}</text>'
        )
    total = top + len(rates) * height + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{total}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="24" font-weight="bold">{title}: {unit}</text>{"".join(bars)}</svg>\n'
    )


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **extra}
    # These slow a current BLAS; they are for old ones.
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        environment.pop(name, None)
    return environment
