"""This project as its users run it: `Estimator.fit` on Spark, parameter servers and workers in processes of their own.

All options are the defaults. A round is as many epochs as its steps need, read from Parquet; its seconds are those of
the workers' training phases, so that Spark's start, staging and the end of the fit are outside.

Beside those of `benchmarks.peers.protocol` there is one more request, for other nodes in the same Spark session:

request    {"fit": {"data": "batches.npz", "servers": 2, "workers": 2, "mode": "sync"}}
answer     {"ready": true, "version": "…"}
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from benchmarks.peers import keras_models
from benchmarks.peers.protocol import LEARNING_RATE, Data, answer, settings
from deeprec_spark.estimator import Estimator, KerasEstimator
from deeprec_spark.features.spec import Feature, FeatureSpec, Label
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.models.interactions import DotInteraction
from deeprec_spark.runtime import processors
from deeprec_spark.session import init_session
from deeprec_spark.tracing.stages import STAGES
from deeprec_spark.training.pipeline import PipelineOptions

EPOCHS = 1_000_000  # more than any benchmark asks for: the fit ends when standard input closes


def model_creator(config: dict[str, Any]) -> keras.Model:
    """The model of the data in `config`, compiled; runs on the driver and on every worker.

    `config["intra"]` is for workers how many threads split an operation, if not the project's choice.
    """
    if config["intra"] is not None and processors.CORES in os.environ:
        tf.config.threading.set_intra_op_parallelism_threads(config["intra"])
    model = keras_models.build(keras, Data(config["data"]), embedding, DotInteraction())
    model.compile(keras.optimizers.Adagrad(LEARNING_RATE), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def embedding(name: str, dim: int, combiner: str | None) -> Any:
    """The layer of one column, over a table of its own."""
    return SparseEmbedding(dim, combiner, table=name, name=f"{name}_embedding")


def write_parquet(data: Data, path: Path) -> FeatureSpec:
    """The batches as one Parquet file, and what its columns are."""
    columns: dict[str, pa.Array] = {}
    features: list[Feature] = []

    def lists(name: str, array: np.ndarray[Any, Any]) -> None:
        width = array.shape[-1]
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
        columns[name] = pa.ListArray.from_arrays(np.arange(0, len(flat) + 1, width, dtype=np.int32), flat)

    if data.model != "bags":
        lists("numbers", data.dense)
        width = data.dense.shape[-1]
        features.append(Feature(name="numbers", kind="dense", raw_type="float32", width=width))
    for i in range(data.singles):
        columns[f"c{i}"] = pa.array(data.ids[..., i].reshape(-1))
        features.append(Feature(name=f"c{i}", kind="categorical", raw_type="int64"))
    for i in range(data.num_bags):
        lists(f"b{i}", data.bags[:, :, i])
        length = data.bags.shape[-1]
        features.append(Feature(name=f"b{i}", kind="sequence", raw_type="int64", max_length=length))
    columns["label"] = pa.array(data.label.reshape(-1))
    pq.write_table(pa.table(columns), path)
    return FeatureSpec(features=features, labels=[Label(name="label")])


class Rounds(keras.callbacks.Callback):
    """Answers the benchmark's requests with epochs, and holds the fit between them."""

    def __init__(self, requests: Iterator[str], steps: int, version: str) -> None:
        super().__init__()
        self._requests, self._steps, self._version = requests, steps, version
        self._estimator: KerasEstimator | None = None
        self._wanted = self._done = 0
        self._began = 0.0
        self._trained = False
        self._processor: dict[str, float] = {}
        self._staged: dict[str, float] = {}
        self._others = self._clock = 0.0

    def of(self, estimator: KerasEstimator) -> Rounds:
        """Read the seconds of training from this estimator."""
        self._estimator = estimator
        return self

    def on_train_begin(self, logs: Any = None) -> None:
        """The nodes run."""
        answer({"ready": True, "version": self._version})

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Wait for a request, unless one is being worked on."""
        if self._done >= self._wanted:
            line = next(self._requests, None)
            request = {"fit": None} if line is None else json.loads(line)
            if "fit" in request:
                raise StopAskedError(request["fit"])
            self._wanted, self._done, self._began = request["steps"], 0, self._seconds()
            self._processor, self._staged = processor_seconds(), self._stages()
            self._others, self._clock = other_seconds(), time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Answer the request once it is worked off."""
        self._trained = True
        self._done += self._steps
        if self._done >= self._wanted:
            answer(
                {
                    "seconds": self._seconds() - self._began,
                    "steps": self._done,
                    "loss": logs["loss"],
                    "processor": _difference(processor_seconds(), self._processor),
                    "stages": _difference(self._stages(), self._staged),
                    "others": (other_seconds() - self._others) / (time.perf_counter() - self._clock),
                }
            )

    def _stages(self) -> dict[str, float]:
        """Seconds of each stage of a step so far, all workers together."""
        if self._estimator is None or not self._trained:
            return {}
        workers = self._estimator.report().workers
        return {stage: sum(one.stages[stage] for one in workers) for stage in STAGES}

    def _seconds(self) -> float:
        statistics = None if self._estimator is None else self._estimator.statistics
        return 0.0 if statistics is None else statistics.seconds


