"""A lock between the processes of one host, with a deadline."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST_WAIT = 0.01
_LONGEST_WAIT = 0.5


@contextmanager
def file_lock(path: Path, timeout: float) -> Iterator[None]:
    """Hold an exclusive lock on a file, made if missing; the kernel frees it if the process dies.

    Args:
        path: The lock file; it stays.
        timeout: Seconds to wait for another holder; 0 tries once.

    Raises:
        TimeoutError: Someone else holds it for longer; names the file and the holder's process id.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _acquire(descriptor, path, timeout)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, timeout: float) -> None:
    # POSIX has no lock with a deadline; `Event.wait` only spaces the tries out.
    pause = threading.Event()
    deadline = time.monotonic() + timeout
    wait = _FIRST_WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0:
                holder = os.pread(descriptor, 20, 0).decode("ascii", "replace") or "unknown"
                raise TimeoutError(
                    f"Another process holds the lock for longer than {timeout:g} s: process {holder}. "
                    f"Received: path={str(path)!r}"
                ) from None
        pause.wait(min(wait, left))
        wait = min(2 * wait, _LONGEST_WAIT)
