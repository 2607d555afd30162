"""MultiHashEmbedding: a Keras layer that composes each id's embedding from rows of several small tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from deeprec_spark.embedding.multi_hash import check_dims
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.options import EmbeddingVariableOption
from deeprec_spark.layers.bags import Bags
from deeprec_spark.layers.id_layer import IdLayer, check_ids
from deeprec_spark.layers.sparse_embedding import SparseEmbedding

Tensor = Any


@keras.saving.register_keras_serializable(package="deeprec_spark")
class MultiHashEmbedding(IdLayer):
    """`k` tables of `n_1, …, n_k` rows serve `n_1 · … · n_k` ids, each with a combination of rows of its own.

    The layer of `embedding.MultiHashVariable`: an id is written as digits of a mixed radix, digit i picks the row of
    table i, and the rows are added, multiplied or concatenated. Tables are `<table>/0`, `<table>/1`, …, trained, saved
    and exported like those of SparseEmbedding.

        ids [B] ──▶ (id mod n_1, id div n_1 mod n_2, …) ──▶ k rows ──▶ add │ mult │ concat ──▶ [B, dim]

    Args:
        dims: `(rows, dim)` of each table. All dims equal for add and mult; for concat they add up to the embedding.
        complementary_strategy: "Q-R" (exactly two tables) or "mixed-radix" (two or more).
        operation: "add", "mult" or "concat".
        combiner: None, or `"sum"`, `"mean"`, `"sqrtn"` over the last axis of the ids, after the rows are composed.
        table: name before the tables' numbers; default: the layer's name, which must then be given.
        ev_option, optimizer: of each table; see SparseEmbedding.
        padding_value: ids equal to it contribute nothing; with `combiner=None` they are zeros and masked.

    Call arguments:
        ids, weights: as SparseEmbedding's. Ids outside of `[0, n_1 · … · n_k)`, such as hashed ones, are taken
            modulo that product, so that some then share their rows.

    Example:
        >>> embed = MultiHashEmbedding([(1000, 8), (1000, 8)], operation="concat", name="item")
        >>> embed(np.array([7, 999_999])).shape
        TensorShape([2, 16])
    """

    def __init__(
        self,
        dims: Sequence[Sequence[int]],
        *,
        complementary_strategy: str = "Q-R",
        operation: str = "add",
        combiner: str | None = None,
        table: str | None = None,
        ev_option: EmbeddingVariableOption | Mapping[str, Any] | None = None,
        padding_value: int | None = None,
        optimizer: Optimizer | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if table is None and kwargs.get("name") is None:
            raise ValueError(
                "A MultiHashEmbedding needs a table or a name, since its tables are found by it in checkpoints. "
                "Received: table=None, name=None"
            )
        pairs = [(int(rows), int(dim)) for rows, dim in dims]
        check_dims(pairs, complementary_strategy, operation)
        if math.prod(rows for rows, _ in pairs) > 2**63 - 1:
            raise ValueError(
                f"The product of the tables' rows must fit into an int64. Received: dims={pairs}"
            )
        embedding_dim = sum(dim for _, dim in pairs) if operation == "concat" else pairs[0][1]
        super().__init__(embedding_dim, combiner, padding_value, **kwargs)
        self.dims = pairs
        self.complementary_strategy = complementary_strategy
        self.operation = operation
        self._table = table
        self.digits = [
            SparseEmbedding(
                dim,
                table=f"{table or self.name}/{index}",
                ev_option=ev_option,
                optimizer=optimizer,
                name=f"digit_{index}",
            )
            for index, (_, dim) in enumerate(self.dims)
        ]

    def call(self, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        """Look up, compose and combine; see the class."""
        if not isinstance(ids, tf.RaggedTensor):
            ids = tf.convert_to_tensor(ids)
        check_ids(ids, weights, where=f"MultiHashEmbedding {self.name!r}")
        bags = Bags(ids, None if weights is None else tf.cast(weights, tf.float32), self.padding_value)
        rest = tf.math.floormod(bags.values, tf.constant(self.capacity, tf.int64))
        parts = []
        for (rows, _), digit in zip(self.dims, self.digits, strict=True):
            parts.append(tf.cast(digit(tf.math.floormod(rest, rows)), tf.float32))
            rest = tf.math.floordiv(rest, rows)
        combined = self._compose(parts)
        result = bags.restore(combined) if self.combiner is None else bags.combine(combined, self.combiner)
        return tf.cast(result, self.compute_dtype)

    @property
    def capacity(self) -> int:
        """Number of ids that have a combination of their own."""
        return math.prod(rows for rows, _ in self.dims)

    def get_config(self) -> dict[str, Any]:
        """The arguments of `__init__`, as JSON values."""
        first = self.digits[0]
        return {
            **super().get_config(),
            "dims": [list(pair) for pair in self.dims],
            "complementary_strategy": self.complementary_strategy,
            "operation": self.operation,
            "combiner": self.combiner,
            "table": self._table,
            "ev_option": first.ev_option.to_dict(),
            "padding_value": self.padding_value,
            "optimizer": None if first.optimizer is None else first.optimizer.to_dict(),
        }

    def _compose(self, parts: list[Tensor]) -> Tensor:
        if self.operation == "concat":
            return tf.concat(parts, axis=1)
        if self.operation == "add":
            return tf.add_n(parts)
        product = parts[0]
        for part in parts[1:]:
            product = product * part
        return product
