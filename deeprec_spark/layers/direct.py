"""The rows of a layer that is called outside of any context: read from a store, trained on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from deeprec_spark.embedding.hashing import unique
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.store import EmbeddingStore, PullRequest, PushRequest, SparseGradient, UniqueKeys

if TYPE_CHECKING:
    from deeprec_spark.layers.context import Origin
    from deeprec_spark.layers.sparse_embedding import SparseEmbedding

Tensor = Any


class DirectSource:
    """Serves one layer from a store: the one it is bound to, or one of its own, made at the first lookup.

    Inside a `tf.function` the lookup is a `tf.numpy_function`: fine for `model.predict` and `model.fit` in this
    process, not for a SavedModel (see `deeprec_spark.export`).
    """

    def __init__(self) -> None:
        self._store: EmbeddingStore | None = None
        self._trainable = False
        # A tape calls the gradient below only for what depends on a variable that it watches. This one is read
        # for nothing else, and is invisible to Keras.
        self._anchor: Tensor | None = None

    def bind(self, store: EmbeddingStore, trainable: bool = False) -> None:
        """Read `store` from now on; with `trainable`, gradients update it."""
        self._store = store
        self._trainable = trainable

    def lookup(self, layer: SparseEmbedding, ids: Tensor, origin: Origin) -> Tensor:
        """Rows `[n, embedding_dim]`; their gradient updates the store, unless the layer is frozen."""

        def pull(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
            distinct, inverse, counts = unique(keys)
            request = PullRequest({layer.table: UniqueKeys(distinct, counts)}, train=False, dense=False)
            rows = self._open(layer).pull(request).rows[layer.table]
            return np.take(rows, inverse, axis=0)

        def push(keys: npt.NDArray[np.int64], gradient: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            store = self._open(layer)
            distinct, inverse, counts = unique(keys)
            store.pull(PullRequest({layer.table: UniqueKeys(distinct, counts)}, train=True, dense=False))
            total = np.zeros((len(distinct), layer.embedding_dim), np.float32)
            np.add.at(total, inverse, gradient)
            store.push(
                PushRequest({layer.table: SparseGradient(distinct, total)}, None, None, samples=len(keys))
            )
            return np.zeros((), np.float32)

        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow ships no types
        def rows_of(anchor: Tensor) -> tuple[Tensor, Any]:
            if tf.executing_eagerly():
                rows = tf.convert_to_tensor(pull(ids.numpy()))
            else:
                rows = tf.numpy_function(pull, [ids], tf.float32)
            rows.set_shape([None, layer.embedding_dim])

            def gradient(upstream: Tensor) -> Tensor:
                if not layer.trainable:
                    return tf.zeros([])  # frozen: the table takes no update
                if not self._trainable:
                    raise RuntimeError(
                        f"SparseEmbedding {layer.name!r} takes a gradient outside of Estimator and "
                        "training.Trainer, where nothing says how to update its table. Train the model with "
                        "Estimator.from_keras or Trainer; or, to use model.fit in one process, call "
                        "deeprec_spark.layers.bind_local(model, optimizer) first. Received: a layer that only reads"
                    )
                # Kept ordered and alive by automatic control dependencies: numpy_function is stateful.
                done = tf.numpy_function(push, [ids, upstream], tf.float32)
                return tf.ensure_shape(done, [])

            return rows, gradient

        return rows_of(self._anchor_tensor())

    def combined(self, layer: SparseEmbedding) -> Tensor | None:
        """None: the layer combines."""
        return None

    def _anchor_tensor(self) -> Tensor:
        if self._anchor is None:
            with tf.init_scope():
                self._anchor = tf.Variable(0.0, trainable=True, name="sparse_embedding_anchor")
        return self._anchor.read_value()

    def _open(self, layer: SparseEmbedding) -> EmbeddingStore:
        if self._store is None:
            store = LocalStore()
            store.create_tables([layer.table_spec()])
            self._store = store
        return self._store
