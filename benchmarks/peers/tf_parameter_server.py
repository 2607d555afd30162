"""TensorFlow's ParameterServerStrategy, one server and one worker, with a step written by hand.

What `model.fit` does there is slower: it reads and writes each variable by itself, and looks repeated ids up again.
Here ids are made distinct on the worker, one gather brings their rows, one flat vector the dense weights, and
TensorFlow's own fused Adagrad updates both on the server.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.peers import keras_models
from benchmarks.peers.protocol import LEARNING_RATE, Data, serve, settings

ACCUMULATOR, EPSILON = 0.1, 1e-7
JOBS = ("ps", "worker")


class Vectors:
    """The vectors of each column in the step that is traced. Keras would copy a plain dict."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = {}


class Supplied(keras.layers.Layer):
    """Stands where an embedding layer would be: gives what the step has put into `vectors`."""

    def __init__(self, key: str, dim: int, vectors: Vectors) -> None:
        super().__init__()
        self.key, self.dim, self.vectors = key, dim, vectors

    def call(self, ids: Any) -> Any:
        """The vectors of these ids, whatever they are."""
        return self.vectors.of[self.key]

    def compute_output_shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """`[B, dim]`."""
        return (shape[0], self.dim)


class Table:
    """Rows and accumulators of all columns of one width, on the server; one variable, or one for each column.

    Ids are `[B, ids of a sample]`: those of single columns, then those of bags, whose vectors are means.
    """

    def __init__(self, data: Data, dim: int, fused: bool) -> None:
        self.dim, self.fused = dim, fused
        sizes = data.sizes
        self.lengths = lengths_of(data)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self.offsets = np.repeat(starts, self.lengths)
        counts = [int(np.sum(sizes))] if fused else list(sizes)
        self.rows = [
            tf.Variable(lambda n=n: tf.random.uniform([n, dim], -0.05, 0.05), trainable=False) for n in counts
        ]
        self.sums = [tf.Variable(lambda n=n: tf.fill([n, dim], ACCUMULATOR), trainable=False) for n in counts]

    def keys(self, ids: Any) -> list[tuple[Any, Any]]:
        """Distinct keys and positions of a batch's ids, for each variable."""
        if self.fused:
            return [tf.unique(tf.reshape(ids + self.offsets, [-1]))]
        return [tf.unique(tf.reshape(column, [-1])) for column in tf.split(ids, self.lengths, axis=1)]

    def pull(self, keys: Sequence[tuple[Any, Any]]) -> list[Any]:
        """The rows of distinct keys: the gather runs where the variable is."""
        return [tf.gather(rows, key) for rows, (key, _) in zip(self.rows, keys, strict=True)]

    def expand(self, pulled: Sequence[Any], keys: Sequence[tuple[Any, Any]]) -> list[Any]:
        """`[B, dim]` for each column."""
        gathered = [tf.gather(rows, positions) for rows, (_, positions) in zip(pulled, keys, strict=True)]
        if self.fused:
            vectors = tf.reshape(gathered[0], [-1, len(self.offsets), self.dim])
            columns = tf.split(vectors, self.lengths, axis=1)
        else:
            columns = [
                tf.reshape(vectors, [-1, length, self.dim])
                for vectors, length in zip(gathered, self.lengths, strict=True)
            ]
        return [
            column[:, 0] if length == 1 else tf.reduce_mean(column, axis=1)
            for column, length in zip(columns, self.lengths, strict=True)
        ]

    def push(self, keys: Sequence[tuple[Any, Any]], gradients: Sequence[Any]) -> None:
        """Adagrad on these rows, on the server."""
        for rows, sums, (key, _), gradient in zip(self.rows, self.sums, keys, gradients, strict=True):
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=rows.handle,
                accum=sums.handle,
                lr=LEARNING_RATE,
                epsilon=EPSILON,
                grad=tf.convert_to_tensor(gradient),
                indices=key,
            )


