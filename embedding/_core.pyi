"""The C++ engine; what each function means is said where Python wraps it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Int64 = npt.NDArray[np.int64]
_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]

NUM_BUCKETS: int

def num_threads() -> int: ...
def set_num_threads(threads: int) -> None: ...
def cpu() -> str: ...
def bucket(keys: _Int64) -> _Int32: ...
def fingerprint64(data: npt.NDArray[np.uint8], offsets: _Int64) -> _Int64: ...
def unique_many(batches: Sequence[_Int64]) -> tuple[tuple[_Int64, _Int32, _Int64], ...]: ...
def pull(
    tables: Sequence[Table], keys: Sequence[_Int64], counts: Sequence[_Int64 | None], train: bool
) -> list[_Float32]: ...
def push(
    tables: Sequence[Table],
    keys: Sequence[_Int64],
    gradients: Sequence[_Float32],
    step: int,
    learning_rate: float,
) -> None: ...

class Optimizer:
    def __init__(self, kind: str, parameters: Mapping[str, float]) -> None: ...
    @property
    def slots(self) -> dict[str, float]: ...
    def apply_dense(
        self,
        values: _Float32,
        slots: Sequence[_Float32],
        gradient: _Float32,
        step: int,
        updates: int,
        learning_rate: float,
    ) -> None: ...

class Table:
    updates: int
    def __init__(
        self,
        dim: int,
        optimizer: Optimizer,
        initializer: str,
        a: float,
        b: float,
        seed: int,
        filter_freq: int,
        no_permission: float,
        steps_to_live: int,
    ) -> None: ...
    def upsert(self, keys: _Int64, values: _Float32) -> None: ...
    def erase(self, keys: _Int64) -> int: ...
    def evict(self, step: int) -> _Int64: ...
    def clear(self) -> None: ...
    def keys(self) -> tuple[_Int64, _Int64, _Int64]: ...
    def export_rows(self, keys: _Int64) -> dict[str, Any]: ...
    def import_rows(
        self,
        keys: _Int64,
        frequency: _Int64,
        version: _Int64,
        value: _Float32,
        slots: Sequence[_Float32],
    ) -> None: ...
    def import_filtered(self, keys: _Int64, counts: _Int64) -> None: ...
    def stats(self) -> dict[str, int]: ...
