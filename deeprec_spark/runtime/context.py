"""What a worker's main function is given."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deeprec_spark.embedding.store import EmbeddingStore
from deeprec_spark.runtime.gate import StepGate
from deeprec_spark.runtime.options import Mode
from deeprec_spark.runtime.pace import Pace
from deeprec_spark.runtime.worker_client import WorkerClient
from deeprec_spark.tracing.spans import SpanRing


@dataclass(frozen=True)
class WorkerContext:
    """One worker: who it is, its line to the driver, its parameters, and the payload of `LaunchOptions`.

    `rank` counts servers first; `worker_index` is 0 to num_workers - 1. `payload` came through Spark's closure and
    may be unpickled. The runtime closes `store` and `client`.

    Training steps pass through `gate`, so that a save can stop them between two, and keep to `pace`. `on_cut` sets the
    function that then tells this worker's own state for a phase, as JSON-able data and bytes. `spans` keeps what a
    trace shows of it.
    """

    rank: int
    worker_index: int
    num_workers: int
    mode: Mode
    client: WorkerClient
    store: EmbeddingStore
    payload: bytes
    gate: StepGate
    pace: Pace
    on_cut: Callable[[Callable[[int], tuple[Mapping[str, Any], bytes]]], None]
    spans: SpanRing = field(default_factory=SpanRing)


WorkerEntry = Callable[[WorkerContext], None]


def load_entry(entry: str) -> WorkerEntry:
    """The function of `package.module:function`.

    Raises:
        ValueError: the text has another form, or the module has no such function.
        ImportError: the module cannot be imported here.
    """
    module_name, separator, name = entry.partition(":")
    if not separator or not module_name or not name:
        raise ValueError(f"worker_entry is 'package.module:function'. Received: {entry!r}")
    found = getattr(importlib.import_module(module_name), name, None)
    if not callable(found):
        raise ValueError(f"Module {module_name} has no function {name!r}. Received: {entry!r}")
    worker_entry: WorkerEntry = found
    return worker_entry
