"""MultiHashEmbedding: composed rows, their gradients, configuration, training, errors."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark.data import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.multi_hash import MultiHashVariable
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.store import PullRequest, UniqueKeys
from deeprec_spark.layers import MultiHashEmbedding, bind_local, find_layers
from deeprec_spark.training.options import TrainerOptions
from deeprec_spark.training.trainer import Trainer

DIMS = [(5, 4), (7, 4)]


def tables_of(layer: MultiHashEmbedding) -> list[np.ndarray]:
    """All rows of each digit's table: start values are a function of seed and key alone."""
    store = LocalStore()
    store.create_tables([digit.table_spec() for digit in layer.digits])
    tables = []
    for digit, (rows, _) in zip(layer.digits, layer.dims, strict=True):
        keys = np.arange(rows)
        request = PullRequest({digit.table: UniqueKeys(keys, np.ones_like(keys))}, train=False, dense=False)
        tables.append(store.pull(request).rows[digit.table])
    return tables


@pytest.mark.parametrize("operation", ["add", "mult", "concat"])
def test_every_id_has_the_rows_of_its_digits(operation: str) -> None:
    layer = MultiHashEmbedding(DIMS, operation=operation, name="item")
    low, high = tables_of(layer)
    ids = np.arange(35)
    parts = [low[ids % 5], high[ids // 5]]
    expected = {"add": sum(parts), "mult": parts[0] * parts[1], "concat": np.hstack(parts)}[operation]
    output = layer(ids)
    np.testing.assert_array_equal(output, expected)
    assert len({tuple(row) for row in output.numpy().tolist()}) == 35
    np.testing.assert_array_equal(layer(np.array([35, -1])), layer(np.array([0, 34])))  # modulo the product


def test_the_digits_are_those_of_the_engine() -> None:
    dims = [(3, 2), (4, 2), (5, 2)]
    layer = MultiHashEmbedding(dims, complementary_strategy="mixed-radix", operation="concat", name="item")
    variable = MultiHashVariable("v", dims, complementary_strategy="mixed-radix", operation="concat")
    ids = np.arange(60)
    tables = tables_of(layer)
    expected = [table[digit] for table, digit in zip(tables, variable.digits(ids), strict=True)]
    np.testing.assert_array_equal(layer(ids), np.hstack(expected))


def test_bags_are_combined_after_the_rows_are_composed() -> None:
    layer = MultiHashEmbedding(DIMS, operation="mult", combiner="mean", padding_value=-1, name="item")
    output = layer(np.array([[3, 9, -1], [-1, -1, -1]]))
    single = MultiHashEmbedding(DIMS, operation="mult", name="item")(np.array([3, 9]))
    np.testing.assert_allclose(output[0], single.numpy().mean(0), rtol=1e-6)
    assert not output[1].numpy().any()


@pytest.mark.parametrize("operation", ["add", "mult", "concat"])
def test_training_follows_the_engine(operation: str) -> None:
    """One SGD step of the trainer, against MultiHashVariable's own chain rule."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((), dtype="int64", name="item")
    layer = MultiHashEmbedding(DIMS, operation=operation, name="item_embedding")
    model = keras.Model(ids, keras.layers.Dense(1, use_bias=False)(layer(ids)))
    model.compile(keras.optimizers.SGD(0.5), loss="mse")
    keys = np.array([3, 9, 9, 34])
    labels = np.array([1, 0, 2, 1], np.float32)
    store = LocalStore()
    trainer = Trainer(model, store, TrainerOptions(sparse_optimizer=SGD(0.5)))
    batch = Batch({"item": keys}, {"label": labels})
    trainer.initialize(batch)
    before = tables_of(layer)
    kernel = model.layers[-1].kernel.numpy()
    trainer.train_step(batch)

    parts = [before[0][keys % 5], before[1][keys // 5]]
    rows = {"add": sum(parts), "mult": parts[0] * parts[1], "concat": np.hstack(parts)}[operation]
    upstream = (2 * (rows @ kernel - labels[:, None]) / 4) @ kernel.T
    if operation == "concat":
        gradients = np.split(upstream, 2, axis=1)
    elif operation == "mult":
        gradients = [upstream * parts[1], upstream * parts[0]]
    else:
        gradients = [upstream, upstream]
    for index, digits in enumerate((keys % 5, keys // 5)):
        expected = before[index].copy()
        np.add.at(expected, digits, -0.5 * gradients[index])
        rows = store.table(f"item_embedding/{index}").lookup(np.arange(DIMS[index][0]))
        np.testing.assert_allclose(rows, expected, atol=1e-6)


def test_keras_fit_trains_bound_tables() -> None:
    ids = keras.Input((), dtype="int64")
    layer = MultiHashEmbedding(DIMS, name="item")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile("sgd", loss="mse")
    bind_local(model, SGD(0.1))
    before = layer(np.array([3])).numpy()
    model.fit(np.array([3, 4]), np.array([1.0, 2.0]), verbose=0)
    assert (layer(np.array([3])).numpy() != before).all()
    assert sorted(found.table for found in find_layers(model)) == ["item/0", "item/1"]


def test_configuration_comes_back() -> None:
    layer = MultiHashEmbedding(
        DIMS, operation="concat", combiner="sum", padding_value=0, optimizer=SGD(0.1), name="x"
    )
    config = json.loads(json.dumps(layer.get_config()))
    again = MultiHashEmbedding.from_config(config)
    assert again.get_config() == layer.get_config()
    ids = keras.Input((3,), dtype="int64")
    assert tuple(again(ids).shape) == (None, 8)


def test_freezing_reaches_the_tables() -> None:
    layer = MultiHashEmbedding(DIMS, name="item")
    layer.trainable = False
    assert [digit.trainable for digit in layer.digits] == [False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dims": DIMS}, "needs a table or a name"),
        ({"dims": [(5, 4)], "name": "x"}, "Q-R needs two tables"),
        ({"dims": [(5, 4), (5, 3)], "name": "x"}, "tables of one dimension"),
        ({"dims": DIMS, "operation": "max", "name": "x"}, "operation must be one of"),
        ({"dims": DIMS, "combiner": "max", "name": "x"}, "combiner must be None"),
        ({"dims": [(2**40, 4), (2**40, 4)], "name": "x"}, "fit into an int64"),
    ],
)
def test_errors_name_the_culprit(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        MultiHashEmbedding(**arguments)
    assert "Received:" in str(caught.value)


def test_float_ids_are_refused() -> None:
    with pytest.raises(TypeError, match="MultiHashEmbedding 'item' takes integer ids"):
        MultiHashEmbedding(DIMS, name="item")(tf.constant([1.5]))


def test_padded_places_are_zero_and_masked() -> None:
    layer = MultiHashEmbedding(DIMS, padding_value=-1, name="item")
    ids = np.array([[3, -1], [-1, -1]])
    output = layer(ids).numpy()
    assert output[0, 0].any()
    assert not output[0, 1].any()
    assert not output[1].any()
    np.testing.assert_array_equal(layer.compute_mask(tf.constant(ids)), ids != -1)
