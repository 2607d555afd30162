"""SparseEmbedding: shapes and values of every kind of ids, contexts, configuration, errors."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark.embedding import optimizers
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.options import (
    Constant,
    CounterFilter,
    EmbeddingVariableOption,
    InitializerOption,
    Normal,
)
from deeprec_spark.embedding.store import PullRequest, UniqueKeys
from deeprec_spark.layers import SparseEmbedding, bind, bind_local, context

DIM = 3
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def rows_of(layer: SparseEmbedding, ids: list[int]) -> np.ndarray:
    """The layer's rows, read from a store of our own: initial values are a function of seed and key alone."""
    store = LocalStore()
    store.create_tables([layer.table_spec()])
    keys = np.array(sorted(set(ids)), np.int64)
    request = PullRequest({layer.table: UniqueKeys(keys, np.ones_like(keys))}, train=False, dense=False)
    rows = dict(zip(keys.tolist(), store.pull(request).rows[layer.table], strict=True))
    return np.array([rows[key] for key in ids])


def combined(rows: np.ndarray, weights: np.ndarray, combiner: str) -> np.ndarray:
    total = (rows * weights[:, None]).sum(0)
    if combiner == "mean":
        total = total / weights.sum()
    elif combiner == "sqrtn":
        total = total / np.sqrt((weights**2).sum())
    return total


def test_single_ids_of_any_int64() -> None:
    layer = SparseEmbedding(DIM, name="user")
    ids = [0, -1, INT64_MIN, INT64_MAX, 7, -1]
    output = layer(np.array(ids))
    assert output.shape == (6, DIM)
    np.testing.assert_array_equal(output, rows_of(layer, ids))
    assert len({tuple(row) for row in output.numpy().tolist()}) == 5  # -1 twice
    np.testing.assert_array_equal(layer(np.array(ids, np.int64)), output)  # the same id, the same row


def test_narrow_integers_and_lists_are_widened() -> None:
    layer = SparseEmbedding(DIM)
    np.testing.assert_array_equal(layer(np.array([3, 4], np.int16)), rows_of(layer, [3, 4]))
    np.testing.assert_array_equal(layer(tf.constant([3], tf.uint8)), rows_of(layer, [3]))


def test_lists_without_a_combiner_keep_their_shape() -> None:
    layer = SparseEmbedding(DIM)
    output = layer(np.array([[[1, 2], [3, 4]]]))
    assert output.shape == (1, 2, 2, DIM)
    np.testing.assert_array_equal(output.numpy().reshape(-1, DIM), rows_of(layer, [1, 2, 3, 4]))


def test_padded_places_are_zero_and_masked() -> None:
    layer = SparseEmbedding(DIM, padding_value=0)
    output = layer(np.array([[5, 0, 6], [0, 0, 0]]))
    expected = np.zeros((2, 3, DIM), np.float32)
    expected[0, [0, 2]] = rows_of(layer, [5, 6])
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(
        layer.compute_mask(tf.constant([[5, 0], [0, 0]])), [[True, False], [False, False]]
    )
    assert not layer(np.array([0])).numpy().any()  # a padded single id


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["padded", "ragged", "full"])
def test_combiners(combiner: str, weighted: bool, form: str) -> None:
    bags = [[7, 8, 8], [], [9, 7, -5], []]  # an empty bag in the middle, and one at the end
    if form == "full":
        bags = [[7, 8, 8], [1, 1, 1]]
    weights = (
        [[0.5, 2.0, 1.5], [], [1.0, 3.0, 0.25], []] if form != "full" else [[0.5, 2.0, 1.5], [1.0, 2.0, 3.0]]
    )
    layer = SparseEmbedding(DIM, combiner, padding_value=-1 if form == "padded" else None)
    if form == "ragged":
        ids, values = tf.ragged.constant(bags, dtype=tf.int64), tf.ragged.constant(weights, dtype=tf.float32)
    else:
        ids = tf.constant([(bag + [-1] * 3)[:3] for bag in bags], tf.int64)
        values = tf.constant(
            [(bag + [99.0] * 3)[:3] for bag in weights]
        )  # a padded id's weight has no effect
    output = layer(ids, weights=values if weighted else None)
    expected = np.zeros((len(bags), DIM))
    for position, (bag, weight) in enumerate(zip(bags, weights, strict=True)):
        if bag:
            weight_of = np.array(weight if weighted else [1.0] * len(bag))
            expected[position] = combined(rows_of(layer, bag), weight_of, combiner)
    assert output.shape == expected.shape
    np.testing.assert_allclose(output, expected, rtol=1e-6, atol=1e-8)