def processor_seconds() -> dict[str, float]:
    """Processor time of all servers and of all workers that this process has started, by what they are."""
    found = {"server": 0.0, "worker": 0.0}
    for process in psutil.Process().children(recursive=True):
        try:
            command, times = process.cmdline(), process.cpu_times()
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
        if "deeprec_spark.runtime.node" in command:
            found[command[-1].split()[0]] += times.user + times.system
    return found


def other_seconds() -> float:
    """Processor time of all that is not of this process and its descendants, since the machine was started."""
    own = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
        own += times.user + times.system
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system - own)


def _difference(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


class StopAskedError(Exception):
    """The nodes end without a last checkpoint; `settings` of what to train then, None where input is closed."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        super().__init__("the benchmark asked these nodes to end")
        self.settings = settings


def train(
    options: dict[str, Any], path: Path, spec: FeatureSpec, spark: Any, requests: Iterator[str]
) -> dict[str, Any] | None:
    """Serve training steps until told to end; the settings of what comes then.

    Arguments:
        options: `data`, `servers` and `workers`, and what else the estimator is to be told.
        path: the Parquet file with the data.
    """
    data = Data(options["data"])
    mode, placement = options.get("mode", "async"), options.get("placement", "separate")
    version = f"deeprec-spark, {options['servers']} servers, {options['workers']} workers"
    rounds = Rounds(requests, len(data.label), version)
    with tempfile.TemporaryDirectory(prefix="model-", dir=path.parent) as folder:
        estimator = Estimator.from_keras(
            model_creator=model_creator,
            config={"data": options["data"], "intra": options.get("intra")},
            num_ps=options["servers"],
            num_workers=options["workers"],
            mode=mode,
            placement=placement,
            pipeline=PipelineOptions(max_staleness=options.get("staleness"), warmup_updates=0),
            model_dir=folder,
            feature_spec=spec,
            spark=spark,
        )
        try:
            estimator.fit(
                str(path),
                epochs=EPOCHS,
                batch_size=data.label.shape[1] * (options["workers"] if mode == "sync" else 1),
                callbacks=[rounds.of(estimator)],
                verbose=0,
            )
        except StopAskedError as asked:
            return asked.settings
    return None


def main() -> None:
    """Serve training steps."""
    options: dict[str, Any] | None = settings()
    assert options is not None
    # Colocated servers are inside the workers.
    slots = options.get("slots", options["servers"] + options["workers"])
    with tempfile.TemporaryDirectory(prefix="benchmark-nodes-") as folder:
        spark = init_session(
            {
                "spark.master": f"local[{slots}]",
                "spark.driver.memory": "1g",
                "spark.driver.host": "127.0.0.1",
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
                "spark.sql.shuffle.partitions": "2",
            }
        )
        requests = iter(sys.stdin)
        written: dict[str, tuple[Path, FeatureSpec]] = {}
        try:
            while options is not None:
                source = options["data"]
                if source not in written:
                    path = Path(folder) / f"data-{len(written)}.parquet"
                    written[source] = (path, write_parquet(Data(source), path))
                options = train(options, *written[source], spark, requests)
        finally:
            spark.stop()


if __name__ == "__main__":
    # The creator must have a name that workers can import.
    from benchmarks.peers.nodes import main as imported_main

    imported_main()
