"""Where test servers' programs are kept, and how one of several test processes fetches them for all."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deeprec_spark.checkpoint.locking import file_lock

BUILD_SECONDS = 600.0


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache; `make` fills it if it is not there, in one process at a time."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "deeprec-spark" / "servers"
    root.mkdir(parents=True, exist_ok=True)
    folder = root / name
    with file_lock(root / f"{name}.lock", BUILD_SECONDS):
        if not folder.is_dir():
            making = root / f"{name}.making"
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            make(making)
            making.rename(folder)
    return folder


def needs(program: str, why: str) -> str:
    """The path of a program; the test is skipped where it is not installed, and says so."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed: {why}")
    return found


def run(command: list[str], **environment: str) -> None:
    """Run a command; the output of a failure is in the AssertionError."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
