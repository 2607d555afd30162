"""Samples in groups beside flat ones: `python -m benchmarks.groups`; the last line is `RESULT {json}`.

Data with 20 items a user: on the user's side 9 ids, a history of 50 ids and 20 numbers; on the item's side 5 ids and 5
numbers. Stored as Parquet, read, and trained embedded (batches of equally many samples), flat and in groups in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from deeprec_spark import models
from deeprec_spark.data import Batch, BatchReader, ParquetDataset, ReaderOptions
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.training.pipeline import StepPipeline
from deeprec_spark.training.trainer import Trainer

ITEMS = 20
USER_IDS, HISTORY, USER_NUMBERS, ITEM_IDS, ITEM_NUMBERS = 9, 50, 20, 5, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "dssm": {"user_units": [256, 128, 64], "item_units": [256, 128, 64]},
    "dlrm": {"bottom_units": [256, 64], "top_units": [256, 128]},
    "wdl": {"hidden_units": [256, 128, 64]},
    "din": {"hidden_units": [200, 80]},
}


def spec() -> FeatureSpec:
    """The columns, with their grouping by user."""
    user = [
        Feature(name=f"user{index}", kind=FeatureKind.CATEGORICAL, raw_type="int64", group="user")
        for index in range(USER_IDS)
    ]
    user.append(
        Feature(
            name="history",
            kind=FeatureKind.SEQUENCE,
            raw_type="int64",
            max_length=HISTORY,
            table="item0",
            group="user",
        )
    )
    user += [
        Feature(name=f"u{index}", kind=FeatureKind.DENSE, raw_type="float32", group="user")
        for index in range(USER_NUMBERS)
    ]
    item = [
        Feature(name=f"item{index}", kind=FeatureKind.CATEGORICAL, raw_type="int64", group="item")
        for index in range(ITEM_IDS)
    ]
    item += [
        Feature(name=f"i{index}", kind=FeatureKind.DENSE, raw_type="float32", group="item")
        for index in range(ITEM_NUMBERS)
    ]
    return FeatureSpec(features=(*user, *item), labels=(Label(name="click"),)).grouped(["user0"])


def write(folder: Path, users: int) -> dict[str, Path]:
    """The same samples flat and in groups, as Spark writes them: snappy, dictionaries where they pay."""
    random = np.random.default_rng(3)
    columns = spec()

    def values(feature: Feature, rows: int) -> pa.Array:
        if feature.kind is FeatureKind.DENSE:
            return pa.array(random.lognormal(0, 1, rows).astype(np.float32))
        length = HISTORY if feature.kind is FeatureKind.SEQUENCE else 1
        ids = random.zipf(1.2, rows * length).astype(np.int64) % 1_000_000
        if feature.name == "user0":
            ids = np.arange(rows)
        # Prepared ids are hashes.
        hashed = ids * np.int64(0x5851F42D4C957F2D)
        return _lists(pa.array(hashed), length) if length > 1 else pa.array(hashed)

    group = {feature.name: values(feature, users) for feature in columns.group_features}
    item = {feature.name: values(feature, users * ITEMS) for feature in columns.item_features}
    item["click"] = pa.array((random.random(users * ITEMS) < 0.2).astype(np.float32))
    repeated = pa.array(np.repeat(np.arange(users), ITEMS))
    # Flat data lie as they were logged: the samples of a user are not neighbours.
    logged = pa.array(random.permutation(users * ITEMS))
    tables = {
        "flat": pa.table({**{name: array.take(repeated) for name, array in group.items()}, **item}).take(
            logged
        ),
        "grouped": pa.table({**group, **{name: _lists(array, ITEMS) for name, array in item.items()}}),
    }
    paths = {}
    for kind, table in tables.items():
        paths[kind] = folder / f"{kind}.parquet"
        pq.write_table(table, paths[kind], row_group_size=32_768 if kind == "flat" else 32_768 // ITEMS)
    return paths


def _lists(values: pa.Array, length: int) -> pa.ListArray:
    offsets: npt.NDArray[np.int32] = np.arange(len(values) // length + 1, dtype=np.int32) * length
    return pa.ListArray.from_arrays(pa.array(offsets), values)


@dataclass
class Contestant:
    """One way to store and train, with what it took."""

    kind: str
    path: Path
    batch: int
    trainer: Trainer
    read: list[float]
    train: list[float]

    def batches(self) -> Iterator[tuple[Batch, int]]:
        """All batches of the file, shuffled as training shuffles."""
        rows = self.batch if self.kind == "flat" else self.batch // ITEMS
        reader = BatchReader(spec(), ReaderOptions(rows, shuffle_seed=1))
        dataset = ParquetDataset.scan(str(self.path))
        for number, (batch, _) in enumerate(reader.batches(iter(dataset.ranges))):
            yield batch, number


def measure(model_name: str, batch: int, paths: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Reading and training of all samples, in turns; medians."""
    contestants = []
    for kind, path in paths.items():
        columns = spec() if kind == "grouped" else spec().model_copy(update={"grouping": None})
        keras.utils.set_random_seed(1)
        model = models.create(model_name, columns, embedding_dim=16, **OPTIONS[model_name])
        model.compile(keras.optimizers.Adagrad(0.01), "binary_crossentropy")
        trainer = Trainer(model, LocalStore())
        contestants.append(Contestant(kind, path, batch, trainer, [], []))
        trainer.initialize(next(contestants[-1].batches())[0])
    for turn in range(rounds + 1):
        for each in contestants:
            begin = time.perf_counter()
            for _ in each.batches():
                pass
            middle = time.perf_counter()
            held = list(each.batches())
            samples = sum(part.size for part, _ in held)
            start = time.perf_counter()
            for _ in StepPipeline(each.trainer).train(iter(held)):
                pass
            if turn:  # the first round traces, and meets every id for the first time
                each.read.append((middle - begin) / samples)
                each.train.append((time.perf_counter() - start) / samples)
    found: dict[str, Any] = {}
    for each in contestants:
        found[f"{model_name}_{each.kind}_samples_per_s"] = round(1 / statistics.median(each.train))
        found[f"{each.kind}_read_samples_per_s"] = round(1 / statistics.median(each.read))
    flat, grouped = contestants
    found[f"{model_name}_step_ratio"] = round(
        statistics.median(flat.train) / statistics.median(grouped.train), 2
    )
    found["read_ratio"] = round(statistics.median(flat.read) / statistics.median(grouped.read), 2)
    return found


def main() -> None:
    """Measure and print; the last line is `RESULT {json}`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["dssm", "dlrm", "wdl"], choices=sorted(OPTIONS))
    parser.add_argument("--batch", type=int, default=2000, help="samples of a batch")
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder), arguments.users)
        sizes = {f"{kind}_bytes": path.stat().st_size for kind, path in paths.items()}
        result: dict[str, Any] = {
            "users": arguments.users,
            "items_per_user": ITEMS,
            "batch": arguments.batch,
            **sizes,
            "storage_ratio": round(sizes["flat_bytes"] / sizes["grouped_bytes"], 2),
        }
        for name in arguments.models:
            result |= measure(name, arguments.batch, paths, arguments.rounds)
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")


if __name__ == "__main__":
    main()
