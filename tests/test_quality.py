"""Embedded training reaches what keras.layers.Embedding reaches, on real data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest

from deeprec_spark.data import Batch, BatchReader, ParquetDataset, ReaderOptions
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.store import EmbeddingStore
from deeprec_spark.estimator_options import EstimatorOptions
from deeprec_spark.features.criteo import criteo_spec
from deeprec_spark.features.movielens import prepare_movielens
from deeprec_spark.features.planted import planted_rows
from deeprec_spark.features.spec import FeatureKind, FeatureSpec
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.models import registry
from deeprec_spark.runtime.channel_server import ChannelServer
from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions
from deeprec_spark.runtime.server import ParameterServer, ServerOptions
from deeprec_spark.runtime.store_messages import WireType
from deeprec_spark.training.options import DenseStepOptions, TrainerOptions
from deeprec_spark.training.pipeline import PipelineOptions, StepPipeline
from deeprec_spark.training.trainer import Trainer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)

EPOCHS = 4
BATCH_SIZE = 256


class DenseTable(keras.layers.Layer):
    """What a SparseEmbedding of a deepfm computes, on keras.layers.Embedding: ids are 0 to rows - 1."""

    def __init__(self, rows: int, peer: SparseEmbedding) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(rows, peer.embedding_dim)
        self.mean = peer.combiner is not None

    def call(self, ids: Any) -> Any:
        vectors = self.embedding(keras.ops.maximum(ids, 0))
        if not self.mean:
            return vectors
        known = keras.ops.expand_dims(keras.ops.cast(ids >= 0, "float32"), -1)
        return keras.ops.sum(vectors * known, 1) / keras.ops.maximum(keras.ops.sum(known, 1), 1.0)


def load(location: Path, spec: FeatureSpec) -> Batch:
    dataset = ParquetDataset.scan(str(location))
    reader = BatchReader(spec, ReaderOptions(dataset.num_rows))
    [(batch, _)] = reader.batches(iter(dataset.ranges))
    return batch


def reindexed(train: Batch, test: Batch, spec: FeatureSpec) -> tuple[Batch, Batch, dict[str, int]]:
    """The same data with the ids of each feature numbered from 0, which keras.layers.Embedding needs."""
    rows: dict[str, int] = {}
    columns: dict[str, list[Any]] = {}
    for feature in spec.features:
        parts = [batch.features[feature.name] for batch in (train, test)]
        if feature.kind is not FeatureKind.DENSE:
            ids = np.concatenate([part.reshape(-1) for part in parts])
            known = np.unique(ids[ids != feature.padding_value])
            rows[feature.table_name] = len(known)
            parts = [
                np.where(part == feature.padding_value, -1, np.searchsorted(known, part)) for part in parts
            ]
        columns[feature.name] = parts
    made = [
        Batch({name: parts[side] for name, parts in columns.items()}, batch.labels)
        for side, batch in enumerate((train, test))
    ]
    return made[0], made[1], rows


def auc(labels: Any, scores: Any) -> float:
    """Exact, by ranks; ties count half."""
    scores = np.asarray(scores).reshape(-1)
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = np.asarray(labels) > 0.5
    n, m = positive.sum(), (~positive).sum()
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy")
    return model


def scores(
    model: keras.Model,
    store: EmbeddingStore,
    options: PipelineOptions,
    train: Batch,
    test: Batch,
    dense_step: DenseStepOptions | None = None,
    epochs: int = EPOCHS,
) -> Any:
    """What the model says of the test rows after its epochs on the training rows."""
    trainer = Trainer(model, store, TrainerOptions(dense_step=dense_step or DenseStepOptions()))
    trainer.initialize(
        Batch({k: v[:2] for k, v in train.features.items()}, {k: v[:2] for k, v in train.labels.items()})
    )
    pipeline = StepPipeline(trainer, options)
    for _ in pipeline.train(batches(train, epochs)):
        pass
    assert (pipeline.stale_pulls > 0) is bool(options.max_staleness)
    side_by_side = trainer.overlaps(trainer.prepare(next(batches(train, 1))[0]))
    assert side_by_side is (trainer.options.dense_step == DenseStepOptions())
    [found] = trainer.predict_step(test).values()
    return found


def batches(train: Batch, epochs: int, size: int = BATCH_SIZE) -> Iterator[tuple[Batch, int]]:
    """The steps of all epochs."""
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(train.size)
        for start in range(0, train.size, size):
            chosen = order[start : start + size]
            batch = Batch(
                {name: array[chosen] for name, array in train.features.items()},
                {name: array[chosen] for name, array in train.labels.items()},
            )
            yield batch, epoch


@pytest.fixture(scope="module")
def movielens(
    spark: SparkSession, test_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FeatureSpec, Path]:
    """The prepared data."""
    folder = tmp_path_factory.mktemp("movielens")
    return prepare_movielens(spark, str(test_data / "ml-100k"), str(folder)), folder


@contextmanager
def served(wire_dtype: WireType) -> Iterator[RemoteStore]:
    """The store of a worker with one server."""
    server = ChannelServer(
        ParameterServer(LocalStore(), ServerOptions(1, 1)).handlers(), host="127.0.0.1", token="token"
    )
    store = RemoteStore([server.address], RemoteStoreOptions("token", rank=1, wire_dtype=wire_dtype))
    try:
        yield store
    finally:
        store.close()
        server.stop()


def generated(first: int, rows: int) -> Batch:
    """Criteo-like rows with a planted truth; ids are ranks, and -1 is no id."""
    made = planted_rows(np.arange(first, first + rows), seed=2)
    spec = criteo_spec()
    dense = np.log1p(np.maximum(np.nan_to_num(made.dense), 0)).astype(np.float32)
    columns = [*dense.T, *made.ranks.T]
    features = {
        feature.name: np.ascontiguousarray(column)
        for feature, column in zip(spec.features, columns, strict=True)
    }
    return Batch(features, {spec.label_names[0]: made.label.astype(np.float32)})


AHEAD = EstimatorOptions(num_ps=1).pipeline_options  # what a job does by itself
FASTER = {
    # Two steps at once, each on rows that the other has not changed yet.
    "side by side": DenseStepOptions(),
    "compiled, in parts": DenseStepOptions(xla=True, micro_batch=128),
}


@pytest.mark.parametrize(
    ("data", "way"),
    [("movielens", "side by side"), ("generated", "side by side"), ("generated", "compiled, in parts")],
)
def test_what_makes_training_faster_costs_no_quality(
    data: str, way: str, request: pytest.FixtureRequest
) -> None:
    """With bfloat16 on the wire, beside one step after another without a server; trained until it gains no more."""
    if data == "movielens":
        spec, folder = request.getfixturevalue("movielens")
        train, test = load(folder / "train", spec), load(folder / "test", spec)
        name, units, epochs = "deepfm", {"hidden_units": (64, 32)}, EPOCHS
    else:
        spec, train, test = criteo_spec(), generated(0, 60_000), generated(60_000, 40_000)
        name, units, epochs = "dlrm", {"bottom_units": (32, 16), "top_units": (32,)}, 3

    def trained(store: EmbeddingStore, pipeline: PipelineOptions, dense_step: DenseStepOptions) -> float:
        keras.utils.set_random_seed(1)
        model = compiled(registry.create(name, spec, embedding_dim=16, **units))
        found = scores(model, store, pipeline, train, test, dense_step, epochs)
        return auc(test.labels[spec.label_names[0]], found)

    plain = trained(LocalStore(), PipelineOptions(0), DenseStepOptions())
    assert plain > 0.77
    with served("bfloat16") as store:
        faster = trained(store, AHEAD, FASTER[way])
    assert abs(faster - plain) < 0.003, (faster, plain)


def grouped_batches(data: Batch, size: int, epochs: int) -> Iterator[tuple[Batch, int]]:
    """The steps of all epochs, of about so many samples: groups in another order each time."""
    assert data.groups is not None
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(data.rows)
        ends = np.cumsum(data.groups.sizes[order])
        for chosen in np.split(order, np.searchsorted(ends, np.arange(size, ends[-1], size))):
            if len(chosen):
                yield data.take(chosen), epoch


def test_groups_cost_no_quality(
    movielens: tuple[FeatureSpec, Path], spark: SparkSession, test_data: Path, tmp_path: Path
) -> None:
    """Users once for all their ratings, beside the same ratings in the same steps, each with its user."""
    spec, _ = movielens
    grouped_spec = prepare_movielens(spark, str(test_data / "ml-100k"), str(tmp_path), group_by=["user"])
    train, test = load(tmp_path / "train", grouped_spec), load(tmp_path / "test", grouped_spec)

    def trained(spec: FeatureSpec, of: Callable[[Batch], Batch]) -> float:
        keras.utils.set_random_seed(1)
        model = compiled(registry.create("deepfm", spec, embedding_dim=16, hidden_units=(64, 32)))
        trainer = Trainer(model, LocalStore())
        trainer.initialize(of(train.slice(0, 2)))
        for _ in StepPipeline(trainer).train(
            (of(step), epoch) for step, epoch in grouped_batches(train, 4 * BATCH_SIZE, EPOCHS)
        ):
            pass
        [found] = trainer.predict_step(of(test)).values()
        return auc(test.labels[spec.label_names[0]], found)

    flat, grouped = trained(spec, Batch.flat), trained(grouped_spec, lambda batch: batch)
    assert flat > 0.74
    assert abs(grouped - flat) < 0.003, (grouped, flat)


def test_deepfm_on_movielens_equals_keras(movielens: tuple[FeatureSpec, Path]) -> None:
    spec, folder = movielens
    train, test, rows = reindexed(load(folder / "train", spec), load(folder / "test", spec), spec)
    labels = test.labels[spec.label_names[0]]

    keras.utils.set_random_seed(1)
    options = {"embedding_dim": 16, "hidden_units": (64, 32)}
    sparse = compiled(registry.create("deepfm", spec, **options))

    def replace(layer: keras.layers.Layer) -> keras.layers.Layer:
        if isinstance(layer, SparseEmbedding):
            return DenseTable(rows[layer.table.removesuffix(".linear")], layer)
        return layer.__class__.from_config(layer.get_config())

    dense = compiled(keras.models.clone_model(sparse, clone_function=replace))
    assert dense.count_params() > sum(rows.values()) * 17

    ours = scores(sparse, LocalStore(), PipelineOptions(0), train, test)

    dense.fit(
        dict(train.features),
        train.labels[spec.label_names[0]],
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        verbose=0,
    )
    theirs = dense.predict(dict(test.features), batch_size=4096, verbose=0)

    ours_auc, theirs_auc = auc(labels, ours), auc(labels, theirs)
    assert ours_auc >= 0.775
    assert abs(ours_auc - theirs_auc) < 0.005
