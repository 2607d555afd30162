"""CallbackStates: what is remembered, and that what is remembered does not change."""

from __future__ import annotations

from typing import Any

import numpy as np

from deeprec_spark.training.callback_state import CallbackStates


class Counter:
    def __init__(self) -> None:
        self.wait = 0
        self.best: Any = None
        self.seen: list[float] = []
        self.limits = {"low": np.zeros(2), "high": [1, (2, "x")]}
        self.file = open("/dev/null")  # noqa: SIM115  # an attribute that cannot be remembered
        self.model = object()
        self.params = {"epochs": 3}


def test_going_back_restores_plain_attributes_and_leaves_the_others() -> None:
    counter = Counter()
    states = CallbackStates([counter])
    states.remember(0)
    counter.wait, counter.best = 2, np.float32(0.5)
    counter.seen.append(1.0)
    counter.limits["low"][0] = 9
    counter.model = model = object()
    counter.params["epochs"] = 4
    states.remember(1)
    counter.seen.append(2.0)
    states.go_back(1)
    assert (counter.wait, counter.best, counter.seen) == (2, np.float32(0.5), [1.0])
    counter.seen.append(3.0)
    states.go_back(1)
    assert counter.seen == [1.0]
    states.go_back(0)
    assert (counter.wait, counter.best, counter.seen) == (0, None, [])
    assert counter.limits["low"].tolist() == [0, 0]
    assert counter.model is model
    assert counter.params == {"epochs": 4}
    assert not counter.file.closed
    counter.file.close()
    counter.wait = 7
    states.go_back(1)  # forgotten when training went back to 0
    assert counter.wait == 7
