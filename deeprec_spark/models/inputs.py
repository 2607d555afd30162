"""From a FeatureSpec to Keras inputs, embeddings, first-order terms and outputs."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.models.options import ModelOptions

Tensor = Any  # a symbolic keras.KerasTensor
IDS = (FeatureKind.CATEGORICAL, FeatureKind.SEQUENCE)


class Inputs:
    """The inputs of a model and what is read from them; makes each table's layer once.

    Example:
        >>> inputs = Inputs(spec, DeepFMOptions())
        >>> vectors = [inputs.embed(feature) for feature in spec.of_kind(*IDS)]  # each [batch, dim]
        >>> model = inputs.model(inputs.output(keras.layers.Concatenate()(vectors)))
    """

    def __init__(self, spec: FeatureSpec, options: ModelOptions) -> None:
        """Make one input for each feature: dense float32 `()` or `(width,)`, categorical int64 `()`, sequence int64
        `(max_length,)`.

        Raises:
            ValueError: The spec has no categorical or sequence feature, or two features give one table two widths.
        """
        if not spec.of_kind(*IDS):
            raise ValueError(
                "A model needs at least one categorical or sequence feature for its embedding tables. "
                f"Received: features={spec.feature_names}"
            )
        self.spec = spec
        self.options = options
        self.tensors: dict[str, Tensor] = {feature.name: _input(feature) for feature in spec.features}
        self._dims = table_dims(spec, options.embedding_dim)
        self._dense: dict[str, Tensor] = {}
        self._layers: dict[tuple[str, str | None, int | None], SparseEmbedding] = {}

    def dim(self, feature: Feature) -> int:
        """Width of the feature's table."""
        return self._dims[feature.table_name]

    def embed(self, feature: Feature, combiner: str | None = "mean") -> Tensor:
        """The feature's embedding `[batch, dim]`; a sequence with `combiner=None` stays `[batch, max_length, dim]`."""
        return self._lookup(feature, feature.table_name, self.dim(feature), combiner)

    def embed_same_dim(self, feature: Feature, combiner: str | None = "mean") -> Tensor:
        """Like `embed`, projected to the options' `embedding_dim` where the feature's table has another width."""
        vector = self.embed(feature, combiner)
        if self.dim(feature) == self.options.embedding_dim:
            return vector
        name = layer_name(f"{feature.name}.projection")
        return keras.layers.Dense(self.options.embedding_dim, use_bias=False, name=name)(vector)

    def dense(self, features: Iterable[Feature] | None = None, part: str = "dense") -> Tensor | None:
        """The dense features side by side, float32 `[batch, n]`; None if there are none."""
        chosen = self.spec.features if features is None else features
        tensors = [self._columns(feature) for feature in chosen if feature.kind is FeatureKind.DENSE]
        return concatenate(tensors, f"{part}.columns") if tensors else None

    def linear(self) -> Tensor:
        """The first-order term `[batch, 1]`: one weight for each id (tables of width 1) and for each dense feature."""
        terms = [
            self._lookup(feature, f"{feature.table_name}.linear", 1, "mean")
            for feature in self.spec.of_kind(*IDS)
        ]
        dense = self.dense(part="linear.dense")
        if dense is not None:
            terms.append(keras.layers.Dense(1, use_bias=False, name="dense.linear")(dense))
        return add(terms, "linear.sum")

    def concatenated(self, features: Iterable[Feature] | None = None, part: str = "all") -> Tensor:
        """All (or these) features as one vector: embeddings, sequences as their mean, then dense columns."""
        chosen = list(self.spec.features if features is None else features)
        parts = [self.embed(feature) for feature in chosen if feature.kind is not FeatureKind.DENSE]
        dense = self.dense(chosen, part=f"{part}.dense")
        return concatenate(parts if dense is None else [*parts, dense], f"{part}.inputs")

    def label(self) -> Label:
        """The one label of a model with one output.

        Raises:
            ValueError: The spec has several labels and the options choose none, or one that is not there.
        """
        labels = {label.name: label for label in self.spec.labels}
        wanted = self.options.label
        if wanted is not None:
            if wanted not in labels:
                raise ValueError(
                    "The label to predict is not in the feature spec. "
                    f"Received: label={wanted!r}, labels={list(labels)}"
                )
            return labels[wanted]
        if len(labels) > 1:
            raise ValueError(
                "This model has one output: choose it with the option `label`, or use `mmoe`, which predicts all. "
                f"Received: labels={list(labels)}"
            )
        return self.spec.labels[0] if labels else Label(name="prediction")

    def output(self, logit: Tensor) -> Tensor:
        """The prediction `[batch, 1]` from a score `[batch, 1]`; the layer has the label's name."""
        return activate(logit, self.label())

    def model(self, outputs: Tensor | dict[str, Tensor], name: str) -> keras.Model:
        """The uncompiled functional model; its inputs are a dict by feature name."""
        return keras.Model(self.tensors, outputs, name=name)

    def _columns(self, feature: Feature) -> Tensor:
        tensor = self.tensors[feature.name]
        if feature.width is not None:
            return tensor
        if feature.name not in self._dense:
            name = layer_name(f"{feature.name}.column")
            self._dense[feature.name] = keras.layers.Reshape((1,), name=name)(tensor)
        return self._dense[feature.name]

    def _lookup(self, feature: Feature, table: str, dim: int, combiner: str | None) -> Tensor:
        sequence = feature.kind is FeatureKind.SEQUENCE
        combiner = combiner if sequence else None
        padding = feature.padding_value if sequence else None
        key = (table, combiner, padding)
        layer = self._layers.get(key)
        if layer is None:
            name = ".".join(
                ["embedding", table, *([combiner or "sequence", str(padding)] if sequence else [])]
            )
            layer = SparseEmbedding(
                dim,
                combiner=combiner,
                table=table,
                ev_option=self.options.ev_option,
                padding_value=padding,
                seed=None if self.options.seed is None else table_seed(table, self.options.seed),
                name=layer_name(name),
            )
            self._layers[key] = layer
        return layer(self.tensors[feature.name])


