"""Fetch and build the programs of all test servers: `python -m tests.servers`, so that no test waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import gcs, hdfs, s3

logger = logging.getLogger(__name__)


def fetch(program: Callable[[], Path]) -> None:
    """Fetch one, and say where it is, or which tool it lacks; a build that fails is an AssertionError."""
    try:
        logger.info("%s", program())
    except pytest.skip.Exception as missing:
        logger.warning("%s", missing)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for program in (s3.program, gcs.program, hdfs.jars):
        fetch(program)
