"""AdaptiveEmbedding: cold ids share a fixed table, hot ids get rows of their own that go on from the shared ones."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from deeprec_spark.embedding._serial import integer, require
from deeprec_spark.embedding.hashing import as_keys, unique
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.options import CounterFilter, EmbeddingVariableOption
from deeprec_spark.embedding.variable import EmbeddingVariable

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


class AdaptiveEmbedding:
    """A table in which an id has a row of its own from its `promote_freq`-th occurrence on.

    Before, it shares one of `hash_bucket_size` rows with other cold ids. Its own row starts with the shared row's value
    and optimizer slots, so nothing learned is lost. Safe to use from several threads.

        id ──▶ counted ──▶ < promote_freq: shared[hash(id) mod hash_bucket_size]
                           ≥ promote_freq: own[id], at first a copy of the shared row

    Args:
        name: for errors; the two tables are `name/shared` and `name/own`.
        embedding_dim: elements of a row.
        hash_bucket_size: rows that cold ids share.
        promote_freq: the occurrence, repeats in a batch included, that gets the row; at least 1.
        option: options of both tables, without a filter (`promote_freq` is the filter).
        optimizer: updates both tables; None is `SGD()`.
        seed: start values are a pure function of (seed, shared row).

    Example:
        >>> table = AdaptiveEmbedding("item", 4, hash_bucket_size=10, promote_freq=2)
        >>> first = table.lookup([7], train=True)
        >>> bool((table.lookup([7], train=True) == first).all()), len(table.own)
        (True, 1)
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        *,
        hash_bucket_size: int,
        promote_freq: int,
        option: EmbeddingVariableOption | None = None,
        optimizer: Optimizer | None = None,
        seed: int = 0,
    ) -> None:
        hash_bucket_size = integer("hash_bucket_size", hash_bucket_size, 1)
        promote_freq = integer("promote_freq", promote_freq, 1, 2**30)
        require(
            option is None or isinstance(option, EmbeddingVariableOption),
            f"option of table {name!r} must be an EmbeddingVariableOption.",
            option=option,
        )
        option = option or EmbeddingVariableOption()
        if option.filter_option is not None:
            raise ValueError(
                f"promote_freq is the filter of {name!r}. Received: filter_option={option.filter_option}"
            )
        self.hash_bucket_size = hash_bucket_size
        own = replace(option, filter_option=CounterFilter(promote_freq))
        # Shared rows are a fixed table: they are never evicted.
        shared = replace(option, evict_option=None, evict_steps=None)
        self.own = EmbeddingVariable(f"{name}/own", embedding_dim, option=own, optimizer=optimizer, seed=seed)
        self.shared = EmbeddingVariable(
            f"{name}/shared", embedding_dim, option=shared, optimizer=optimizer, seed=seed
        )
        # Ids with an own row that has not taken over the shared row's content yet, because something failed in between:
        # they are cold until their next training lookup.
        self._unpromoted = np.empty(0, np.int64)
        self._lock = threading.Lock()

    def shared_keys(self, keys: npt.ArrayLike) -> Int64Array:
        """The shared row of each id, int64 `[n]` within `[0, hash_bucket_size)`."""
        # The lower half of SplitMix64's finalizer; placement uses the upper bits.
        mixed = as_keys(keys).view(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(self.hash_bucket_size)).astype(np.int64)

    def lookup(self, keys: npt.ArrayLike, *, train: bool = False) -> Float32Array:
        """The rows of ids, own or shared: float32 `[n, embedding_dim]`. `train` counts and promotes."""
        distinct, inverse, counts = unique(keys)
        with self._lock:
            before = self.own.contains(distinct)
            try:
                rows = self.own.lookup(distinct, counts, train=train)
            finally:  # an error may come after some rows were made
                if train:
                    made = self.own.contains(distinct)
                    self._unpromoted = np.union1d(self._unpromoted, distinct[made & ~before])
            if train and len(self._unpromoted):
                fresh = made & np.isin(distinct, self._unpromoted)
                if fresh.any():
                    rows[fresh] = self._promote(distinct[fresh])
            cold = ~self._hot(distinct)
            if cold.any():
                rows[cold] = self.shared.lookup(self.shared_keys(distinct[cold]), counts[cold], train=train)
        return rows[inverse]

    def apply_gradients(
        self,
        keys: npt.ArrayLike,
        gradients: npt.ArrayLike,
        *,
        step: int,
        learning_rate: float | None = None,
        now: float | None = None,
    ) -> None:
        """Update own rows, and shared rows by the summed gradients of the cold ids that share them.

        Args:
            keys: int64 `[n]`.
            gradients: float32 `[n, embedding_dim]`.
            step: number of this update, from 1.
            learning_rate: for this update; None takes the optimizer's.
            now: wall-clock seconds for TimeEvict; None takes the clock.
        """
        wanted = as_keys(keys)
        array = self.own.check_rows(gradients, len(wanted), "gradients")
        with self._lock:
            own = self._hot(wanted)
            self.own.apply_gradients(wanted[own], array[own], step=step, learning_rate=learning_rate, now=now)
            shared = self.shared_keys(wanted[~own])
            self.shared.apply_gradients(shared, array[~own], step=step, learning_rate=learning_rate, now=now)

    def evict(self, step: int, now: float | None = None) -> Int64Array:
        """Run the eviction policies on the own rows; an evicted id is cold again. Returns the ids."""
        with self._lock:
            return self.own.evict(step, now)

    def _hot(self, keys: Int64Array) -> npt.NDArray[np.bool_]:
        own = self.own.contains(keys)
        return own & ~np.isin(keys, self._unpromoted) if len(self._unpromoted) else own

    def _promote(self, keys: Int64Array) -> Float32Array:
        """Give own rows the content of the shared ones; returns their values."""
        source = self.shared_keys(keys)
        self.shared.lookup(source, np.zeros(len(source), np.int64), train=True)
        shared = next(self.shared.export(len(source), source))
        frequency = next(self.own.export(len(keys), keys)).frequency
        # A rank is of the table whose refreshes made it.
        own = replace(shared, key=keys, frequency=frequency, rank=None, rank_refresh=None)
        self.own.import_rows(own)
        self._unpromoted = np.setdiff1d(self._unpromoted, keys)
        return shared.value
