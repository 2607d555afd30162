"""How the benchmark talks to a peer's process: JSON lines on its standard input and output.

Imports nothing but numpy, since peers run in environments of their own.

    start      python -m benchmarks.peers.<name> '{"data": "batches.npz", "intra": 2, …}'
    answer     {"ready": true, "version": "…"}
    request    {"steps": 40}
    answer     {"seconds": 5.2, "steps": 40, "loss": 0.51}
    end        standard input closes

`seconds` is the wall time of these steps, and `loss` their mean or that of the last one. There may be more `steps` than
were asked for, where a peer does whole epochs.
"""

from __future__ import annotations

import json
import math
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


def serve(version: str, run: Callable[[int], float], *, granularity: int = 1) -> None:
    """Answer requests until standard input closes; `run(steps)` trains and returns a loss.

    It is asked for multiples of `granularity`.
    """
    answer({"ready": True, "version": version})
    for line in sys.stdin:
        steps = math.ceil(json.loads(line)["steps"] / granularity) * granularity
        start = time.perf_counter()
        loss = run(steps)
        answer({"seconds": time.perf_counter() - start, "steps": steps, "loss": loss})


def answer(message: dict[str, Any]) -> None:
    """Write one answer."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