def test_ragged_without_a_combiner_stays_ragged() -> None:
    layer = SparseEmbedding(DIM, padding_value=0)
    output = layer(tf.ragged.constant([[4, 0], [], [5]], dtype=tf.int64))
    assert isinstance(output, tf.RaggedTensor)
    assert output.row_lengths().numpy().tolist() == [1, 0, 1]
    np.testing.assert_array_equal(output.flat_values, rows_of(layer, [4, 5]))


@pytest.mark.parametrize("combiner", [None, "sum", "mean", "sqrtn"])
def test_empty_batches(combiner: str | None) -> None:
    layer = SparseEmbedding(DIM, combiner, padding_value=-1)
    outer = (0, 4) if combiner is None else (0,)
    assert layer(np.empty((0, 4), np.int64)).shape == (*outer, DIM)
    assert layer(np.empty(0, np.int64)).shape == (0, DIM)
    no_places = layer(np.empty((2, 0), np.int64)).numpy()
    assert no_places.shape == ((2, 0, DIM) if combiner is None else (2, DIM))
    assert not no_places.any()


@pytest.mark.parametrize(
    ("combiner", "ids", "expected"),
    [
        (None, (None,), (None, DIM)),
        (None, (None, 5), (None, 5, DIM)),
        ("sum", (None, 5), (None, DIM)),
        ("mean", (None,), (None, DIM)),
        ("sqrtn", (None, 2, None), (None, 2, DIM)),
    ],
)
def test_output_shape(
    combiner: str | None, ids: tuple[int | None, ...], expected: tuple[int | None, ...]
) -> None:
    layer = SparseEmbedding(DIM, combiner)
    assert layer.compute_output_shape(ids) == expected
    assert layer(keras.Input(ids[1:], dtype="int64")).shape == expected
    concrete = np.zeros([4 if side is None else side for side in ids], np.int64)
    assert len(layer(concrete).shape) == len(expected)


def test_ragged_inputs_of_a_functional_model() -> None:
    ids = keras.Input((None,), dtype="int64", ragged=True)
    weights = keras.Input((None,), ragged=True)
    layer = SparseEmbedding(DIM, "sum")
    model = keras.Model([ids, weights], layer(ids, weights=weights))
    output = model(
        [
            tf.ragged.constant([[1, 2], []], dtype=tf.int64),
            tf.ragged.constant([[2.0, 1.0], []], dtype=tf.float32),
        ]
    )
    first, second = rows_of(layer, [1, 2])
    np.testing.assert_allclose(output, [2 * first + second, np.zeros(DIM)], rtol=1e-6)


def test_config_round_trip() -> None:
    option = EmbeddingVariableOption(
        filter_option=CounterFilter(3), init_option=InitializerOption(Normal(0.5, 0.1), 0.25)
    )
    layer = SparseEmbedding(
        8,
        "mean",
        table="items",
        ev_option=option,
        padding_value=-7,
        seed=11,
        optimizer=optimizers.Adagrad(0.3),
        name="embed",
    )
    config = json.loads(json.dumps(layer.get_config()))
    again = SparseEmbedding.from_config(config)
    assert again.get_config() == layer.get_config()
    assert again.table_spec() == layer.table_spec()
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Dense(1)])
    reloaded = keras.models.model_from_json(model.to_json())
    assert reloaded.layers[0].table_spec() == layer.table_spec()


def test_mixed_precision_casts_the_rows() -> None:
    layer = SparseEmbedding(DIM, "mean", dtype="mixed_bfloat16")
    assert layer(np.array([[1, 2]])).dtype == tf.bfloat16


