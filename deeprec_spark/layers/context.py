"""Where a SparseEmbedding's rows come from: the mode that is active while a model is called.

A layer flattens its ids, asks the active `RowSource` for one row each, and combines them. Outside any
context the layer reads its own store (`layers.direct`). Inside one:

    RecordContext   notes the ids that reach each layer, returns zeros        (first trace of a step)
    GatherContext   hands out rows that were pulled for exactly those ids, or their sums by bag   (second trace)
    FrozenContext   looks ids up in tables made of stock TensorFlow ops       (export)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

if TYPE_CHECKING:
    from deeprec_spark.layers.sparse_embedding import SparseEmbedding

Tensor = Any  # tf.Tensor; TensorFlow ships no types


@dataclass(frozen=True)
class Origin:
    """What a layer was called with, before flattening: the raw ids, the id that stands for nothing, and how the layer
    combines rows, if that takes no more than the rows (no weights).
    """

    ids: Tensor
    padding_value: int | None
    combiner: str | None = None

    @property
    def bag_length(self) -> int | None:
        """Ids of a bag, padded ones included; None where the trace does not tell it, or there are no bags."""
        if self.combiner is None or isinstance(self.ids, tf.RaggedTensor):
            return None
        inner = list(self.ids.shape[1:])
        return None if None in inner or 0 in inner else [1, *inner][-1]


class RowSource(Protocol):
    """Resolves the flat ids of one layer call."""

    def lookup(self, layer: SparseEmbedding, ids: Tensor, origin: Origin) -> Tensor:
        """Rows float32 `[n, embedding_dim]` of int64 `[n]` ids, repeats allowed, in order."""

    def combined(self, layer: SparseEmbedding) -> Tensor | None:
        """The combined rows float32 `[bags, embedding_dim]` of the layer's next call; None: `lookup` tells its rows."""


class FrozenTable(Protocol):
    """A table of an exported model: stock TensorFlow ops and variables only."""

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows float32 `[n, embedding_dim]` of int64 `[n]` ids; unknown ids read the table's default."""


_ACTIVE: ContextVar[RowSource | None] = ContextVar("deeprec_spark_row_source", default=None)


def active() -> RowSource | None:
    """The source that calls made now will use; None means each layer's own store."""
    return _ACTIVE.get()


@contextmanager
def use(source: RowSource) -> Iterator[None]:
    """Make `source` serve every SparseEmbedding called inside the block.

    Example:
        >>> with use(FrozenContext({"user": table})):
        ...     outputs = model(inputs)
    """
    token = _ACTIVE.set(source)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


@dataclass(frozen=True)
class RecordedCall:
    """One call of a layer, seen while recording."""

    layer: SparseEmbedding
    ids: Tensor
    origin: Origin


class RecordContext:
    """Notes the ids of every call, in order, and answers zeros, so that nothing is read."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []

    def lookup(self, layer: SparseEmbedding, ids: Tensor, origin: Origin) -> Tensor:
        """Record the call; zeros `[n, embedding_dim]`."""
        self.calls.append(RecordedCall(layer, ids, origin))
        return tf.zeros([tf.size(ids), layer.embedding_dim], tf.float32)

    def combined(self, layer: SparseEmbedding) -> Tensor | None:
        """None: ids are what is asked for."""
        return None


class GatherContext:
    """Hands each call, in the order that was recorded, the rows of its ids, or of its bags where they are combined.

    Args:
        tables: of each call.
        rows: `[ids, width]` or `[bags, width]` of each call.
        combined: which of these are of bags.
    """

    def __init__(self, tables: Sequence[str], rows: Sequence[Tensor], combined: Sequence[bool]) -> None:
        self._tables = tables
        self._rows = rows
        self._combined = combined
        self._next = 0

    def lookup(self, layer: SparseEmbedding, ids: Tensor, origin: Origin) -> Tensor:
        """The rows of the next recorded call; a RuntimeError if this is not that call."""
        return self._take(layer)

    def combined(self, layer: SparseEmbedding) -> Tensor | None:
        """The rows of the next recorded call, if they are combined; a RuntimeError if this is not that call."""
        position = self._next
        return self._take(layer) if position < len(self._tables) and self._combined[position] else None

    def _take(self, layer: SparseEmbedding) -> Tensor:
        position = self._next
        expected = self._tables[position] if position < len(self._tables) else None
        if expected != layer.table:
            raise RuntimeError(
                "The model calls its SparseEmbedding layers differently each time it is traced, so ids and "
                "rows cannot be matched. Make the calls independent of Python state that changes between "
                f"calls. Received: call {position} reads table {layer.table!r}, recorded was {expected!r}"
            )
        self._next += 1
        return tf.ensure_shape(self._rows[position], [None, layer.embedding_dim])

    def finish(self) -> None:
        """Check that every recorded call came again."""
        if self._next != len(self._tables):
            raise RuntimeError(
                "The model called fewer SparseEmbedding layers than when its ids were recorded. Make the calls "
                "independent of Python state that changes between calls. "
                f"Received: {self._next} calls, recorded {len(self._tables)}"
            )


class FrozenContext:
    """Serves every call from exported tables."""

    def __init__(self, tables: Mapping[str, FrozenTable]) -> None:
        self._tables = tables

    def lookup(self, layer: SparseEmbedding, ids: Tensor, origin: Origin) -> Tensor:
        """Rows from the frozen table that the layer names."""
        if layer.table not in self._tables:
            raise KeyError(
                f"No exported table for SparseEmbedding {layer.name!r}. "
                f"Received: table={layer.table!r}, exported tables {sorted(self._tables)}"
            )
        return tf.ensure_shape(self._tables[layer.table].lookup(ids), [None, layer.embedding_dim])

    def combined(self, layer: SparseEmbedding) -> Tensor | None:
        """None: stock operations combine."""
        return None
