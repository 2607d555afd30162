"""Tables that the engine benchmark compares, each in a process of its own: JSON lines on standard input and output.

Imports nothing of this project but the engine (for its own entry), since peers run in environments of their own.

    start      python -m benchmarks.peers.tables '{"peer": "tfra", "keys": 4000000, "dim": 16, "threads": 2, …}'
    answer     {"ready": true, "version": "…", "row_bytes": 190.2}
    request    {"op": "lookup", "ids": "uniform", "seconds": 2.0}
    answer     {"rate": 2.8e6}                     # keys a second
    end        standard input closes

`init_size` is the number of keys that TFRA makes room for beforehand; the other tables are not told, or must be told
(dense). With {"inserts": "rows" | "rows and slots"} a quarter of the keys go into an empty table, and the first
answer has the rate.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Batches = list[np.ndarray[Any, Any]]
LEARNING_RATE, ACCUMULATOR, EPSILON = 0.01, 0.1, 1e-7


class Table:
    """One contestant; subclasses time their own calls."""

    version = ""
    empty_bytes = 0  # memory of the process before it made a table

    def insert(self, keys: np.ndarray[Any, Any]) -> None:
        """Make rows that are not there."""
        raise AssertionError

    def insert_slots(self, keys: np.ndarray[Any, Any]) -> None:
        """Make the optimizer's state of these rows, where `insert` did not."""

    def operation(self, op: str) -> Callable[[np.ndarray[Any, Any]], None]:
        """The function of one batch of keys."""
        raise AssertionError


class Engine(Table):
    """This project."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from deeprec_spark.embedding import _core
        from deeprec_spark.embedding.optimizers import Adagrad
        from deeprec_spark.embedding.options import EmbeddingVariableOption, StorageOption, StorageType
        from deeprec_spark.embedding.variable import EmbeddingVariable

        _core.set_num_threads(settings["threads"])
        self.empty_bytes = resident_bytes()
        storage = StorageOption()
        if "storage" in settings:
            kind = StorageType(settings["storage"])
            storage = StorageOption(kind, settings["path"], (settings["first_tier_bytes"],))
        self.table = EmbeddingVariable(
            "t",
            settings["dim"],
            option=EmbeddingVariableOption(storage_option=storage),
            optimizer=None if settings.get("inserts") == "rows" else Adagrad(LEARNING_RATE),
        )
        self.gradients = np.full((settings["batch"], settings["dim"]), 0.01, np.float32)
        self.step = 0
        self.version = f"this checkout, {_core.cpu()}"

    def insert(self, keys: np.ndarray[Any, Any]) -> None:
        """Rows with start values and slots."""
        self.table.lookup(keys, train=True)

    def operation(self, op: str) -> Callable[[np.ndarray[Any, Any]], None]:
        """All operations."""

        def update(keys: np.ndarray[Any, Any]) -> None:
            self.step += 1
            self.table.apply_gradients(keys, self.gradients, step=self.step)

        def lookup(keys: np.ndarray[Any, Any]) -> None:
            self.table.lookup(keys)

        def dedup(keys: np.ndarray[Any, Any]) -> None:
            _, rows, inverse = self.table.lookup_unique([keys])
            _ = rows[inverse[0]]

        return {
            "lookup": lookup,
            "train": self.insert,
            "dedup": dedup,
            "update": update,
        }[op]


class TensorFlowTable(Table):
    """MutableHashTable or DenseHashTable of TensorFlow, or a variable of TensorFlow Recommenders Addons."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(settings["threads"])
        tf.config.threading.set_inter_op_parallelism_threads(settings["threads"])
        if settings["peer"] == "tfra":
            import tensorflow_recommenders_addons as tfra  # type: ignore[import-not-found]  # its own environment

            self.tfra = tfra
        self.empty_bytes = resident_bytes()
        self.tf = tf
        self.dim = settings["dim"]
        self.version = f"TensorFlow {tf.__version__}"
        if settings["peer"] == "tfra":
            self.version += f", TFRA {self.tfra.__version__}"
        self.rows = tf.ones([settings["batch"], self.dim])
        self.gradients = tf.fill([settings["batch"], self.dim], 0.01)
        self.weights = self.make(settings, "weights")
        with_slots = settings["peer"] == "tfra" and settings.get("inserts") != "rows"
        self.slots = self.make(settings, "slots") if with_slots else None

    def make(self, settings: dict[str, Any], name: str) -> Any:
        """One table of rows; the optimizer's slots are a second one, as in these libraries."""
        tf, peer = self.tf, settings["peer"]
        if peer == "tfra":
            # Every variable needs a name of its own in the process.
            return self.tfra.dynamic_embedding.get_variable(
                f"{name}_{time.monotonic_ns()}",
                key_dtype=tf.int64,
                value_dtype=tf.float32,
                dim=self.dim,
                devices=["/CPU:0"],
                initializer=0.0,
                init_size=settings["init_size"],
            )
        default = tf.zeros([self.dim])
        if peer == "mutable":
            return tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, default)
        return tf.lookup.experimental.DenseHashTable(
            tf.int64,
            tf.float32,
            default,
            empty_key=-1,
            deleted_key=-2,
            initial_num_buckets=1 << (2 * settings["keys"] - 1).bit_length(),
        )

    def _insert(self, table: Any, keys: Any, rows: Any) -> None:
        (table.upsert if hasattr(table, "upsert") else table.insert)(keys, rows)

    def insert(self, keys: np.ndarray[Any, Any]) -> None:
        """Values only; the slots' table is filled by `insert_slots`."""
        self._insert(self.weights, self.tf.constant(keys), self.rows)

    def insert_slots(self, keys: np.ndarray[Any, Any]) -> None:
        """The optimizer's state, which is a table of its own in these libraries."""
        if self.slots is not None:
            self._insert(self.slots, self.tf.constant(keys), self.rows)

    def operation(self, op: str) -> Callable[[np.ndarray[Any, Any]], None]:
        """The update reads and writes both tables, which is what TFRA's optimizers do."""
        tf = self.tf

        def lookup(keys: np.ndarray[Any, Any]) -> None:
            self.weights.lookup(tf.constant(keys))

        def dedup(keys: np.ndarray[Any, Any]) -> None:
            distinct, inverse = tf.unique(tf.constant(keys))
            tf.gather(self.weights.lookup(distinct), inverse)

        def update(keys: np.ndarray[Any, Any]) -> None:
            assert self.slots is not None
            distinct, inverse = tf.unique(tf.constant(keys))
            gradient = tf.math.unsorted_segment_sum(self.gradients, inverse, tf.size(distinct))
            accumulator = self.slots.lookup(distinct) + gradient * gradient
            weights = self.weights.lookup(distinct)
            weights -= LEARNING_RATE * gradient * tf.math.rsqrt(accumulator + EPSILON)
            self._insert(self.slots, distinct, accumulator)
            self._insert(self.weights, distinct, weights)

        return {"lookup": lookup, "dedup": dedup, "update": update}[op]