def test_layers_bound_to_a_store_read_it() -> None:
    layer = SparseEmbedding(
        2, table="items", ev_option=EmbeddingVariableOption(init_option=InitializerOption(Constant(4.0)))
    )
    store = LocalStore()
    store.create_tables([layer.table_spec()])
    model = keras.Sequential([keras.Input((), dtype="int64"), layer])
    bind(model, store)
    np.testing.assert_array_equal(model.predict(np.array([1, 2]), verbose=0), np.full((2, 2), 4.0))
    assert len(store.statistics()["items"]) > 0
    assert store.statistics()["items"]["rows"] == 0  # reading makes no row


def test_frozen_context_reads_exported_tables() -> None:
    class Table:
        def lookup(self, ids: tf.Tensor) -> tf.Tensor:
            return tf.cast(tf.stack([ids, ids + 1], 1), tf.float32)

    layer = SparseEmbedding(2, "sum", table="items", padding_value=0)
    with context.use(context.FrozenContext({"items": Table()})):
        np.testing.assert_array_equal(layer(np.array([[3, 4], [5, 0]])), [[7, 9], [5, 6]])
    other = SparseEmbedding(2, table="users", name="other")
    with (
        context.use(context.FrozenContext({"items": Table()})),
        pytest.raises(KeyError, match=r"'other'.*table='users'.*\['items'\]"),
    ):
        other(np.array([1]))


def test_keras_fit_trains_the_tables_of_a_bound_model() -> None:
    # Two layers share a table; id 1 stands for three samples of the first and one of the second.
    first, second = SparseEmbedding(1, table="t"), SparseEmbedding(1, table="t")
    inputs = [keras.Input((), dtype="int64"), keras.Input((), dtype="int64")]
    # Keras takes no gradient at all where a model has no weights of its own.
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Model(inputs, dense(first(inputs[0]) + second(inputs[1])))
    model.compile("sgd", "mse")
    start = rows_of(first, [1, 2, 3])[:, 0]
    store = bind_local(model, optimizers.SGD(0.5))
    ids = [np.array([1, 2, 1, 1]), np.array([3, 1, 3, 3])]
    model.fit(ids, np.ones(4), batch_size=4, epochs=1, verbose=0)
    errors = np.array([start[a - 1] + start[b - 1] - 1 for a, b in zip(*ids, strict=True)])
    gradient = np.zeros(3)
    for column in ids:
        np.add.at(gradient, column - 1, 2 * errors / 4)
    np.testing.assert_allclose(first(np.array([1, 2, 3]))[:, 0], start - 0.5 * gradient, rtol=1e-5)
    np.testing.assert_array_equal(first(np.array([1, 2, 3])), second(np.array([1, 2, 3])))
    assert store.statistics()["t"]["rows"] == 3


def test_a_gradient_that_nothing_applies_is_an_error() -> None:
    layers = [keras.Input((), dtype="int64"), SparseEmbedding(1, name="user"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match=r"'user'.*Estimator"):
        model.fit(np.array([1]), np.array([1.0]), verbose=0)


@pytest.mark.parametrize(
    ("ids", "weights", "error"),
    [
        (np.array([1.0]), None, "integer ids: a float cannot"),
        (np.array(["a"]), None, "hash strings first"),
        (np.array([[1, 2]]), np.ones((1, 3), np.float32), "shape of ids"),
        (tf.ragged.constant([[1]]), np.ones((1, 1), np.float32), "both be ragged"),
        (tf.ragged.constant([[[1]]]), None, r"ragged ids \[B, \(L\)\]"),
    ],
)
def test_bad_calls(ids: object, weights: object, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        SparseEmbedding(DIM, "sum")(ids, weights=weights)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"embedding_dim": 0}, "embedding_dim must be a positive int"),
        ({"embedding_dim": 2.0}, "embedding_dim must be a positive int"),
        ({"embedding_dim": 2, "combiner": "max"}, "combiner must be None or one of"),
        ({"embedding_dim": 2, "ev_option": 3}, "ev_option must be"),
        ({"embedding_dim": 2, "optimizer": "adam"}, "optimizer must be one of"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error + r".*Received"):
        SparseEmbedding(**arguments)
