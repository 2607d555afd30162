"""No orphans: a node ends at once when its supervisor is gone."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from typing import IO

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def die_with_parent(stream: IO[bytes]) -> None:
    """Kill this process and its group as soon as `stream` (a pipe from the parent) ends.

    On Linux the kernel also sends SIGCONT when the parent ends, so that a stopped process wakes up to see it. (SIGKILL
    from the kernel would be surer still, but would leave this process's own children behind.) Call it when everything
    was read from `stream`.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    threading.Thread(target=_watch, args=(stream,), name="lifeline", daemon=True).start()


def _watch(stream: IO[bytes]) -> None:
    while stream.read(1):
        pass
    kill_own_group()


def kill_own_group() -> None:
    """End this process at once, with the children it started if it leads its group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
