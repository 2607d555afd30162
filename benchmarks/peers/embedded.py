"""DLRM on this project's engine, in the process."""

from __future__ import annotations

import keras
import tensorflow as tf

from benchmarks.peers import keras_models
from benchmarks.peers.protocol import LEARNING_RATE, Data, serve, settings
from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.training.trainer import Trainer


def main() -> None:
    """Serve training steps."""
    options = settings()
    tf.config.threading.set_intra_op_parallelism_threads(options["intra"])
    tf.config.threading.set_inter_op_parallelism_threads(options["inter"])
    keras.utils.set_random_seed(1)
    data = Data(options["data"])
    model = keras_models.dlrm(
        len(data.sizes), data.dim, lambda i: SparseEmbedding(data.dim, table=f"c{i}", name=f"embed{i}")
    )
    model.compile(keras.optimizers.Adagrad(LEARNING_RATE), keras.losses.BinaryCrossentropy(from_logits=True))
    batches = [
        Batch(
            {"numbers": data.dense[b], **{f"c{i}": data.ids[b, :, i].copy() for i in range(len(data.sizes))}},
            {"label": data.label[b]},
        )
        for b in range(len(data.label))
    ]
    trainer = Trainer(model, LocalStore())
    trainer.initialize(batches[0])
    order = data.indices()

    def run(steps: int) -> float:
        trainer.reset_metrics()
        for _ in range(steps):
            trainer.train_step(batches[next(order)])
        return trainer.metric_results()["loss"]

    serve(f"tensorflow {tf.__version__}", run)


if __name__ == "__main__":
    main()
