"""One tiny run of the server benchmark."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.timeout(240)
def test_a_tiny_run_ends_with_its_result() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.server", "--clients", "1,2"),
            *("--seconds", "0.1", "--rounds", "1", "--no-docs"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    results = json.loads(last.removeprefix("RESULT "))["results"]
    assert {(one["way"], one["load"], one["clients"]) for one in results} == {
        (way, load, clients)
        for way in ("flight", "tcp", "unix")
        for load in ("step", "small")
        for clients in (1, 2)
    }
    assert all(one["requests_per_s"] > 0 and one["rows_per_s"] > 0 for one in results)
