"""How long a save holds the workers of a job with real nodes, against the time that its servers write.

Part of `python -m benchmarks.checkpoint`, which runs this in a process of its own. For each number of servers and
workers, in async and sync mode, `Estimator.fit` begins with the tables of a checkpoint and saves full ones, one after
another, while training goes on; each is one measurement.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peer_process import ROOT
from deeprec_spark.embedding.optimizers import Adagrad
from deeprec_spark.embedding.warm_start import WarmStart
from deeprec_spark.estimator import Estimator, KerasEstimator
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.saving import CheckpointOptions, SaveRecord
from deeprec_spark.session import init_session

SHAPES = ((1, 1), (2, 2))
MODES = ("async", "sync")
EPOCHS = 10_000  # more than any measurement takes
SAMPLES = 400_000
BATCH = 2048


@dataclass(frozen=True)
class NodesSettings:
    """What to measure.

    Arguments:
        tables: the checkpoint that jobs begin with; its tables are called in `names`.
        rows: keys of each table are below this number.
        folder: on the disk to write to.
        saves: measurements for each job, after the first one, which is left out.
    """

    tables: str
    names: tuple[str, ...]
    rows: int
    dim: int
    folder: str
    shapes: tuple[tuple[int, int], ...] = SHAPES
    modes: tuple[str, ...] = MODES
    saves: int = 5


def measure(settings: NodesSettings) -> dict[str, float]:
    """By job, e.g. `pause_ratio_2_2_sync` and `pause_ms_2_2_sync`; those of async mode have no suffix.

    Raises:
        RuntimeError: the process failed; with the end of its log.
    """
    command = [sys.executable, "-m", "benchmarks.checkpoint_nodes", json.dumps(asdict(settings))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3600)
    if done.returncode != 0:
        raise RuntimeError(
            f"The jobs could not be measured. Received: exit code {done.returncode}\n{done.stderr[-3000:]}"
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(saves: Sequence[SaveRecord], servers: int, workers: int, mode: str) -> dict[str, float]:
    """What a job's saves come to: medians."""
    suffix = f"{servers}_{workers}" + ("" if mode == "async" else f"_{mode}")
    return {
        f"pause_ratio_{suffix}": round(median(save.pause / save.write for save in saves), 4),
        f"pause_ms_{suffix}": round(median(save.pause for save in saves) * 1e3, 1),
        f"write_seconds_{suffix}": round(median(save.write for save in saves), 3),
    }


def model_creator(config: dict[str, Any]) -> keras.Model:
    """A small model over the tables."""
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in config["names"]}
    rows = [
        SparseEmbedding(config["dim"], table=name, name=f"{name}_rows")(key) for name, key in inputs.items()
    ]
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()(rows))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(0.001), "binary_crossentropy")
    return model


class EnoughError(Exception):
    """So many saves were made: the fit ends without another one."""


class UntilSaved(keras.callbacks.Callback):
    """Ends a fit once it has saved so many times."""

    def __init__(self, estimator: KerasEstimator, saves: int) -> None:
        super().__init__()
        self._estimator, self._saves = estimator, saves

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Look at what was saved."""
        statistics = self._estimator.statistics
        if statistics is not None and len(statistics.saves) >= self._saves:
            raise EnoughError


def saves_of(spark: Any, settings: NodesSettings, servers: int, workers: int, mode: Any) -> list[SaveRecord]:
    """The saves of one job while it trained, the first one left out."""
    with tempfile.TemporaryDirectory(prefix="model-", dir=settings.folder) as model_dir:
        estimator = Estimator.from_keras(
            model_creator=model_creator,
            config={"names": settings.names, "dim": settings.dim},
            num_ps=servers,
            num_workers=workers,
            mode=mode,
            sparse_optimizer=Adagrad(),
            model_dir=model_dir,
            warm_start=WarmStart(settings.tables, values_only=True, dense=False),
            checkpoints=CheckpointOptions(save_secs=1.0, keep_max=1, on_sigterm=False),
            spark=spark,
        )
        with suppress(EnoughError):
            estimator.fit(
                f"{settings.folder}/samples.parquet",
                epochs=EPOCHS,
                batch_size=BATCH * (workers if mode == "sync" else 1),
                feature_cols=list(settings.names),
                label_cols=["label"],
                callbacks=[UntilSaved(estimator, settings.saves + 1)],
                verbose=0,
            )
        assert estimator.statistics is not None
        return estimator.statistics.saves[1 : settings.saves + 1]


def write_samples(settings: NodesSettings) -> None:
    """Random keys of rows that are there."""
    random = np.random.default_rng(1)
    columns: Mapping[str, Any] = {
        **{name: random.integers(0, settings.rows, SAMPLES) for name in settings.names},
        "label": random.integers(0, 2, SAMPLES).astype(np.int32),
    }
    pq.write_table(pa.table(columns), Path(settings.folder) / "samples.parquet", row_group_size=SAMPLES // 8)


def main() -> None:
    """Measure what the argument says; the last line is the result."""
    given = json.loads(sys.argv[1])
    shapes = tuple((servers, workers) for servers, workers in given.pop("shapes"))
    settings = NodesSettings(
        **{**given, "names": tuple(given["names"]), "modes": tuple(given["modes"])}, shapes=shapes
    )
    write_samples(settings)
    spark = init_session(
        {
            "spark.master": f"local[{max(map(sum, settings.shapes))}]",
            "spark.driver.memory": "1g",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
        }
    )
    found: dict[str, float] = {}
    try:
        for servers, workers in settings.shapes:
            for mode in settings.modes:
                saves = saves_of(spark, settings, servers, workers, mode)
                found.update(summary(saves, servers, workers, mode))
                detail = [f"{save.pause * 1e3:.0f} ms/{save.write:.2f} s" for save in saves]
                print(f"{servers}+{workers} {mode}: {', '.join(detail)}", file=sys.stderr, flush=True)
    finally:
        spark.stop()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    # The creator must have a name that workers can import.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    from benchmarks.checkpoint_nodes import main as imported_main

    imported_main()
