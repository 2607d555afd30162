"""Ways to compute the dense part of a step, in turns: `python -m benchmarks.dense_step --batch 2048`.

The benchmarks' DLRM (Criteo-like data), embedded, with XLA, in micro batches, with a single-threaded executor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
from tensorflow.python.eager import context

from benchmarks.peers import keras_models
from benchmarks.peers.embedded import embedding
from benchmarks.peers.protocol import LEARNING_RATE, Data
from benchmarks.workloads import workload
from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.models.interactions import DotInteraction
from deeprec_spark.training.options import DenseStepOptions, TrainerOptions
from deeprec_spark.training.pipeline import PipelineOptions, StepPipeline
from deeprec_spark.training.trainer import Trainer

WAYS: dict[str, tuple[DenseStepOptions, str]] = {
    "plain": (DenseStepOptions(), ""),
    "xla": (DenseStepOptions(xla=True), ""),
    "micro_batch": (DenseStepOptions(micro_batch=512), ""),
    "inline": (DenseStepOptions(), "SINGLE_THREADED_EXECUTOR"),
}


def measure(batch: int, ways: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Samples/s of each way, medians over the rounds."""
    chosen = workload("dlrm", batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        chosen.write(path)
        data = Data(str(path))
    batches = [
        Batch(keras_models.features(data, number), {"label": data.label[number]})
        for number in range(len(data.label))
    ]
    trainers = {}
    for way in ways:
        keras.utils.set_random_seed(1)
        model = keras_models.build(keras, data, embedding, DotInteraction())
        model.compile(
            keras.optimizers.Adagrad(LEARNING_RATE), keras.losses.BinaryCrossentropy(from_logits=True)
        )
        trainers[way] = Trainer(model, LocalStore(), TrainerOptions(dense_step=WAYS[way][0]))
        trainers[way].initialize(batches[0])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses = {}
    for turn in range(rounds + 1):
        for way in ways:
            pipeline = StepPipeline(trainers[way], PipelineOptions(depth=2))
            stream = ((batches[(turn * steps + step) % len(batches)], step) for step in range(steps))
            trainers[way].reset_metrics()
            begin = time.perf_counter()
            with context.function_executor_type(WAYS[way][1] or None):
                for _ in pipeline.train(stream):
                    pass
            if turn:  # the first round traces and compiles
                seconds[way].append(time.perf_counter() - begin)
            losses[way] = trainers[way].metric_results()["loss"]
    found = {way: round(steps * batch / statistics.median(times)) for way, times in seconds.items()}
    return {
        "batch": batch,
        **{f"{way}_samples_per_s": value for way, value in found.items()},
        **{f"{way}_vs_plain": round(value / found["plain"], 3) for way, value in found.items()},
        "losses": {way: round(loss, 5) for way, loss in losses.items()},
    }


def main() -> None:
    """Measure and print; the last line is `RESULT {json}`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    result = measure(arguments.batch, arguments.ways, arguments.rounds, arguments.steps)
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")


if __name__ == "__main__":
    main()
