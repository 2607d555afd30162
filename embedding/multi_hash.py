"""MultiHashVariable: one id, several small tables, a distinct combination of rows for every id."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deeprec_spark.embedding._serial import integer
from deeprec_spark.embedding.hashing import as_keys
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.options import EmbeddingVariableOption
from deeprec_spark.embedding.variable import EmbeddingVariable, lookup_tables

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

OPERATIONS = ("add", "mult", "concat")
STRATEGIES = ("Q-R", "mixed-radix")


class MultiHashVariable:
    """Compositional embeddings: `k` tables of `n_1, …, n_k` rows serve `n_1 · … · n_k` ids.

    An id is written as digits of a mixed radix, lowest first: digit i picks the row of table i. Since a number has one
    such form, distinct ids get distinct combinations of rows. "Q-R" is the case of two tables: remainder and quotient.

        id ──▶ (id mod n_1, id div n_1 mod n_2, …) ──▶ rows ──▶ add │ mult │ concat ──▶ [embedding_dim]

    Args:
        name: for errors; table i is `name/i`.
        dims: `(rows, dim)` of each table. All dims equal for add and mult; for concat they add up to the embedding.
        complementary_strategy: "Q-R" (exactly two tables) or "mixed-radix" (two or more).
        operation: "add", "mult" or "concat".
        option: options of each table.
        optimizer: updates the tables; None is `SGD()`.
        seed: start values are a pure function of (seed, table, row).

    Example:
        >>> table = MultiHashVariable("user", [(1000, 8), (1000, 8)])
        >>> table.lookup([0, 999_999]).shape
        (2, 8)
    """

    def __init__(
        self,
        name: str,
        dims: Sequence[tuple[int, int]],
        *,
        complementary_strategy: str = "Q-R",
        operation: str = "add",
        option: EmbeddingVariableOption | None = None,
        optimizer: Optimizer | None = None,
        seed: int = 0,
    ) -> None:
        check_dims(dims, complementary_strategy, operation)
        self.name = name
        self.operation = operation
        self.radices = [int(rows) for rows, _ in dims]
        self.capacity = math.prod(self.radices)
        self.tables = [
            EmbeddingVariable(f"{name}/{index}", dim, option=option, optimizer=optimizer, seed=seed + index)
            for index, (_, dim) in enumerate(dims)
        ]
        self.embedding_dim = (
            sum(dim for _, dim in dims) if operation == "concat" else self.tables[0].embedding_dim
        )

    def digits(self, keys: npt.ArrayLike) -> list[Int64Array]:
        """The row of each table for each id; a ValueError names ids outside of `[0, capacity)`."""
        rest = as_keys(keys)
        if len(rest) and (rest.min() < 0 or int(rest.max()) >= self.capacity):
            raise ValueError(
                f"Ids of {self.name!r} must be within [0, {self.capacity}), the product of its tables' rows. "
                f"Received: ids from {rest.min()} to {rest.max()}"
            )
        digits = []
        for radix in self.radices:
            digits.append(rest % radix)
            rest = rest // radix
        return digits

    def lookup(self, keys: npt.ArrayLike, *, train: bool = False) -> Float32Array:
        """The combined rows: float32 `[n, embedding_dim]`."""
        return self._combine(self._parts(self.digits(keys), train))

    def apply_gradients(
        self,
        keys: npt.ArrayLike,
        gradients: npt.ArrayLike,
        *,
        step: int,
        learning_rate: float | None = None,
        now: float | None = None,
    ) -> None:
        """Update the rows of every table by the chain rule; gradients of ids that share a row are summed.

        Args:
            keys: int64 `[n]`.
            gradients: of the combined rows, float32 `[n, embedding_dim]`.
            step: number of this update, from 1.
            learning_rate: for this update; None takes the optimizer's.
            now: wall-clock seconds for TimeEvict; None takes the clock.
        """
        digits = self.digits(keys)
        array = np.asarray(gradients, np.float32)
        if array.shape != (len(digits[0]), self.embedding_dim):
            raise ValueError(
                f"gradients of {self.name!r} must be [keys, embedding_dim] = [{len(digits[0])}, {self.embedding_dim}]. "
                f"Received: shape={array.shape}"
            )
        if self.operation == "add":
            parts = [array] * len(self.tables)
        elif self.operation == "concat":
            parts = np.split(array, np.cumsum([table.embedding_dim for table in self.tables])[:-1], axis=1)
        else:
            rows = self._parts(digits, train=False)
            others = [
                np.prod([row for j, row in enumerate(rows) if j != i], axis=0) for i in range(len(rows))
            ]
            parts = [array * other for other in others]
        for table, digit, part in zip(self.tables, digits, parts, strict=True):
            table.apply_gradients(digit, part, step=step, learning_rate=learning_rate, now=now)

    def _parts(self, digits: list[Int64Array], train: bool) -> list[Float32Array]:
        return lookup_tables(self.tables, digits, [None] * len(digits), train=train)

    def _combine(self, parts: list[Float32Array]) -> Float32Array:
        if self.operation == "concat":
            return np.concatenate(parts, axis=1)
        combined: Float32Array = np.sum(parts, axis=0) if self.operation == "add" else np.prod(parts, axis=0)
        return combined


def check_dims(dims: Sequence[tuple[int, int]], complementary_strategy: str, operation: str) -> None:
    """A ValueError unless tables of these `(rows, dim)` can be composed in this way."""
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {OPERATIONS}. Received: operation={operation!r}")
    if complementary_strategy not in STRATEGIES:
        raise ValueError(
            f"complementary_strategy must be one of {STRATEGIES}. "
            f"Received: complementary_strategy={complementary_strategy!r}"
        )
    if len(dims) < 2 or (complementary_strategy == "Q-R" and len(dims) != 2):
        raise ValueError(
            f"{complementary_strategy} needs {'two' if complementary_strategy == 'Q-R' else 'two or more'} tables. "
            f"Received: dims={list(dims)}"
        )
    for rows, dim in dims:
        integer("rows of dims", rows)
        integer("dim of dims", dim)
    if any(rows < 1 or dim < 1 for rows, dim in dims):
        raise ValueError(f"Every table needs at least one row and one element. Received: dims={list(dims)}")
    if operation != "concat" and len({dim for _, dim in dims}) != 1:
        raise ValueError(
            f"operation {operation!r} needs tables of one dimension. Received: dims={list(dims)}"
        )