def table_dims(spec: FeatureSpec, default: int) -> dict[str, int]:
    """Width of each table; features that share a table must not give it two widths.

    Raises:
        ValueError: Two features name different widths for one table; the message names them.
    """
    named: dict[str, tuple[str, int]] = {}
    for feature in spec.of_kind(*IDS):
        if feature.embedding_dim is None:
            continue
        other, dim = named.setdefault(feature.table_name, (feature.name, feature.embedding_dim))
        if dim != feature.embedding_dim:
            raise ValueError(
                f"Features {other!r} and {feature.name!r} share table {feature.table_name!r} and must agree on its "
                f"embedding_dim. Received: {dim} and {feature.embedding_dim}"
            )
    return {
        feature.table_name: named.get(feature.table_name, ("", default))[1] for feature in spec.of_kind(*IDS)
    }


def table_seed(table: str, seed: int) -> int:
    """A seed for the table: without the name in it, equal ids of two tables would start with equal vectors."""
    return (zlib.crc32(table.encode()) + seed) & 0x7FFFFFFF


def layer_name(name: str) -> str:
    """The name itself where TensorFlow takes it for a scope, else its nearest likeness with a checksum.

    Example:
        >>> layer_name("zip"), layer_name("zip code")
        ('zip', 'zip_code-da2e9646')
    """
    clean = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    if clean != name:
        clean = f"{clean}-{zlib.crc32(name.encode()):08x}"
    return clean if clean[:1].isalnum() else f"x{clean}"


def concatenate(tensors: Sequence[Tensor], name: str) -> Tensor:
    """Side by side along the last axis."""
    return tensors[0] if len(tensors) == 1 else keras.layers.Concatenate(name=name)(list(tensors))


def add(tensors: Sequence[Tensor], name: str) -> Tensor:
    """The sum of tensors of one shape."""
    return tensors[0] if len(tensors) == 1 else keras.layers.Add(name=name)(list(tensors))


def mlp(
    x: Tensor, units: Sequence[int], *, name: str, activation: str = "relu", dropout: float = 0.0
) -> Tensor:
    """Dense layers of these widths, each followed by dropout where it is above 0."""
    for index, width in enumerate(units):
        x = keras.layers.Dense(width, activation=activation, name=f"{name}.{index}")(x)
        if dropout:
            x = keras.layers.Dropout(dropout, name=f"{name}.{index}.dropout")(x)
    return x


def activate(logit: Tensor, label: Label) -> Tensor:
    """The label's prediction from its score: a probability for a binary label, the score itself for a regression.

    Raises:
        ValueError: The label is a class number, for which these models have no output.
    """
    if label.kind == "multiclass":
        raise ValueError(
            "This model predicts binary and regression labels; for classes write a Keras model with a softmax. "
            f"Received: label={label.name!r}, kind={label.kind!r}"
        )
    activation = "sigmoid" if label.kind == "binary" else "linear"
    return keras.layers.Activation(activation, dtype="float32", name=layer_name(label.name))(logit)


def _input(feature: Feature) -> Tensor:
    if feature.kind is FeatureKind.DENSE:
        shape = () if feature.width is None else (feature.width,)
        return keras.Input(shape, dtype="float32", name=feature.name)
    if feature.kind is FeatureKind.CATEGORICAL:
        return keras.Input((), dtype="int64", name=feature.name)
    return keras.Input((feature.max_length,), dtype="int64", name=feature.name)