class Trainer:
    """The model, its variables on the server, and the step."""

    def __init__(self, data: Data, strategy: Any, fused: bool, jit: bool) -> None:
        self._vectors = Vectors()
        self._lengths = lengths_of(data)
        self._prefixes: dict[str, int] = {}

        self._columns = [*(f"c{i}" for i in range(data.singles)), *(f"b{i}" for i in range(data.num_bags))]

        def embedding(name: str, dim: int, combiner: str | None) -> Any:
            [column] = [column for column in self._columns if name.endswith(column)]
            self._prefixes[name.removesuffix(column)] = dim
            return Supplied(name, dim, self._vectors)

        self._model = keras_models.build(keras, data, embedding)
        self._inputs = [tensor.name for tensor in self._model.inputs]
        self._loss = keras.losses.BinaryCrossentropy(from_logits=True)
        weights = [variable.numpy() for variable in self._model.trainable_variables]
        self._shapes = [array.shape for array in weights]
        self._sizes = [array.size for array in weights]
        flat = np.concatenate([array.ravel() for array in weights])
        with strategy.scope():
            self._dense = tf.Variable(flat, trainable=False)
            self._dense_sums = tf.Variable(np.full_like(flat, ACCUMULATOR), trainable=False)
            self._tables = {prefix: Table(data, dim, fused) for prefix, dim in self._prefixes.items()}
        self._forward = (
            tf.function(self._loss_and_gradients, jit_compile=True) if jit else self._loss_and_gradients
        )

    def step(self, numbers: Any, ids: Any, label: Any) -> Any:
        """One update; the loss."""
        keys = {prefix: table.keys(ids) for prefix, table in self._tables.items()}
        pulled = {prefix: table.pull(keys[prefix]) for prefix, table in self._tables.items()}
        loss, dense, rows = self._forward(numbers, ids, label, self._dense.read_value(), pulled, keys)
        tf.raw_ops.ResourceApplyAdagradV2(
            var=self._dense.handle,
            accum=self._dense_sums.handle,
            lr=LEARNING_RATE,
            epsilon=EPSILON,
            grad=dense,
        )
        for prefix, table in self._tables.items():
            table.push(keys[prefix], rows[prefix])
        return loss

    def _loss_and_gradients(
        self,
        numbers: Any,
        ids: Any,
        label: Any,
        flat: Any,
        pulled: Mapping[str, Any],
        keys: Mapping[str, Any],
    ) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([flat, pulled])
            parts = tf.split(flat, self._sizes)
            weights = [tf.reshape(part, shape) for part, shape in zip(parts, self._shapes, strict=True)]
            for prefix, table in self._tables.items():
                for column, vectors in zip(
                    self._columns, table.expand(pulled[prefix], keys[prefix]), strict=True
                ):
                    self._vectors.of[f"{prefix}{column}"] = vectors
            columns = {
                name: part[:, 0] if length == 1 else part
                for name, part, length in zip(
                    self._columns, tf.split(ids, self._lengths, axis=1), self._lengths, strict=True
                )
            }
            given = {"numbers": numbers, **columns}
            logits, _ = self._model.stateless_call(
                weights, [], {name: given[name] for name in self._inputs}, training=True
            )
            loss = self._loss(label[:, tf.newaxis], logits)
        dense, rows = tape.gradient(loss, [flat, pulled])
        return loss, dense, rows


def lengths_of(data: Data) -> list[int]:
    """How many ids a sample has in each column: single columns, then bags."""
    return [1] * data.singles + [data.bags.shape[-1]] * data.num_bags


def dataset_of(data: Data) -> Callable[[], Any]:
    """The batches as the worker's own dataset, in memory there."""

    def dataset() -> Any:
        bags = data.bags.reshape(*data.bags.shape[:2], -1)
        parts = (data.dense, np.concatenate([data.ids, bags], axis=-1), data.label)
        return tf.data.Dataset.from_tensor_slices(parts).repeat().prefetch(2)

    return dataset


def run_server(job: str, cluster: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> None:
    """A server or worker process; it ends with its standard input."""
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=options["intra"], inter_op_parallelism_threads=options["inter"]
    )
    tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=0, protocol="grpc", config=config
    )
    sys.stdin.read()
    os._exit(0)  # the server has no stop


def start_servers(options: Mapping[str, Any]) -> tuple[dict[str, list[str]], list[subprocess.Popen[bytes]]]:
    """One process of each job, and their addresses."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in JOBS]
    cluster = {job: [f"127.0.0.1:{one.getsockname()[1]}"] for job, one in zip(JOBS, sockets, strict=True)}
    for one in sockets:
        one.close()
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.peers.tf_parameter_server",
                json.dumps(options),
                job,
                json.dumps(cluster),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        for job in JOBS
    ]
    return cluster, processes


def main() -> None:
    """Serve training steps, or be one of the two servers."""
    options = settings()
    if len(sys.argv) > 2:
        run_server(sys.argv[2], json.loads(sys.argv[3]), options)
    cluster, processes = start_servers(options)
    try:
        coordinate(cluster, options)
    finally:
        for process in processes:
            process.kill()
            process.wait(30)


def coordinate(cluster: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> None:
    """The coordinator: builds the model, and schedules steps on the worker."""
    keras.utils.set_random_seed(1)
    data = Data(options["data"])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    trainer = Trainer(data, strategy, options["fused"], options.get("jit", False))
    count = options["steps_per_call"]

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def steps(iterator: Any) -> Any:
        # Written out instead of a loop: a loop would run on both machines, and be agreed upon at each turn.
        losses = [trainer.step(*next(iterator)) for _ in range(count)]
        return tf.add_n(losses) / count

    iterator = iter(coordinator.create_per_worker_dataset(dataset_of(data)))

    def run(wanted: int) -> float:
        losses = [coordinator.schedule(steps, args=(iterator,)) for _ in range(wanted // count)]
        coordinator.join()
        return float(np.mean([loss.fetch() for loss in losses]))

    serve(f"TensorFlow {tf.__version__}", run, granularity=count)


if __name__ == "__main__":
    main()
