"""SparseEmbedding: a Keras layer over a dynamic embedding table."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.options import EmbeddingVariableOption
from deeprec_spark.embedding.store import EmbeddingStore, TableSpec
from deeprec_spark.layers import context, direct
from deeprec_spark.layers.bags import Bags
from deeprec_spark.layers.id_layer import IdLayer, check_ids

Tensor = Any
_AUTOMATIC_NAME = re.compile(r"sparse_embedding(_\d+)?")


@keras.saving.register_keras_serializable(package="deeprec_spark")
class SparseEmbedding(IdLayer):
    """Looks int64 ids up in a table that grows with the ids it meets; there is no `input_dim`.

    The table lives outside of TensorFlow: `Estimator` and `training.Trainer` train it in their embedding store;
    anywhere else the layer reads a store of its own, or the one that `layers.bind` or `layers.bind_local` gave it.
    With `trainable = False`, set before training starts, its table is only read: no row changes, none is made.

    Args:
        embedding_dim: width of a row.
        combiner: None, or `"sum"`, `"mean"`, `"sqrtn"` over the last axis of the ids. A bag without ids is zeros.
        table: name of the table; layers that name one table share it. Default: the layer's name, and for layers
            that were given none, `sparse_embedding`, `sparse_embedding_1`, … in the order of the model.
        ev_option: filters, eviction, storage and initializer of the table.
        padding_value: ids equal to it contribute nothing and get no row; with `combiner=None` they are zeros and
            masked. None: every id counts.
        seed: seed of the initial values; by default made from the table's name.
        optimizer: an engine optimizer for this table alone; default: the one of the Estimator or Trainer.

    Call arguments:
        ids: integers `[B]` -> `[B, dim]`; `[B, L]` -> `[B, L, dim]`, with a combiner `[B, dim]`; ragged
            `[B, (L)]` likewise. Any int64 is an id.
        weights: optional float of the shape of `ids`; each id's row is multiplied by its weight, "mean" divides
            by the sum of weights, "sqrtn" by the root of the sum of their squares.

    Example:
        >>> embed = SparseEmbedding(4, combiner="mean", padding_value=-1)
        >>> embed(np.array([[7, 9], [-1, -1]])).shape
        TensorShape([2, 4])
    """

    def __init__(
        self,
        embedding_dim: int,
        combiner: str | None = None,
        *,
        table: str | None = None,
        ev_option: EmbeddingVariableOption | Mapping[str, Any] | None = None,
        padding_value: int | None = None,
        seed: int | None = None,
        optimizer: Optimizer | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embedding_dim, combiner, padding_value, **kwargs)
        if isinstance(embedding_dim, bool) or not isinstance(embedding_dim, int) or embedding_dim < 1:
            raise ValueError(
                f"embedding_dim must be a positive int. Received: embedding_dim={embedding_dim!r}"
            )
        if isinstance(ev_option, Mapping):
            ev_option = EmbeddingVariableOption.from_dict(ev_option)
        if ev_option is not None and not isinstance(ev_option, EmbeddingVariableOption):
            raise TypeError(
                f"ev_option must be an EmbeddingVariableOption. Received: ev_option={ev_option!r}"
            )
        if isinstance(optimizer, Mapping):
            optimizer = Optimizer.from_dict(optimizer)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizer must be one of deeprec_spark.embedding.optimizers (the table is updated outside of "
                f"Keras). Received: optimizer={optimizer!r}"
            )
        self.ev_option = ev_option or EmbeddingVariableOption()
        self.seed = seed
        self.optimizer = optimizer
        self._table = table
        self._direct = direct.DirectSource()

    @property
    def table(self) -> str:
        """Name of the table that this layer reads."""
        return self._table or self.name

    @property
    def has_automatic_table(self) -> bool:
        """Whether neither the table nor the layer was given a name."""
        return self._table is None and _AUTOMATIC_NAME.fullmatch(self.name) is not None

    def name_table(self, table: str) -> None:
        """Give the table its name; used by `find_layers`, before the table exists."""
        self._table = table

    def table_spec(self, optimizer: Optimizer | None = None) -> TableSpec:
        """What a store needs to make this table; the layer's own optimizer goes before `optimizer`."""
        seed = self.seed
        if seed is None:
            seed = int.from_bytes(hashlib.blake2b(self.table.encode(), digest_size=8).digest(), "little") >> 1
        return TableSpec(
            name=self.table,
            embedding_dim=self.embedding_dim,
            option=self.ev_option,
            optimizer=self.optimizer or optimizer,
            seed=seed,
        )

    def bind(self, store: EmbeddingStore, trainable: bool = False) -> None:
        """Read `store` wherever no context is active, and with `trainable` update it; it must hold the table."""
        self._direct.bind(store, trainable)

    def call(self, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        """Look up and combine; see the class."""
        if not isinstance(ids, tf.RaggedTensor):
            ids = tf.convert_to_tensor(ids)
        check_ids(ids, weights, where=f"SparseEmbedding {self.name!r}")
        source = context.active() or self._direct
        rows = source.combined(self)
        if rows is not None:
            # The shape that bags sum to: `[B]` or `[B, …, L]` ids, whose inner axes the trace knows.
            inner = list(ids.shape[1:-1])
            result = tf.reshape(rows, [-1, *inner, self.embedding_dim]) if inner else rows
            return tf.cast(result, self.compute_dtype)
        if weights is not None:
            weights = tf.cast(weights, tf.float32)
        bags = Bags(ids, weights, self.padding_value)
        origin = context.Origin(ids, self.padding_value, self.combiner if weights is None else None)
        rows = source.lookup(self, bags.values, origin)
        rows.set_shape([None, self.embedding_dim])
        result = bags.restore(rows) if self.combiner is None else bags.combine(rows, self.combiner)
        return tf.cast(result, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """The arguments of `__init__`, as JSON values."""
        return {
            **super().get_config(),
            "embedding_dim": self.embedding_dim,
            "combiner": self.combiner,
            "table": self._table,
            "ev_option": self.ev_option.to_dict(),
            "padding_value": self.padding_value,
            "seed": self.seed,
            "optimizer": None if self.optimizer is None else self.optimizer.to_dict(),
        }
