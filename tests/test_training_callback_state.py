"""CallbackStates: what is remembered, and that what is remembered does not change."""

from __future__ import annotations

from collections import Counter as Counts
from collections import OrderedDict, defaultdict
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


class Collecting:
    """A callback that keeps what it sees in collections of other types."""

    def __init__(self) -> None:
        self.by_metric: defaultdict[str, list[float]] = defaultdict(list)
        self.counts = Counts("aab")
        self.order = OrderedDict(b=1, a=[2])
        self.names = {"x"}
        self.pair = ([1], "x")


def test_collections_keep_their_type_and_what_they_do() -> None:
    callback = Collecting()
    states = CallbackStates([callback])
    callback.by_metric["loss"].append(0.5)
    states.remember(0)
    callback.by_metric["loss"].append(0.25)
    callback.by_metric["auc"].append(0.75)
    callback.counts["a"] += 5
    callback.order["a"] = 7
    callback.names.add("y")
    callback.pair[0].append(2)
    states.go_back(0)
    assert callback.by_metric == {"loss": [0.5]}
    callback.by_metric["new"].append(1.0)
    assert callback.counts == Counts({"a": 2, "b": 1})
    assert callback.counts["none"] == 0
    assert type(callback.order) is OrderedDict
    assert list(callback.order.items()) == [("b", 1), ("a", [2])]
    assert callback.names == {"x"}
    assert callback.pair == ([1], "x")
