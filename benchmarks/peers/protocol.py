"""How the benchmark talks to a peer's process: JSON lines on its standard input and output.

Imports nothing but numpy, since peers run in environments of their own.

    start      python -m benchmarks.peers.<name> '{"data": "batches.npz", "intra": 2, …}'
    answer     {"ready": true, "version": "…"}
    request    {"steps": 40}
    answer     {"seconds": 5.2, "loss": 0.51}       # wall time of these steps; mean loss of the last one or all
    end        standard input closes
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

BOTTOM = (512, 256, 64)
TOP = (512, 256)
LEARNING_RATE = 0.01


def settings() -> dict[str, Any]:
    """The settings that the benchmark gave on the command line."""
    parsed: dict[str, Any] = json.loads(sys.argv[1])
    return parsed


class Data:
    """The batches of a benchmark: `dense` float32 [batches, batch, 13], `ids` int64 [batches, batch, 26], `label`."""

    def __init__(self, path: str) -> None:
        with np.load(path) as arrays:
            self.dense: np.ndarray[Any, Any] = arrays["dense"]
            self.ids: np.ndarray[Any, Any] = arrays["ids"]
            self.label: np.ndarray[Any, Any] = arrays["label"]
            self.sizes: list[int] = arrays["sizes"].tolist()
            self.dim = int(arrays["dim"])

    def indices(self) -> Iterator[int]:
        """Numbers of the batches, over and over."""
        while True:
            yield from range(len(self.label))


def serve(version: str, run: Callable[[int], float]) -> None:
    """Answer requests until standard input closes; `run(steps)` trains and returns a loss."""
    _answer({"ready": True, "version": version})
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        start = time.perf_counter()
        loss = run(steps)
        _answer({"seconds": time.perf_counter() - start, "loss": loss})


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
