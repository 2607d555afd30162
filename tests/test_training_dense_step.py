"""Micro batches and XLA: another way to compute a step, the same step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from deeprec_spark.data.batch import Batch, Groups
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.layers import ExpandGroups, SparseEmbedding
from deeprec_spark.training.options import DenseStepOptions, TrainerOptions
from deeprec_spark.training.prepared import split_batch
from deeprec_spark.training.trainer import Trainer

L = keras.layers
IDS = 12


def model(optimizer: Any, *, padded: bool = True, computed: bool = True) -> keras.Model:
    """A shared table, another width, a padded bag, ids that the model computes, a regulariser, two outputs."""
    inputs = {
        "user": keras.Input((), dtype="int64", name="user"),
        "item": keras.Input((), dtype="int64", name="item"),
        "seen": keras.Input((3,), dtype="int64", name="seen"),
        "price": keras.Input((1,), name="price"),
    }
    item = SparseEmbedding(4, table="item", name="item_rows")
    seen = SparseEmbedding(4, "mean", table="item", padding_value=-1 if padded else None, name="seen_rows")
    vectors = [item(inputs["item"]), seen(inputs["seen"]), inputs["price"]]
    vectors.append(SparseEmbedding(2, table="user")(inputs["user"]))
    if computed:
        vectors.append(SparseEmbedding(2, table="crossed")(inputs["user"] * 3 + inputs["item"]))
    hidden = L.Dense(5, activation="tanh", kernel_regularizer="l2", name="hidden")(L.Concatenate()(vectors))
    made = keras.Model(
        inputs, [L.Dense(1, activation="sigmoid", name="click")(hidden), L.Dense(1, name="spend")(hidden)]
    )
    made.compile(
        optimizer,
        {"click": "binary_crossentropy", "spend": "mse"},
        metrics={"click": [keras.metrics.AUC(name="auc")]},
    )
    return made


def batch(seed: int, size: int = 30, weighted: bool = False) -> Batch:
    random = np.random.default_rng(seed)
    return Batch(
        {
            "user": random.integers(0, IDS, size),
            "item": random.integers(0, IDS, size),
            "seen": np.where(random.random((size, 3)) < 0.4, -1, random.integers(0, IDS, (size, 3))),
            "price": random.random((size, 1)).astype(np.float32),
        },
        {
            "click": (random.random(size) < 0.4).astype(np.float32),
            "spend": random.normal(0, 1, size).astype(np.float32),
        },
        random.uniform(0.1, 3, size).astype(np.float32) if weighted else None,
    )


def gradients(trainer: Trainer, batches: list[Batch]) -> list[list[Any]]:
    """Per batch: keys and gradients of each table, by key, the dense gradient, checks; each batch is applied."""
    found = []
    for each in batches:
        prepared = trainer.prepare(each)
        result = trainer.compute(prepared, trainer.pull(prepared))
        plan = trainer._recording(training=True).plan
        values = []
        for sparse in plan.split_gradients(prepared.keys, result.row_gradients).values():
            order = np.argsort(sparse.keys)
            values += [sparse.keys[order], np.array(sparse.gradient[order])]
        found.append([*values, np.array(result.dense_gradient), np.array(result.checks)])
        trainer.push(prepared, result)
    return found


def trainer_of(made: keras.Model, sample: Batch, **options: Any) -> Trainer:
    trainer = Trainer(made, LocalStore(), TrainerOptions(dense_step=DenseStepOptions(**options)))
    trainer.initialize(sample)
    return trainer


CLIPPINGS = {"none": {}, "clipnorm": {"clipnorm": 0.01}, "global": {"global_clipnorm": 0.02}}


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_micro_batches_are_those_of_the_whole(clipping: str, weighted: bool) -> None:
    batches = [batch(seed, size, weighted) for seed, size in ((1, 30), (2, 30), (3, 7))]
    runs = {}
    for limit in (None, 8):
        keras.utils.set_random_seed(4)
        trainer = trainer_of(
            model(keras.optimizers.SGD(0.3, **CLIPPINGS[clipping])), batches[0], micro_batch=limit
        )
        runs[limit] = (gradients(trainer, batches), trainer.metric_results())
    (whole, of_whole), (micro, of_micro) = runs[None], runs[8]
    for one, other in zip(whole, micro, strict=True):
        for expected, found in zip(one[:-1], other[:-1], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert np.abs(one[-2]).max() > 1e-3
    assert of_micro.keys() == of_whole.keys()
    for name in ("loss", "click_auc"):  # of the losses of several outputs Keras takes the mean over steps
        assert of_micro[name] == pytest.approx(of_whole[name], rel=1e-5), name


def test_moving_averages_pass_from_part_to_part() -> None:
    inputs = keras.Input((), dtype="int64", name="user")
    x = L.BatchNormalization(momentum=0.5)(SparseEmbedding(4, table="user")(inputs))
    made = keras.Model(inputs, L.Dense(1, name="out")(x))
    made.compile("sgd", "mse")
    data = Batch({"user": np.arange(8)}, {"out": np.ones(8, np.float32)})
    trainer = trainer_of(made, data, micro_batch=4)
    trainer.train_step(data)
    trainer.refresh()
    variance = made.layers[2].moving_variance.numpy()
    # Two updates with momentum 0.5, of tiny variances, from 1.
    np.testing.assert_allclose(variance, 0.25, atol=0.01)


@pytest.mark.parametrize("micro", [None, 10])
def test_xla_computes_the_same(micro: int | None) -> None:
    """The first batch and one of another size are computed without it."""
    batches = [batch(seed, size) for seed, size in ((1, 30), (2, 30), (3, 30), (4, 11))]
    for each in batches:
        np.abs(each.features["seen"], out=each.features["seen"])
    runs = {}
    for xla in (False, True):
        keras.utils.set_random_seed(4)
        made = model(keras.optimizers.SGD(0.3), padded=False, computed=False)
        trainer = trainer_of(made, batches[0], xla=xla, micro_batch=micro)
        runs[xla] = (gradients(trainer, batches), trainer.metric_results())
        compiled = [
            key for program in trainer._train_programs.values() for key in program._functions if key[1]
        ]
        assert bool(compiled) == xla
    for one, other in zip(runs[False][0], runs[True][0], strict=True):
        for expected, found in zip(one, other, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for name, value in runs[False][1].items():
        assert runs[True][1][name] == pytest.approx(value, rel=1e-4), name


def compiles(trainer: Trainer, batches: list[Batch]) -> bool:
    """Whether any of these steps was compiled."""
    for each in batches:
        trainer.train_step(each)
    return any(key[1] for program in trainer._train_programs.values() for key in program._functions)


def test_what_keeps_xla_from_compiling_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = model("sgd", padded=False, computed=False)
    batches = [batch(seed) for seed in (1, 2)]
    for each in batches:
        np.abs(each.features["seen"], out=each.features["seen"])
    assert compiles(trainer_of(made, batches[0], xla=True), batches)
    assert "xla" not in caplog.text
    # Nobody asked for it.
    assert not compiles(trainer_of(model("sgd"), batches[0]), batches)
    assert "xla" not in caplog.text
    assert not compiles(trainer_of(model("sgd"), batches[0], xla=True), batches)
    [text] = [message for message in caplog.messages if "xla" in message]
    assert text.startswith("xla=True has no effect")
    assert "differ in their number of ids, by ids that the model computes (tables ['crossed']). Steps" in text
    caplog.clear()
    seen = keras.Input((3,), dtype="int64", name="seen")
    rows = SparseEmbedding(4, table="item", padding_value=-1)(seen)
    made = keras.Model(seen, L.Dense(1, name="out")(keras.ops.reshape(rows, (-1, 12))))
    made.compile("sgd", "mse")
    batches = [Batch({"seen": np.array([[1, 2, -1], [3, -1, -1]])}, {"out": np.ones(2, np.float32)})] * 2
    assert not compiles(trainer_of(made, batches[0], xla=True), batches)
    [text] = [message for message in caplog.messages if "xla" in message]
    assert "by padded sequences that no combiner sums (columns ['seen']). Steps" in text


def test_xla_with_groups_is_said_to_compile_few_batches(caplog: pytest.LogCaptureFixture) -> None:
    def grouped(*sizes: int) -> Batch:
        items = sum(sizes)
        return Batch(
            {"user": np.arange(len(sizes)), "item": np.arange(items)},
            {"out": np.ones(items, np.float32)},
            groups=Groups(frozenset({"user"}), np.array(sizes)),
            group_index="group_index",
        )

    columns = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    rows = [SparseEmbedding(4, table=name)(column) for name, column in columns.items()]
    made = keras.Model(columns, L.Dense(1, name="out")(L.Concatenate()(rows)))
    made.compile("sgd", "mse")
    trainer = trainer_of(made, grouped(3, 1), xla=True)
    assert not compiles(trainer, [grouped(3, 1), grouped(2, 1), grouped(4, 1)])
    [text] = [message for message in caplog.messages if "xla" in message]
    assert "as the first one (2 groups of 4 samples)" in text
    assert compiles(trainer, [grouped(2, 2)])


def test_groups_stay_whole_in_micro_batches() -> None:
    sizes = np.array([3, 0, 5, 1, 1, 8], np.int64)
    items = int(sizes.sum())
    grouped = Batch(
        {"user": np.arange(6), "item": np.arange(items)},
        {"out": np.linspace(-1, 1, items, dtype=np.float32)},
        groups=Groups(frozenset({"user"}), sizes),
        group_index="group_index",
    )
    parts = split_batch(grouped, 6)
    assert sum(part.size for part in parts) == items
    assert [part.size for part in parts] == [3, 6, 1, 8]
    assert np.concatenate([part.features["item"] for part in parts]).tolist() == list(range(items))
    index = keras.Input((), dtype="int32", name="group_index")
    found = []
    for limit in (None, 6):
        keras.utils.set_random_seed(4)
        columns = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
        user = ExpandGroups()([SparseEmbedding(4, table="user")(columns["user"]), index])
        out = L.Dense(1, name="out")(user * SparseEmbedding(4, table="item")(columns["item"]))
        made = keras.Model({**columns, "group_index": index}, out)
        made.compile("sgd", "mse")
        found.append(gradients(trainer_of(made, grouped, micro_batch=limit), [grouped])[0])
    for expected, value in zip(found[0][:-1], found[1][:-1], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_losses_that_are_no_means_are_refused() -> None:
    made = model("sgd")
    for reduction in ("sum", None):
        made.compile("sgd", {"click": keras.losses.BinaryCrossentropy(reduction=reduction), "spend": "mse"})
        with pytest.raises(ValueError, match=f"reduction={reduction!r}"):
            trainer_of(made, batch(1), micro_batch=4)
    with pytest.raises(ValueError, match="micro_batch=0"):
        DenseStepOptions(micro_batch=0)
