"""No orphans: a node ends at once when its supervisor is gone."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import IO

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LAST_WORDS_SECONDS = 1.0


def die_with_parent(stream: IO[bytes], last_words: Callable[[], None]) -> None:
    """Kill this process and its group as soon as `stream` (a pipe from the parent) ends.

    `last_words` is called before, for a second at most. On Linux the kernel also sends SIGCONT when the parent ends,
    so that a stopped process wakes up to see it. (SIGKILL from the kernel would be surer still, but would leave this
    process's own children behind.) Call it when everything was read from `stream`.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    threading.Thread(target=_watch, args=(stream, last_words), name="lifeline", daemon=True).start()


def _watch(stream: IO[bytes], last_words: Callable[[], None]) -> None:
    while stream.read(1):
        pass
    speaker = threading.Thread(target=last_words, daemon=True)
    speaker.start()
    speaker.join(_LAST_WORDS_SECONDS)
    kill_own_group()


def kill_own_group() -> None:
    """End this process at once, with the children it started if it leads its group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
