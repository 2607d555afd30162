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
DEEP = (512, 256, 64)
BAGS = (64, 32)
LEARNING_RATE = 0.01


def settings() -> dict[str, Any]:
    """The settings that the benchmark gave on the command line."""
    parsed: dict[str, Any] = json.loads(sys.argv[1])
    return parsed


class Data:
    """The batches of a benchmark, as `benchmarks.workloads` writes them.

    `dense` float32 [batches, batch, 13], `ids` int64 [batches, batch, columns], `bags` int64 [batches, batch, columns,
    ids], `label` float32 [batches, batch]; `sizes` holds the number of ids of each column, `ids` before `bags`.
    """

    def __init__(self, path: str) -> None:
        with np.load(path) as arrays:
            self.dense: np.ndarray[Any, Any] = arrays["dense"]
            self.ids: np.ndarray[Any, Any] = arrays["ids"]
            self.bags: np.ndarray[Any, Any] = arrays["bags"]
            self.label: np.ndarray[Any, Any] = arrays["label"]
            self.sizes: list[int] = arrays["sizes"].tolist()
            self.dim = int(arrays["dim"])
            self.model = str(arrays["model"])
        self.singles, self.num_bags = self.ids.shape[-1], self.bags.shape[2]

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
