"""This project's engine and training step, in the process."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.peers import keras_models
from benchmarks.peers.protocol import LEARNING_RATE, Data, serve, settings
from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.models.interactions import DotInteraction
from deeprec_spark.training.pipeline import PipelineOptions, StepPipeline
from deeprec_spark.training.trainer import Trainer


def main() -> None:
    """Serve training steps."""
    options = settings()
    tf.config.threading.set_intra_op_parallelism_threads(options["intra"])
    tf.config.threading.set_inter_op_parallelism_threads(options["inter"])
    keras.utils.set_random_seed(1)
    data = Data(options["data"])
    batches = [
        Batch(keras_models.features(data, number), {"label": data.label[number]})
        for number in range(len(data.label))
    ]
    model = keras_models.build(keras, data, embedding, DotInteraction())
    model.compile(keras.optimizers.Adagrad(LEARNING_RATE), keras.losses.BinaryCrossentropy(from_logits=True))
    trainer = Trainer(model, LocalStore())
    trainer.initialize(batches[0])
    pipeline = StepPipeline(trainer, PipelineOptions(depth=2, max_staleness=options["staleness"]))
    order = data.indices()

    def run(steps: int) -> float:
        trainer.reset_metrics()
        for _ in pipeline.train((batches[next(order)], step) for step in range(steps)):
            pass
        return trainer.metric_results()["loss"]

    serve(f"tensorflow {tf.__version__}", run)


def embedding(name: str, dim: int, combiner: str | None) -> Any:
    """The layer of one column, over a table of its own."""
    return SparseEmbedding(dim, combiner, table=name, name=f"{name}_embedding")


if __name__ == "__main__":
    main()
