"""EmbeddingVariable: one dynamic embedding table."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import deeprec_spark.embedding._core as _core
from deeprec_spark.embedding._serial import integer, require
from deeprec_spark.embedding.core_config import make_core
from deeprec_spark.embedding.hashing import as_keys, unique
from deeprec_spark.embedding.optimizers import SGD, Optimizer, step_rate
from deeprec_spark.embedding.options import EmbeddingVariableOption
from deeprec_spark.embedding.snapshot import RowBlock as RowBlock
from deeprec_spark.embedding.snapshot import TableSnapshot

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

MAX_EMBEDDING_DIM = 1 << 16
"""Far above any use; a request of a few wider rows could take the memory of a whole server."""

NEVER_UPDATED = -1
"""Version of a row that no gradient has reached."""


def seconds(now: float | None) -> int:
    """Whole seconds since the epoch, of the clock where none are given."""
    if now is None:
        return int(time.time())
    if not isinstance(now, (int, float, np.integer, np.floating)) or not math.isfinite(now):
        raise ValueError(f"now must be seconds since the epoch. Received: now={now!r}")
    return int(now)


class EmbeddingVariable:
    """A table of embedding rows by 64-bit key, in C++; safe to use from several threads at once.

    Args:
        name: for errors and files.
        embedding_dim: elements of a row, 1 to `MAX_EMBEDDING_DIM`.
        option: admission, eviction, storage, start values.
        optimizer: updates the rows; None is `SGD()`.
        seed: start values are a pure function of (seed, key).

    Example:
        >>> table = EmbeddingVariable("user", 4, optimizer=SGD(learning_rate=1.0))
        >>> before = table.lookup([3, 3, -1], train=True)
        >>> table.apply_gradients([3, 3], np.ones((2, 4), np.float32), step=1)
        >>> bool(np.allclose(table.lookup([3]), before[:1] - 2))
        True
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        *,
        option: EmbeddingVariableOption | None = None,
        optimizer: Optimizer | None = None,
        seed: int = 0,
    ) -> None:
        require(isinstance(name, str), "The name of a table must be a string.", name=name)
        require(
            option is None or isinstance(option, EmbeddingVariableOption),
            f"option of table {name!r} must be an EmbeddingVariableOption, which holds filters, policies and storage.",
            option=option,
        )
        require(
            optimizer is None or isinstance(optimizer, Optimizer),
            f"optimizer of table {name!r} must be one of embedding.optimizers, such as Adagrad(0.05).",
            optimizer=optimizer,
        )
        if not isinstance(embedding_dim, (int, np.integer)) or not 1 <= embedding_dim <= MAX_EMBEDDING_DIM:
            raise ValueError(
                f"embedding_dim of table {name!r} must be an integer from 1 to {MAX_EMBEDDING_DIM}. "
                f"Received: embedding_dim={embedding_dim!r}"
            )
        self.name = name
        self.embedding_dim = int(embedding_dim)
        self.option = option or EmbeddingVariableOption()
        self.optimizer = optimizer or SGD()
        self.seed = integer("seed", seed)
        self._core = make_core(name, self.option, self.optimizer, self.embedding_dim, self.seed)
        self._last_step: int | None = None  # the highest that end_step has seen
        self._step_lock = threading.Lock()

    @property
    def core(self) -> _core.Table:
        """The engine's table, for calls that run several tables at once."""
        return self._core

    def __len__(self) -> int:
        return int(self._core.stats()["rows"])

    def lookup(
        self, keys: npt.ArrayLike, counts: npt.ArrayLike | None = None, *, train: bool = False
    ) -> Float32Array:
        """The rows of keys: a new, 64-byte aligned float32 `[n, embedding_dim]`.

        Args:
            keys: int64 `[n]`; repeats are allowed.
            counts: int64 `[n]`, how often each key occurs in the batch, at least 0; None is once for each element.
            train: count and admit the keys and make their rows. Otherwise nothing changes, and a key without a
                row reads its start value, or `default_value_no_permission` where there is a filter.
        """
        wanted = as_keys(keys)
        occurrences = None if counts is None else as_keys(counts, "counts")
        if occurrences is not None and len(occurrences) != len(wanted):
            raise ValueError(
                f"counts must have one number for each key. Received: {len(occurrences)} counts, {len(wanted)} keys"
            )
        rows: Float32Array = _core.pull([self._core], [wanted], [occurrences], train)[0]
        return rows

    def lookup_unique(
        self, features: Sequence[npt.ArrayLike], *, train: bool = False
    ) -> tuple[Int64Array, Float32Array, list[npt.NDArray[np.int32]]]:
        """One lookup for several features that share the table, each distinct key once.

        Args:
            features: keys of each feature, int64 `[n_i]`.
            train: as in `lookup`; each key counts as often as it occurs in all features.

        Returns:
            The distinct keys int64 `[u]`, their rows float32 `[u, embedding_dim]`, and for each feature the position of
            each key's row, int32 `[n_i]`: `rows[inverse[i]]` are the rows of feature i.
        """
        parts = [as_keys(keys) for keys in features]
        distinct, inverse, counts = unique(np.concatenate(parts) if parts else np.empty(0, np.int64))
        rows = self.lookup(distinct, counts, train=train)
        return (
            distinct,
            rows,
            np.split(inverse, np.cumsum([len(part) for part in parts])[:-1]) if parts else [],
        )

    def apply_gradients(
        self,
        keys: npt.ArrayLike,
        gradients: npt.ArrayLike,
        *,
        step: int,
        learning_rate: float | None = None,
        now: float | None = None,
    ) -> None:
        """Update the rows of keys; gradients of repeated keys are summed, and the row is updated once.

        Keys that the filter has not admitted take no update. Without a filter, a missing row is made first.

        Args:
            keys: int64 `[n]`.
            gradients: float32 `[n, embedding_dim]`.
            step: number of this update of the store, from 1; it becomes the rows' version, unless a later one is.
            learning_rate: for this update, finite and at least 0; None takes the optimizer's.
            now: wall-clock seconds for TimeEvict; None takes the clock.
        """
        if integer("step", step) < 1:
            raise ValueError(f"step counts updates from 1. Received: step={step}")
        wanted = as_keys(keys)
        rate = step_rate(learning_rate)
        rows = self.check_rows(gradients, len(wanted), "gradients")
        _core.push([self._core], [wanted], [rows], step, rate, seconds(now))
        self.end_step(step, now)

    def end_step(self, step: int, now: float | None = None) -> None:
        """What is due after a step: eviction every `evict_steps` steps, ranks of a dynamic dimension.

        It is due at the first step that this is called for from each multiple on: steps may be left out or come late.
        `apply_gradients` calls it; whoever pushes to several tables at once calls it for each, also for those that the
        step did not touch.
        """
        with self._step_lock:
            last = step - 1 if self._last_step is None else self._last_step
            self._last_step = max(last, step)
        dynamic, every = self.option.dynamic_dimension, self.option.evict_steps
        if (
            dynamic is not None
            and dynamic.by_rank
            and step // dynamic.refresh_steps > last // dynamic.refresh_steps
        ):
            self._core.refresh_ranks()
        if every is not None and step // every > last // every:
            self.evict(step, now)

    def upsert(self, keys: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Set the values of rows, float32 `[n, embedding_dim]`; makes missing rows, past the filter.

        Of repeated keys the last one counts. Slots of existing rows stay.
        """
        wanted = as_keys(keys)
        self._core.upsert(wanted, self.check_rows(values, len(wanted), "values"))

    def erase(self, keys: npt.ArrayLike) -> int:
        """Remove rows and admission counts; returns how many of the keys were there.

        The counts of a `CBFFilter` stay, since other keys share them: an erased key that had been admitted gets a row
        again at its next occurrence.
        """
        return int(self._core.erase(as_keys(keys)))

    def evict(self, step: int, now: float | None = None) -> Int64Array:
        """Run the eviction policies at this step and time; returns the keys removed, sorted by bucket."""
        return self._core.evict(integer("step", step), seconds(now))

    def contains(self, keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each key has a row: bool `[n]`."""
        present: npt.NDArray[np.bool_] = self._core.contains(as_keys(keys))
        return present

    def snapshot(self, changed_only: bool = False) -> TableSnapshot:
        """Fix the table's content as of now, to be read while training goes on; copies nothing.

        Args:
            changed_only: only what changed (looked up in training, updated, set, imported, grown, removed) since the
                last snapshot, or since `mark_saved`, or ever. A ValueError says that this cannot be had: the table was
                cleared, or more was removed than is left.

        A RuntimeError says that another snapshot of the table is not closed.
        """
        try:
            return TableSnapshot(self._core, changed_only)
        except (RuntimeError, ValueError) as error:
            raise type(error)(f"{error} Received: table={self.name!r}") from None

    def mark_saved(self) -> None:
        """What the table holds now counts as saved: only later changes are in the next snapshot of changes."""
        self._core.mark_saved()

    def refresh_ranks(self) -> None:
        """Take in the frequencies of a dynamic dimension under the rank rule, and find its thresholds anew."""
        self._core.refresh_ranks()

    def clear(self) -> None:
        """Remove everything."""
        self._core.clear()
        self._core.updates = 0
        self._core.calls = 0
        self._last_step = None

    def stats(self) -> dict[str, Any]:
        """Counters: rows, admitted, filtered, evicted, lookups, hits, dropped (updates without a row), bytes, rows
        promoted and demoted between tiers, `tiers` (kind, as the system granted it, rows and bytes of each), and
        `background_error`: why rows could not be moved ahead of need, empty if they could.

        `filtered` is how many keys are counted and have no row: exact for `CounterFilter`, estimated from the filter's
        fill for `CBFFilter`. A `ProbabilityFilter` knows no keys without a row: there it is how many occurrences were
        not admitted.
        """
        return self._core.stats()

    def keys(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Keys with a row, keys that are only counted, and their counts; sorted by bucket."""
        rows, filtered, counts = self._core.keys()
        return rows, filtered, counts

    def export(self, batch_rows: int = 65536, keys: Int64Array | None = None) -> Iterator[RowBlock]:
        """All rows in blocks of at most `batch_rows`, sorted by bucket.

        The keys are those of the moment of the call (or those given); rows that vanish meanwhile are left out.
        """
        batch_rows = integer("batch_rows", batch_rows, 1)
        return self._blocks(self.keys()[0] if keys is None else as_keys(keys), batch_rows)

    def _blocks(self, order: Int64Array, batch_rows: int) -> Iterator[RowBlock]:
        for start in range(0, len(order), batch_rows):
            part = order[start : start + batch_rows]
            columns = self._core.export_rows(part)
            present = slice(None) if columns["present"].all() else columns["present"]
            yield RowBlock(
                key=part[present],
                frequency=columns["frequency"][present],
                version=columns["version"][present],
                value=columns["value"][present],
                slots={name: slot[present] for name, slot in columns["slots"].items()},
                time=columns["time"][present] if "time" in columns else None,
                blocks=columns["blocks"][present] if "blocks" in columns else None,
                rank=columns["rank"][present] if "rank" in columns else None,
                rank_refresh=columns["rank_refresh"][present] if "rank" in columns else None,
            )

    def reserve(self, rows: int) -> None:
        """Make room in the index for this many rows in all, so that importing them need not grow it step by step."""
        self._core.reserve(integer("rows", rows, 0))

    def import_rows(self, block: RowBlock) -> None:
        """Make or overwrite rows; a ValueError names slots or shapes that do not fit."""
        names = self.optimizer.slot_names()
        if set(block.slots) != set(names):
            raise ValueError(
                f"Table {self.name!r} has slots {list(names)} of {type(self.optimizer).__name__}. "
                f"Received: {sorted(block.slots)}"
            )
        keys = as_keys(block.key)
        self._core.import_rows(
            keys,
            as_keys(block.frequency, "frequency"),
            as_keys(block.version, "version"),
            None if block.time is None else as_keys(block.time, "time"),
            None if block.blocks is None else as_keys(block.blocks, "blocks"),
            self.check_rows(block.value, len(keys), "value"),
            [
                self.check_rows(block.slots[name], len(keys), name, self._core.slot_width(index))
                for index, name in enumerate(names)
            ],
            None if block.rank is None else as_keys(block.rank, "rank"),
            None if block.rank_refresh is None else as_keys(block.rank_refresh, "rank_refresh"),
        )

    def import_filtered(self, keys: npt.ArrayLike, counts: npt.ArrayLike) -> None:
        """Set the admission counts of keys that have no row."""
        self._core.import_filtered(as_keys(keys), as_keys(counts, "counts"))

    def check_rows(self, values: npt.ArrayLike, n: int, name: str, width: int | None = None) -> Float32Array:
        """Values as a contiguous float32 `[n, embedding_dim]`; a ValueError names the shape otherwise."""
        array = np.asarray(values)
        width = self.embedding_dim if width is None else width
        if array.shape != (n, width):
            raise ValueError(
                f"{name} of table {self.name!r} must be [keys, width] = [{n}, {width}]. Received: shape={array.shape}"
            )
        return np.ascontiguousarray(array, dtype=np.float32)


def lookup_tables(
    tables: Sequence[EmbeddingVariable],
    keys: Sequence[npt.ArrayLike],
    counts: Sequence[npt.ArrayLike | None],
    *,
    train: bool,
) -> list[Float32Array]:
    """`lookup` of several tables in one call."""
    wanted = [as_keys(part) for part in keys]
    occurrences = [None if part is None else as_keys(part, "counts") for part in counts]
    return list(_core.pull([table.core for table in tables], wanted, occurrences, train))
