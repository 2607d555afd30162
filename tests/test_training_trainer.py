"""The Trainer: kinds of models, Keras' losses and metrics to the digit, states."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding import optimizers
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.layers import SparseEmbedding, bind, bind_local
from deeprec_spark.tracing.staleness import Staleness
from deeprec_spark.training.trainer import Trainer
from tests.trainers import DIM, IDS, L, batch, compiled, single, started, two_tasks, users
from tests.training_reference import DenseTable, table_rows


def test_staleness_is_the_updates_between_a_pull_and_its_push() -> None:
    """Of two workers on one store: one pulls, the other steps three times, then the one pushes."""
    store = LocalStore()
    one, other = Trainer(single(), store), Trainer(single(), store)
    for trainer in (one, other):
        trainer.initialize(users([1, 2]))
    prepared = one.prepare(users([1, 2]))
    reply = one.pull(prepared)
    for _ in range(3):
        other.train_step(users([2, 3]))
    one.push(prepared, one.compute(prepared, reply))
    one.train_step(users([4]))
    other.train_empty()
    assert one.staleness == Staleness(steps=2, updates=3, most=3)
    assert other.staleness == Staleness(steps=4)


@pytest.mark.parametrize("weighted", [False, True])
def test_losses_metrics_and_states_are_those_of_keras(weighted: bool) -> None:
    keras.utils.set_random_seed(1)
    ours = compiled(two_tasks(SparseEmbedding(DIM, table="user")))
    trainer = started(ours, batch(0, weighted=weighted))
    table = DenseTable(IDS, DIM)
    theirs = compiled(two_tasks(table))
    table.table.assign(table_rows(trainer.store, "user", IDS))
    for name in ("hidden", "norm", "click", "spend"):
        theirs.get_layer(name).set_weights(ours.get_layer(name).get_weights())

    reset = theirs.reset_metrics
    theirs.reset_metrics = lambda: None  # train_on_batch would begin anew at each batch
    batches = [
        batch(seed, size, weighted) for seed, size in ((1, 32), (2, 32), (3, 16))
    ]  # a short one at the end
    for each in batches:
        trainer.train_step(each)
        expected = theirs.train_on_batch(
            list(each.features.values()), list(each.labels.values()), each.sample_weight, return_dict=True
        )
    found = trainer.metric_results()
    assert found.keys() == expected.keys()
    for name in ("loss", "click_auc", "click_accuracy", "spend_mae"):
        assert found[name] == pytest.approx(float(expected[name]), rel=1e-5), name

    trainer.refresh()
    norm = ours.get_layer("norm").get_weights()
    for our, their in zip(norm, theirs.get_layer("norm").get_weights(), strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-6)
    assert np.abs(norm[2]).max() > 1e-3  # the moving mean has moved
    np.testing.assert_allclose(
        table_rows(trainer.store, "user", IDS), table.table.numpy(), rtol=1e-5, atol=1e-6
    )

    trainer.reset_metrics()
    for each in batches:
        trainer.evaluate_step(each)
    reset()
    for each in batches:
        expected = theirs.test_on_batch(
            list(each.features.values()), list(each.labels.values()), each.sample_weight, return_dict=True
        )
    assert trainer.metric_results()["loss"] == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert trainer.step == 3


def test_class_weights_are_those_of_keras() -> None:
    trainer = started(single(loss="mse", metrics=["mae"]), users([1, 2]), class_weight={0: 3.0, 1: 0.5})
    data = users([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 1, 1, 1, 0, 1])
    theirs = keras.Sequential([keras.Input((), dtype="int64"), DenseTable(IDS, DIM), L.Dense(1)])
    theirs.compile("sgd", "mse", metrics=["mae"])
    theirs.layers[0].table.assign(table_rows(trainer.store, "user", IDS))
    theirs.layers[1].set_weights(trainer.model.layers[1].get_weights())
    trainer.train_step(data)
    expected = theirs.train_on_batch(
        data.features["user"], data.labels["label"], class_weight={0: 3.0, 1: 0.5}, return_dict=True
    )
    assert trainer.metric_results() == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-5)
    np.testing.assert_allclose(
        table_rows(trainer.store, "user", IDS), theirs.layers[0].table.numpy(), rtol=1e-6, atol=1e-7
    )
    with pytest.raises(ValueError, match="not both"):
        trainer.train_step(Batch(data.features, data.labels, np.ones(8, np.float32)))


class Computing(keras.Model):
    """A subclassed model that computes its ids, and reads one layer and one table several times."""

    def __init__(self) -> None:
        super().__init__()
        self.items = SparseEmbedding(DIM, table="item")
        self.bags = SparseEmbedding(DIM, "sum", table="item", padding_value=-1)
        self.crossed = SparseEmbedding(2, table="cross")
        self.cross = L.HashedCrossing(5)
        self.dropout = L.Dropout(0.5)
        self.out = L.Dense(1)

    def call(self, inputs: dict[str, Any], training: bool = False) -> Any:
        user, items = inputs["user"], inputs["items"]
        ragged = tf.RaggedTensor.from_tensor(items, padding=-1)
        vectors = [
            self.items(user * 5 + 3),
            self.bags(items),
            self.bags(ragged),
            self.items(user),
            self.crossed(self.cross((user, items[:, 0]))),
        ]
        return self.out(self.dropout(tf.concat(vectors, -1), training=training))


def test_a_model_may_compute_its_ids() -> None:
    random = np.random.default_rng(0)
    data = Batch(
        {"user": random.integers(0, 9, 16), "items": np.where(random.random((16, 3)) < 0.3, -1, 4)},
        {"label": random.random(16).astype(np.float32)},
    )
    model = Computing()
    model.compile("sgd", "mse")
    trainer = started(model, data)
    for _ in range(30):
        trainer.train_step(data)
    rows = trainer.store.statistics()
    used = {*(data.features["user"] * 5 + 3).tolist(), *data.features["user"].tolist(), 4}
    assert rows["item"]["rows"] == len(used)  # never the padding, each id once
    assert 0 < rows["cross"]["rows"] <= 5
    predicted = trainer.predict_step(data)
    assert list(predicted) == ["output"]
    # The traced step and the layers' own lookup agree once both read the same store.
    bind(model, trainer.store)
    np.testing.assert_allclose(predicted["output"], model(dict(data.features)), rtol=1e-6, atol=1e-6)
    trainer.reset_metrics()
    trainer.evaluate_step(data)
    expected = np.mean((predicted["output"][:, 0] - data.labels["label"]) ** 2)
    assert trainer.metric_results()["loss"] == pytest.approx(expected, rel=1e-5)


def test_nothing_is_traced_again_when_sizes_change() -> None:
    traces = []

    class Counting(L.Layer):
        def call(self, inputs: Any) -> Any:
            traces.append(1)
            return inputs

    user = keras.Input((), dtype="int64", name="user")
    model = keras.Model(user, L.Dense(1)(Counting()(SparseEmbedding(DIM)(user))))
    model.compile("sgd", "mse")
    trainer = started(model, users([1, 2, 3]))
    trainer.train_step(users([1, 2, 3]))
    before = len(traces)
    for size in (1, 5, 64):
        trainer.train_step(users(list(range(size))))
    assert len(traces) == before


def test_sparse_optimizer_and_learning_rate() -> None:
    trainer = started(single(keras.optimizers.SGD(0.0)), users([1]), sparse_optimizer=optimizers.SGD(1.0))
    start = table_rows(trainer.store, "user", 3)
    kernel = trainer.model.layers[1].kernel.numpy()[:, 0]
    trainer.train_step(users([1]))
    gradient = 2 * (start[1] @ kernel - 1) * kernel
    expected = start.copy()
    expected[1] -= gradient
    np.testing.assert_allclose(table_rows(trainer.store, "user", 3), expected, rtol=1e-5, atol=1e-7)
    trainer.set_learning_rate(0.5)  # of the dense weights alone
    trainer.train_step(users([1]))
    trainer.refresh()
    assert np.abs(trainer.model.layers[1].kernel.numpy()[:, 0] - kernel).max() > 0

    followed = started(single(keras.optimizers.SGD(1.0)), users([1]))
    before = table_rows(followed.store, "user", 3)
    followed.set_learning_rate(0.0)
    followed.train_step(users([1]))
    np.testing.assert_array_equal(table_rows(followed.store, "user", 3), before)


def test_a_changing_rate_cannot_reach_tables_of_their_own_optimizer() -> None:
    user = keras.Input((), dtype="int64", name="user")
    layer = SparseEmbedding(DIM, table="user", optimizer=optimizers.SGD(1.0))
    model = keras.Model(user, L.Dense(1)(layer(user)))
    model.compile("sgd", "mse")
    trainer = started(model, users([1]))
    trainer.train_step(users([1]))
    trainer.set_learning_rate(0.5)
    with pytest.raises(ValueError, match=r"optimizer of their own.*'user'"):
        trainer.train_step(users([1]))


def two_tables(*, share: bool = False, **compile_arguments: Any) -> keras.Model:
    """Layers `one`, frozen, and `two`, trainable, over the same ids."""
    user = keras.Input((), dtype="int64", name="user")
    one, two = (SparseEmbedding(DIM, table="user" if share else name, name=name) for name in ("one", "two"))
    one.trainable = False
    model = keras.Model(user, L.Dense(1, kernel_initializer="ones")(L.Add()([one(user), two(user)])))
    model.compile(**{"optimizer": keras.optimizers.Adam(0.1), "loss": "mse", **compile_arguments})
    return model


def test_a_frozen_table_is_only_read() -> None:
    start = started(two_tables(), users([1]))
    start.model.get_layer("one").trainable = True
    filled = Trainer(start.model, start.store)
    filled.initialize(users([1]))
    for _ in range(2):
        filled.train_step(users([1, 2]))
    rows = filled.store.statistics()["one"]["rows"]
    assert rows == 2
    one, two = (table_rows(filled.store, name, 4) for name in ("one", "two"))

    trainer = Trainer(two_tables(), filled.store)
    trainer.initialize(users([1]))
    for ids in ([1, 2], [2, 3], [1]):
        trainer.train_step(users(ids))
    trainer.train_empty()
    np.testing.assert_array_equal(table_rows(trainer.store, "one", 4), one)
    assert trainer.store.statistics()["one"]["rows"] == 2
    assert trainer.store.statistics()["two"]["rows"] == 3
    assert np.all(table_rows(trainer.store, "two", 3)[1:] != two[1:3])
    trainer.model.get_layer("two").trainable = False
    alone = Trainer(trainer.model, trainer.store)
    alone.initialize(users([1]))
    two = table_rows(alone.store, "two", 4)
    alone.train_step(users([1, 2]))
    np.testing.assert_array_equal(table_rows(alone.store, "two", 4), two)
    kernel, _ = alone.dense_vector()
    alone.refresh()
    assert np.any(alone.dense_vector()[0] != kernel)  # the dense weights are trained


def test_a_frozen_table_counts_in_no_norm() -> None:
    trainer = started(two_tables(optimizer=keras.optimizers.SGD(1.0, global_clipnorm=0.5)), users([1]))
    dense, _ = trainer.dense_vector()
    two = table_rows(trainer.store, "two", 2)
    trainer.train_step(users([1], [100.0]))
    trainer.refresh()
    moved = [trainer.dense_vector()[0] - dense, table_rows(trainer.store, "two", 2)[1] - two[1]]
    assert np.linalg.norm(np.concatenate(moved)) == pytest.approx(0.5, rel=1e-4)


def test_a_table_is_not_half_frozen() -> None:
    with pytest.raises(ValueError, match=r"share 'user'.*Received: trainable 'two', frozen 'one'"):
        started(two_tables(share=True), users([1]))


def test_a_frozen_table_in_keras_own_fit() -> None:
    model = two_tables(optimizer="sgd")
    store = bind_local(model, optimizers.SGD(0.1))
    model.fit(np.array([1, 2]), np.ones(2, np.float32), verbose=0)
    assert (store.statistics()["one"]["rows"], store.statistics()["two"]["rows"]) == (0, 2)


def test_outputs_of_half_precision_are_predicted_as_float32() -> None:
    model = keras.Sequential(
        [
            keras.Input((), dtype="int64", name="user"),
            SparseEmbedding(DIM, table="user"),
            L.Dense(1, dtype="mixed_bfloat16", bias_initializer="ones", name="out"),
        ]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    trainer = started(model, users([1]))
    trainer.train_step(users([1, 2]))
    [predicted] = trainer.predict_step(users([1, 2])).values()
    trainer.reset_metrics()
    trainer.evaluate_step(users([1, 2], predicted[:, 0].tolist()))
    assert (predicted.dtype, predicted.shape) == (np.float32, (2, 1))
    assert trainer.metric_results()["mae"] == 0.0


def test_empty_steps_and_batches() -> None:
    trainer = started(single(), users([1]))
    start = table_rows(trainer.store, "user", 3)
    trainer.train_empty()
    trainer.train_step(users([]))
    trainer.evaluate_step(users([]))
    assert trainer.step == 2
    np.testing.assert_array_equal(table_rows(trainer.store, "user", 3), start)
    with pytest.raises(ValueError, match="at least one sample"):
        Trainer(single(), LocalStore()).initialize(users([]))


@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.Adam(0.1), keras.optimizers.AdamW(0.1, weight_decay=0.5)]
)
def test_an_empty_step_moves_no_weight(optimizer: Any) -> None:
    """Neither by what earlier steps left in an optimizer's momenta nor by its weight decay."""
    trainer = started(single(optimizer), users([1]))
    trainer.train_step(users([1, 2]))
    _, dense, _ = trainer.pull_dense()
    dense = dense.copy()
    trainer.train_empty()
    step, after, _ = trainer.pull_dense()
    assert step == 2
    np.testing.assert_array_equal(after, dense)


