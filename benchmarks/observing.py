"""What it costs to time the stages of a step, and to keep spans for a trace: `python -m benchmarks.observing`.

The same training step with no clock, with the clock that is always on, and with one that keeps spans, in alternating
rounds in one process: ratios of their throughput, and the time of the clock alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.workloads import Workload
from deeprec_spark.tracing.spans import SpanRing, TraceBounds
from deeprec_spark.tracing.stages import STAGES, StageClock

TRACE = TraceBounds(capacity=1600)


class NoClock(StageClock):
    """Times nothing."""

    def stage(self, name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        """Nothing around the stage."""
        return nullcontext()


CLOCKS: dict[str, Callable[[], StageClock]] = {
    "off": NoClock,
    "split": StageClock,
    "trace": lambda: StageClock(SpanRing(TRACE)),
}


def measure(batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """Samples a second of each variant, and the median of the rounds' ratios to that without a clock."""
    import keras

    from benchmarks.peers import embedded, keras_models
    from benchmarks.peers.protocol import LEARNING_RATE, Data
    from deeprec_spark.data.batch import Batch
    from deeprec_spark.embedding.local_store import LocalStore
    from deeprec_spark.models.interactions import DotInteraction
    from deeprec_spark.training.pipeline import StepPipeline
    from deeprec_spark.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "data.npz")
        Workload(batch=batch, batches=48, ids=1_000_000).write(place)
        data = Data(str(place))
        batches = [
            Batch(keras_models.features(data, number), {"label": data.label[number]})
            for number in range(len(data.label))
        ]
    model = keras_models.build(keras, data, embedded.embedding, DotInteraction())
    model.compile(keras.optimizers.Adagrad(LEARNING_RATE), keras.losses.BinaryCrossentropy(from_logits=True))
    trainer = Trainer(model, LocalStore())
    trainer.initialize(batches[0])
    order = itertools.cycle(batches)
    speeds: dict[str, list[float]] = {name: [] for name in CLOCKS}
    for number in range(rounds + 1):
        # Each variant comes first as often as last.
        names = list(CLOCKS)[number % 3 :] + list(CLOCKS)[: number % 3]
        for name in names:
            pipeline = StepPipeline(trainer, clock=CLOCKS[name]())
            started = time.perf_counter()
            for _ in pipeline.train((next(order), step) for step in range(steps)):
                pass
            if number:  # the first round warms up
                speeds[name].append(batch * steps / (time.perf_counter() - started))
    ratios = {
        name: statistics.median(mine / off for mine, off in zip(speeds[name], speeds["off"], strict=True))
        for name in ("split", "trace")
    }
    return {
        "samples_per_second": {name: round(statistics.median(values)) for name, values in speeds.items()},
        "ratio_to_off": {name: round(value, 4) for name, value in ratios.items()},
    }


def clock_microseconds(make: Callable[[], StageClock], rounds: int = 20_000) -> float:
    """Microseconds that the clock takes for all stages of a step."""
    clock = make()
    started = time.perf_counter()
    for _ in range(rounds):
        for stage in STAGES:
            with clock.stage(stage):
                pass
    return 1e6 * (time.perf_counter() - started) / rounds


def main() -> None:
    """Measure, and print a table and the RESULT line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    result = measure(given.batch, given.rounds, given.steps)
    result["clock_us_per_step"] = {
        name: round(clock_microseconds(CLOCKS[name]), 2) for name in ("split", "trace")
    }
    for name, speed in result["samples_per_second"].items():
        ratio = result["ratio_to_off"].get(name, 1.0)
        print(f"{name:6} {speed:>8,} samples/s  {ratio:.4f} of off")
    print("RESULT", json.dumps({"batch": given.batch, **result}))


if __name__ == "__main__":
    main()
