"""Embedding tables of an exported model: variables and a binary search, stock TensorFlow ops only."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf


class SortedTable(tf.Module):
    """Rows by int64 key, found by binary search; an id without a row reads the table's default.

    No id is reserved: INT64_MIN, -1 and INT64_MAX are keys like any other.

    Args:
        name: The table.
        keys: int64 `[rows]`, ascending, without repeats; a memory map will do.
        values: float32 `[rows, dim]`, in the order of the keys; a memory map will do.
        default_value: Every element of what an unknown id reads.

    Example:
        >>> table = SortedTable("user", np.array([3, 9]), np.array([[0.1], [0.2]], np.float32), 0.0)
        >>> table.lookup(tf.constant([9, 4], tf.int64)).numpy().tolist()
        [[0.2], [0.0]]
    """

    def __init__(
        self,
        name: str,
        keys: npt.NDArray[np.int64],
        values: npt.NDArray[np.float32],
        default_value: float = 0.0,
    ) -> None:
        super().__init__()
        if len(keys) != len(values):
            raise ValueError(
                f"Table {name!r} needs one row of values for each key. Received: {len(keys)} and {len(values)}"
            )
        self._dim = int(values.shape[1])
        self._rows = len(keys)
        self._default = float(default_value)
        # One row more than keys, holding the default: misses gather it.
        default = np.full((1, self._dim), self._default, np.float32)
        self.keys = _variable(keys[:1], keys[1:], name="keys")
        self.values = _variable(values, default, name="values")

    def lookup(self, ids: Any) -> Any:
        """Rows float32 `[n, dim]` of int64 `[n]` ids."""
        if self._rows == 0:
            return tf.fill([tf.size(ids), self._dim], tf.constant(self._default, tf.float32))
        position = tf.searchsorted(self.keys, ids, side="left", out_type=tf.int64)
        inside = tf.minimum(position, tf.constant(self._rows - 1, tf.int64))
        found = tf.equal(tf.gather(self.keys, inside), ids)
        return tf.gather(self.values, tf.where(found, inside, tf.constant(self._rows, tf.int64)))


def _variable(first: npt.NDArray[Any], second: npt.NDArray[Any], name: str) -> Any:
    """A variable of both arrays' rows.

    TensorFlow reads NumPy buffers in place as operands, and a variable takes an operation's result over without a copy:
    the peak is one table. `tf.Variable(array)` holds two.
    """
    return tf.Variable(tf.concat([first, second], axis=0), trainable=False, name=name)
