"""The SparseEmbedding layers of a model, and the tables that they share."""

from __future__ import annotations

import dataclasses
from typing import Any

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.store import EmbeddingStore, TableSpec
from deeprec_spark.layers.sparse_embedding import SparseEmbedding


def find_layers(model: Any) -> list[SparseEmbedding]:
    """All SparseEmbedding layers of a Keras model, nested models included, in the model's order.

    Layers that were given neither a table nor a name get tables named by this order, so that a model which is
    made twice, or in another process, names its tables alike.
    """
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, SparseEmbedding)]
    taken = {layer.table for layer in layers if not layer.has_automatic_table}
    count = 0
    for layer in layers:
        if not layer.has_automatic_table:
            continue
        name = "sparse_embedding" if count == 0 else f"sparse_embedding_{count}"
        if name in taken:
            raise ValueError(
                f"A table called {name!r} was named by hand and is also the automatic name of another layer. "
                f"Name the tables of all layers. Received: layer {layer.name!r} without a table name"
            )
        layer.name_table(name)
        count += 1
    return layers


def table_specs(model: Any, optimizer: Optimizer | None = None) -> list[TableSpec]:
    """One spec for each table of the model; layers that share a table must agree in everything.

    Args:
        model: a Keras model.
        optimizer: the optimizer of tables whose layers name none.

    Raises:
        ValueError: the model has no SparseEmbedding, or two layers want one table to differ.
    """
    specs: dict[str, TableSpec] = {}
    owners: dict[str, str] = {}
    for layer in find_layers(model):
        spec = layer.table_spec(optimizer)
        known = specs.setdefault(spec.name, spec)
        if known != spec:
            differing = [
                f"{field.name}: {getattr(known, field.name)!r} and {getattr(spec, field.name)!r}"
                for field in dataclasses.fields(TableSpec)
                if getattr(known, field.name) != getattr(spec, field.name)
            ]
            raise ValueError(
                f"SparseEmbedding layers {owners[spec.name]!r} and {layer.name!r} share the table {spec.name!r} "
                f"but differ. Give both the same arguments, or two tables. Received: {'; '.join(differing)}"
            )
        owners.setdefault(spec.name, layer.name)
    if not specs:
        raise ValueError(
            "The model has no SparseEmbedding layer, so there is no table to train. Use "
            "deeprec_spark.layers.SparseEmbedding for the id features (keras.layers.Embedding stays replicated). "
            f"Received: model {model.name!r} with layers {[layer.name for layer in model.layers]}"
        )
    return list(specs.values())


def frozen_tables(model: Any) -> frozenset[str]:
    """The tables of layers with `trainable = False`, which training only reads.

    Raises:
        ValueError: a frozen layer and a trainable one share a table.
    """
    states: dict[str, dict[bool, str]] = {}
    for layer in find_layers(model):
        states.setdefault(layer.table, {}).setdefault(bool(layer.trainable), layer.name)
    for table, owners in states.items():
        if len(owners) > 1:
            raise ValueError(
                f"A table is trained or frozen as a whole, but SparseEmbedding layers that share {table!r} differ in "
                "trainable. Freeze all of them or none, or give them two tables. "
                f"Received: trainable {owners[True]!r}, frozen {owners[False]!r}"
            )
    return frozenset(table for table, owners in states.items() if False in owners)


def bind(model: Any, store: EmbeddingStore) -> None:
    """Make every SparseEmbedding of the model read `store` outside of a context; it must hold their tables."""
    for layer in find_layers(model):
        layer.bind(store)


def bind_local(model: Any, optimizer: Optimizer | None = None) -> LocalStore:
    """Give the model one store in this process, so that Keras' own `model.fit` trains its tables too.

    For notebooks and small data: every lookup crosses from TensorFlow to Python and back, and `model.save` does not
    hold the tables.

    Args:
        model: a Keras model.
        optimizer: updates the tables whose layers name none; None: the engine's SGD.

    Example:
        >>> bind_local(model, Adagrad(0.05))
        >>> model.fit(ids, labels)
    """
    store = LocalStore()
    store.create_tables(table_specs(model, optimizer))
    for layer in find_layers(model):
        layer.bind(store, trainable=True)
    return store
