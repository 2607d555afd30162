"""TensorFlow Recommenders Addons: its Keras layer and DynamicEmbeddingOptimizer, in an environment of its own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tensorflow_recommenders_addons as tfra  # type: ignore[import-not-found]  # its own environment

from benchmarks.peers import keras_models
from benchmarks.peers.protocol import LEARNING_RATE, Data, serve, settings

de = tfra.dynamic_embedding


def main() -> None:
    """Serve training steps."""
    options = settings()
    tf.config.threading.set_intra_op_parallelism_threads(options["intra"])
    tf.config.threading.set_inter_op_parallelism_threads(options["inter"])
    keras = tf.keras
    keras.utils.set_random_seed(1)
    data = Data(options["data"])

    def embedding(name: str, dim: int, combiner: str | None) -> Any:
        layer = de.keras.layers.Embedding(
            dim,
            devices=["/CPU:0"],
            initializer=keras.initializers.RandomUniform(-0.05, 0.05),
            init_capacity=data.sizes[0],
            name=f"{name}_embedding",
        )
        if combiner is None:
            return layer
        return lambda ids: keras.layers.GlobalAveragePooling1D()(layer(ids))

    model = keras_models.build(keras, data, embedding)
    optimizer = de.DynamicEmbeddingOptimizer(
        keras.optimizers.Adagrad(LEARNING_RATE, initial_accumulator_value=0.1, epsilon=1e-7)
    )
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function(jit_compile=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def step(inputs: dict[str, Any], label: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(label[:, tf.newaxis], model(inputs, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    batches = [
        (
            {name: tf.constant(array) for name, array in keras_models.features(data, number).items()},
            tf.constant(data.label[number]),
        )
        for number in range(len(data.label))
    ]
    order = data.indices()

    def run(steps: int) -> float:
        losses = [step(*batches[next(order)]) for _ in range(steps)]
        return float(tf.add_n(losses)) / steps

    serve(f"TensorFlow {tf.__version__}, TFRA {tfra.__version__}", run)


if __name__ == "__main__":
    main()
