"""Log lines of nodes, as they appear in the driver's logging."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from deeprec_spark.runtime.options import describe_rank

node_logger = logging.getLogger("deeprec_spark.node")

# What a node's own logging writes in front of each line, see `node_log_format`.
_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
# TensorFlow's native start-up notes, the same on every node: "I0000 00:00:1796012434.735870 24129 port.cc:153] …",
# and what it says of them. No environment variable silences those written before its logging is set up.
_NATIVE_NOTE = re.compile(r"^(I\d{4} [\d:.]+ +\d+ \S+\] |WARNING: All log messages before absl::)")
_PREFIX = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")

NODE_LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"


def log_node_lines(rank: int, num_ps: int, lines: Iterable[str]) -> None:
    """Log a node's output lines under `deeprec_spark.node`, with `rank` as an attribute of each record.

    A line that a node's logging wrote keeps its level; TensorFlow's native notes are DEBUG, anything else (prints,
    native libraries) is INFO.
    """
    name = describe_rank(rank, num_ps).split(" (", 1)[0]
    for line in lines:
        if _NATIVE_NOTE.match(line):
            node_logger.debug("[%s] %s", name, line, extra={"rank": rank})
            continue
        match = _PREFIX.match(line)
        level = _LEVELS[match.group(1)] if match else logging.INFO
        text = line[match.end() :] if match else line
        node_logger.log(level, "[%s] %s", name, text, extra={"rank": rank})
