"""BigDL Orca 2.4.0's own `backend="spark"`: Keras 2 embeddings under MultiWorkerMirroredStrategy in a Spark task.

In an environment of its own, with three repairs that let it run on this Python and TensorFlow: legacy Keras, the name
of a TensorFlow module that was renamed, and a PYTHONHOME that does not break virtual environments.

The worker asks this process for leave before each epoch, over a socket, and tells how long the epoch took.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

# Before TensorFlow is imported, here and in Spark's Python workers.
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf

if "tensorflow.python.distribute.distribution_strategy_context" not in sys.modules:
    # Orca imports the module by the name that it had before TensorFlow 2.14, and asks it for the strategy only.
    _renamed: Any = types.ModuleType("tensorflow.python.distribute.distribution_strategy_context")
    _renamed.get_strategy = tf.distribute.get_strategy
    sys.modules[_renamed.__name__] = _renamed

from benchmarks.peers import keras_models
from benchmarks.peers.protocol import LEARNING_RATE, Data, answer, settings

EPOCHS = 1_000_000


def model_creator(config: dict[str, Any]) -> Any:
    """The model of the data in `config`, compiled."""
    keras = tf.keras
    data = Data(config["data"])

    def embedding(name: str, dim: int, combiner: str | None) -> Any:
        table = keras.layers.Embedding(data.sizes[0], dim, name=f"{name}_embedding")
        if combiner is None:
            return table
        return keras.Sequential([table, keras.layers.GlobalAveragePooling1D()])

    model = keras_models.build(keras, data, embedding)
    optimizers = keras.optimizers.legacy if config["legacy"] else keras.optimizers
    model.compile(
        optimizers.Adagrad(LEARNING_RATE, initial_accumulator_value=0.1, epsilon=1e-7),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def data_creator(config: dict[str, Any], batch_size: int) -> Any:
    """The batches, in memory, over and over."""
    data = Data(config["data"])
    inputs = [keras_models.features(data, number) for number in range(len(data.label))]
    columns = {name: tf.stack([part[name] for part in inputs]) for name in inputs[0]}
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = tf.data.Dataset.from_tensor_slices((columns, data.label[..., None]))
    return dataset.with_options(options).repeat().prefetch(2)


class Rounds(tf.keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow ships no types
    """In the worker: asks for leave before each epoch, and tells its seconds and loss."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port

    def on_train_begin(self, logs: Any = None) -> None:
        """Connect to the peer's main process."""
        self._stream = socket.create_connection(("127.0.0.1", self.port)).makefile("rw")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Wait for leave; the other end is closed when there will be none, and then the process ends."""
        if not self._stream.readline():
            os._exit(1)  # an error would leave this process waiting for its collective operations
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tell what the epoch took."""
        seconds = time.perf_counter() - self._start
        self._stream.write(json.dumps({"seconds": seconds, "loss": float(logs["loss"])}) + "\n")
        self._stream.flush()


def answer_requests(listener: socket.socket, steps: int, version: str) -> None:
    """Answer the benchmark's requests by epochs of the worker, until standard input closes; then end the process."""
    connection, _ = listener.accept()
    stream = connection.makefile("rw")
    answer({"ready": True, "version": version})
    for line in sys.stdin:
        wanted, done, seconds, loss = json.loads(line)["steps"], 0, 0.0, 0.0
        while done < wanted:
            stream.write("go\n")
            stream.flush()
            told = json.loads(stream.readline())
            done, seconds, loss = done + steps, seconds + told["seconds"], told["loss"]
        answer({"seconds": seconds, "steps": done, "loss": loss})
    connection.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Serve training steps."""
    options = settings()
    root, packages = Path(__file__).resolve().parents[2], Path(tf.__file__).parents[1]
    # Orca would set PYTHONHOME to the virtual environment, where there is no standard library.
    os.environ["PYTHONHOME"] = sys.base_prefix
    os.environ["PYTHONPATH"] = f"{root}:{packages}"
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    folder = tempfile.mkdtemp(prefix="benchmark-orca-")
    os.chdir(folder)  # Orca writes a log where it is imported
    from bigdl.orca import init_orca_context, stop_orca_context
    from bigdl.orca.learn.tf2 import Estimator

    steps = len(Data(options["data"]).label)
    batch = Data(options["data"]).label.shape[1]
    listener = socket.create_server(("127.0.0.1", 0))
    version = f"BigDL Orca 2.4.0, TensorFlow {tf.__version__}, tf_keras"
    server = threading.Thread(target=answer_requests, args=(listener, steps, version), daemon=True)
    init_orca_context(
        cluster_mode="local",
        cores=2,
        memory="2g",
        conf={
            "spark.python.worker.reuse": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
        },
    )
    server.start()
    estimator = Estimator.from_keras(
        model_creator=model_creator,
        config={
            "data": options["data"],
            "legacy": options["legacy"],
            "intra_op_parallelism": options["intra"],
            "inter_op_parallelism": options["inter"],
        },
        backend="spark",
        log_to_driver=False,
    )
    try:
        estimator.fit(
            data_creator,
            epochs=EPOCHS,
            batch_size=batch,
            steps_per_epoch=steps,
            verbose=0,
            callbacks=[Rounds(listener.getsockname()[1])],
        )
    except Exception:
        # The worker ends without a word when the benchmark is over; anything else is an error.
        server.join(5)
        if server.is_alive():
            raise
    stop_orca_context()
    shutil.rmtree(folder)


if __name__ == "__main__":
    # Spark's workers must find the creators by name.
    from benchmarks.peers.orca import main as imported_main

    imported_main()
