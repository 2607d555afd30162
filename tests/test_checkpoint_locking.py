"""The file lock: exclusive between processes, with a deadline, freed by death."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deeprec_spark.checkpoint.locking import file_lock

HOLD = """
import sys
from pathlib import Path
from deeprec_spark.checkpoint.locking import file_lock
with file_lock(Path(sys.argv[1]), 10):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_waited_for_until_its_holder_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(TimeoutError, match=rf"0.05 s: process {holder.pid}.*{path}"),
            file_lock(path, 0.05),
        ):
            pass
        holder.kill()
        with file_lock(path, 10):
            assert path.read_text() != str(holder.pid)
        with file_lock(path, 0):
            pass
