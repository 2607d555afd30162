"""A contestant that trains nothing: `{"seconds": s}` is what a step takes, `{"dies_after": n}` when it gives up."""

from __future__ import annotations

import sys
import time

from benchmarks.peers.protocol import serve, settings

options = settings()
answers = 0


def run(steps: int) -> float:
    """Sleep."""
    global answers
    answers += 1
    if answers > options.get("dies_after", answers):
        sys.exit("had enough")
    time.sleep(steps * options["seconds"])
    return 0.5


serve("none", run)
