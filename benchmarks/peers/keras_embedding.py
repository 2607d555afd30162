"""keras.layers.Embedding, trained by Keras' own `fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.peers import keras_models
from benchmarks.peers.protocol import LEARNING_RATE, Data, serve, settings


def main() -> None:
    """Serve training steps."""
    options = settings()
    tf.config.threading.set_intra_op_parallelism_threads(options["intra"])
    tf.config.threading.set_inter_op_parallelism_threads(options["inter"])
    keras.utils.set_random_seed(1)
    data = Data(options["data"])

    def embedding(name: str, dim: int, combiner: str | None) -> Any:
        table = keras.layers.Embedding(data.sizes[0], dim, name=f"{name}_embedding")
        if combiner is None:
            return table
        return keras.Sequential([table, keras.layers.GlobalAveragePooling1D()])

    model = keras_models.build(keras, data, embedding)
    model.compile(
        keras.optimizers.Adagrad(LEARNING_RATE),
        keras.losses.BinaryCrossentropy(from_logits=True),
        jit_compile=options["jit"],
    )
    inputs = [keras_models.features(data, number) for number in range(len(data.label))]
    columns = {name: np.stack([part[name] for part in inputs]) for name in inputs[0]}
    dataset = tf.data.Dataset.from_tensor_slices((columns, data.label)).repeat().prefetch(2)

    def run(steps: int) -> float:
        # One fit call for each request, as a user writes it; its data is in memory.
        history = model.fit(dataset, epochs=1, steps_per_epoch=steps, verbose=0)
        return float(history.history["loss"][0])

    serve(f"keras {keras.__version__}, tensorflow {tf.__version__}", run)


if __name__ == "__main__":
    main()