def test_a_batch_of_padding_alone() -> None:
    items = keras.Input((2,), dtype="int64", name="items")
    pooled = SparseEmbedding(DIM, "mean", table="item", padding_value=-1)(items)
    model = keras.Model(items, L.Dense(1, kernel_initializer="ones")(pooled))
    model.compile("sgd", "mse")
    padding = Batch({"items": np.full((3, 2), -1)}, {"label": np.ones(3, np.float32)})
    trainer = started(model, padding)
    trainer.train_step(padding)
    trainer.evaluate_step(padding)
    assert trainer.store.statistics()["item"]["rows"] == 0
    trainer.refresh()
    assert model.layers[-1].bias.numpy()[0] == pytest.approx(0.02)  # 0.01 * 2 * (1 - 0)


def test_a_second_trainer_goes_on_where_the_store_is() -> None:
    first = started(single(keras.optimizers.Adagrad(0.3)), users([1]))
    for _ in range(3):
        first.train_step(users([1, 2]))
    second = Trainer(single(keras.optimizers.Adagrad(0.3)), first.store)
    second.initialize(users([1]))
    np.testing.assert_array_equal(
        first.predict_step(users([1, 2]))["out"], second.predict_step(users([1, 2]))["out"]
    )
    assert second.step == 3


def test_deterministic_runs_are_equal_bit_for_bit() -> None:
    script_results = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        model = compiled(two_tasks(SparseEmbedding(DIM, table="user")))
        trainer = started(model, batch(0))
        for seed in range(3):
            trainer.train_step(batch(seed))
        _, dense, state = trainer.pull_dense()
        script_results.append((dense.copy(), state.copy(), table_rows(trainer.store, "user", IDS)))
    for one, other in zip(*script_results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_workers_draw_differently_from_equal_models() -> None:
    def outputs(rank: int | None) -> np.ndarray:
        keras.utils.set_random_seed(4)
        user = keras.Input((), dtype="int64", name="user")
        vector = SparseEmbedding(64, table="user")(user)
        model = keras.Model(user, L.Dense(1, kernel_initializer="ones")(L.Dropout(0.5)(vector)))
        model.compile(keras.optimizers.SGD(0.0), "mse")
        trainer = started(model, users([1]))
        if rank is not None:
            trainer.reseed(rank)
        losses = []
        for _ in range(2):
            trainer.reset_metrics()
            trainer.train_step(users([1]))
            losses.append(trainer.metric_results()["loss"])
        return np.array(losses)

    assert np.array_equal(outputs(0), outputs(0))
    assert not np.intersect1d(outputs(0), outputs(1)).size
    assert outputs(0)[0] != outputs(0)[1]  # and from step to step