def resident_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def insert_rate(table: Table, keys: np.ndarray[Any, Any], batch: int) -> float:
    """Rows a second into an empty table, with slots if it has some; the first batch is not timed."""
    first, *batches = [
        np.ascontiguousarray(keys[at : at + batch]) for at in range(0, len(keys) - batch + 1, batch)
    ]
    table.insert(first)
    table.insert_slots(first)
    start = time.perf_counter()
    for part in batches:
        table.insert(part)
        table.insert_slots(part)
    return len(batches) * batch / (time.perf_counter() - start)


def main() -> None:
    """Fill the table, then answer requests until standard input closes."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    batch = settings["batch"]
    keys: np.ndarray[Any, Any] = np.load(settings["keys_file"], mmap_mode="r")
    ids = {name: np.load(path) for name, path in settings["ids"].items()}
    make = Engine if settings["peer"] == "engine" else TensorFlowTable
    table = make(settings)
    if "inserts" in settings:
        _answer(
            {
                "ready": True,
                "version": table.version,
                "rate": insert_rate(table, keys[: len(keys) // 4], batch),
            }
        )
        return
    for at in range(0, len(keys), batch):
        table.insert(np.ascontiguousarray(keys[at : at + batch]))
        table.insert_slots(np.ascontiguousarray(keys[at : at + batch]))
    row_bytes = (resident_bytes() - table.empty_bytes) / len(keys)
    _answer({"ready": True, "version": table.version, "row_bytes": row_bytes})
    for line in sys.stdin:
        request = json.loads(line)
        operation = table.operation(request["op"])
        batches: Batches = np.split(ids[request["ids"]], len(ids[request["ids"]]) // batch)
        operation(batches[-1])
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < request["seconds"]:
            operation(batches[done % len(batches)])
            done += 1
        _answer({"rate": done * batch / (time.perf_counter() - start)})


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
