"""Command lines of processes, any of which may end while they are looked at."""

from __future__ import annotations

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """The words of it; none of a process that has ended, waited for or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
