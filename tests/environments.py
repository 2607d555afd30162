"""Virtual environments that tests make beside the project's own, from their own lock files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"


def uv(*arguments: str, timeout: float = 900) -> None:
    """Run uv; the output of a failure is in the AssertionError."""
    if not UV.exists():
        pytest.skip("uv is not in this environment: run `make setup`")
    done = subprocess.run([str(UV), *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"uv {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"


def environment(place: Path, lock: Path) -> Path:
    """An environment with the packages of a lock file; made anew when the lock has changed. Returns its Python."""
    python = place / "bin" / "python"
    stamp = place / "lock.sha256"
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        uv("venv", "--quiet", "--clear", "--python", sys.executable, str(place))
        uv("pip", "install", "--quiet", "--python", str(python), "--no-deps", "-r", str(lock))
        stamp.write_text(digest)
    return python


def build_wheel(out: Path) -> Path:
    """Build this checkout's wheel into `out`, from a copy of the tracked files: nothing local leaks in."""
    source = out / "source"
    source.mkdir(parents=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "typings/")):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    (wheel,) = out.glob("*.whl")
    return wheel


def clean_env(**extra: str) -> dict[str, str]:
    """This process's environment without what points into this checkout or at its Python."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME")
    return {**{key: value for key, value in os.environ.items() if key not in dropped}, **extra}
