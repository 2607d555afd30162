"""The tables of a model: names, sharing, disagreement."""

from __future__ import annotations

import keras
import pytest

from deeprec_spark.embedding import optimizers
from deeprec_spark.layers import SparseEmbedding, find_layers, table_specs

L = keras.layers


def model_of(*layers: SparseEmbedding) -> keras.Model:
    inputs = [keras.Input((), dtype="int64") for _ in layers]
    vectors = [layer(column) for layer, column in zip(layers, inputs, strict=True)]
    return keras.Model(inputs, L.Concatenate()(vectors) if len(vectors) > 1 else vectors[0])


def test_nested_models_are_searched() -> None:
    tower = model_of(SparseEmbedding(2, table="inner"))
    column = keras.Input((), dtype="int64")

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower
            self.blocks = [SparseEmbedding(2, table="listed")]

    assert {layer.table for layer in find_layers(Outer())} == {"inner", "listed"}
    assert [layer.table for layer in find_layers(keras.Model(column, tower(column)))] == ["inner"]


def test_tables_without_a_name_are_named_by_their_order_in_the_model() -> None:
    def made() -> list[str]:
        model = model_of(SparseEmbedding(2), SparseEmbedding(2, table="item"), SparseEmbedding(4))
        return [layer.table for layer in find_layers(model)]

    # Keras numbers layers on and on in a process; a model made twice has the same tables nevertheless.
    assert made() == made() == ["sparse_embedding", "item", "sparse_embedding_1"]


def test_names_survive_the_configuration() -> None:
    SparseEmbedding(2)
    model = model_of(SparseEmbedding(2), SparseEmbedding(2, name="user"))
    tables = [layer.table for layer in find_layers(model)]
    again = keras.Model.from_config(model.get_config())
    assert [layer.table for layer in find_layers(again)] == tables == ["sparse_embedding", "user"]


def test_a_shared_table_is_one_spec() -> None:
    model = model_of(
        SparseEmbedding(2, table="item"), SparseEmbedding(2, table="item"), SparseEmbedding(4, name="u")
    )
    specs = table_specs(model, optimizers.SGD(0.5))
    assert [(spec.name, spec.embedding_dim) for spec in specs] == [("item", 2), ("u", 4)]
    assert specs[0].optimizer == optimizers.SGD(0.5)


def test_a_layers_own_optimizer_goes_first() -> None:
    model = model_of(SparseEmbedding(2, name="u", optimizer=optimizers.Ftrl(0.1)))
    assert table_specs(model, optimizers.SGD())[0].optimizer == optimizers.Ftrl(0.1)


def test_layers_that_share_a_table_must_agree() -> None:
    first = SparseEmbedding(2, table="item", name="a")
    with pytest.raises(ValueError, match=r"'a' and 'b' share the table 'item'.*embedding_dim: 2 and 4"):
        table_specs(model_of(first, SparseEmbedding(4, table="item", name="b")))
    with pytest.raises(ValueError, match="seed"):
        table_specs(model_of(first, SparseEmbedding(2, table="item", name="b", seed=1)))


def test_a_model_without_a_table_is_an_error() -> None:
    model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
    with pytest.raises(ValueError, match="no SparseEmbedding layer"):
        table_specs(model)
