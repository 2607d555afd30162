"""From a FeatureSpec to Keras inputs, embeddings, first-order terms and outputs."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import keras

from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.layers import ExpandGroups, SparseEmbedding
from deeprec_spark.models.options import ModelOptions

Tensor = Any  # a symbolic keras.KerasTensor
IDS = (FeatureKind.CATEGORICAL, FeatureKind.SEQUENCE)


class Inputs:
    """The inputs of a model and what is read from them; makes each table's layer once.

    Where the spec has a grouping, group-level features are looked up once for each group and expanded to its samples,
    as late as the call allows: every method gives one value for each sample unless it is told `expand=False`.

    Example:
        >>> inputs = Inputs(spec, DeepFMOptions())
        >>> vectors = [inputs.embed(feature) for feature in spec.of_kind(*IDS)]  # each [batch, dim]
        >>> model = inputs.model(inputs.output(keras.layers.Concatenate()(vectors)))
    """

    def __init__(self, spec: FeatureSpec, options: ModelOptions) -> None:
        """Make one input for each feature: dense float32 `()` or `(width,)`, categorical int64 `()`, sequence int64
        `(max_length,)`; and one for the group of each sample where there is a grouping, int32 `()`.

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
        self._group_names = {feature.name for feature in spec.group_features}
        self._index: Tensor | None = None
        if spec.grouping is not None:
            self._index = keras.Input((), dtype="int32", name=spec.grouping.index)
        self._expanded: dict[int, tuple[Tensor, Tensor]] = {}
        self._dims = table_dims(spec, options.embedding_dim)
        self._dense: dict[str, Tensor] = {}
        self._layers: dict[tuple[str, str | None, int | None], SparseEmbedding] = {}

    def dim(self, feature: Feature) -> int:
        """Width of the feature's table."""
        return self._dims[feature.table_name]

    def of_group(self, features: Iterable[Feature]) -> bool:
        """Whether all these features are group-level, so that what is made of them alone can be."""
        return self._index is not None and all(feature.name in self._group_names for feature in features)

    def expand(self, tensor: Tensor) -> Tensor:
        """What was made of group-level features, `[groups, …]`, for each sample: `[batch, …]`."""
        if self._index is None:
            return tensor
        known = self._expanded.get(id(tensor))
        if known is None:
            # The tensor is kept as well, so that its id is not given to another.
            known = (tensor, ExpandGroups()([tensor, self._index]))
            self._expanded[id(tensor)] = known
        return known[1]

    def ids(self, feature: Feature) -> Tensor:
        """The feature's own ids, for each sample."""
        tensor = self.tensors[feature.name]
        return self.expand(tensor) if self.of_group([feature]) else tensor

    def embed(self, feature: Feature, combiner: str | None = "mean", *, expand: bool = True) -> Tensor:
        """The feature's embedding `[batch, dim]`; a sequence with `combiner=None` stays `[batch, max_length, dim]`."""
        vector = self._lookup(feature, feature.table_name, self.dim(feature), combiner)
        return self.expand(vector) if expand and self.of_group([feature]) else vector

    def embed_same_dim(
        self, feature: Feature, combiner: str | None = "mean", *, expand: bool = True
    ) -> Tensor:
        """Like `embed`, projected to the options' `embedding_dim` where the feature's table has another width."""
        vector = self.embed(feature, combiner, expand=False)
        if self.dim(feature) != self.options.embedding_dim:
            name = layer_name(f"{feature.name}.projection")
            vector = keras.layers.Dense(self.options.embedding_dim, use_bias=False, name=name)(vector)
        return self.expand(vector) if expand and self.of_group([feature]) else vector

    def dense(
        self, features: Iterable[Feature] | None = None, part: str = "dense", *, expand: bool = True
    ) -> Tensor | None:
        """The dense features side by side, float32 `[batch, n]`; None if there are none."""
        parts = self._dense_parts(self.spec.features if features is None else features)
        return self.side_by_side(parts, f"{part}.columns", expand=expand) if parts else None

    def linear(self) -> Tensor:
        """The first-order term `[batch, 1]`: one weight for each id (tables of width 1) and for each dense feature."""
        terms: dict[bool, list[Tensor]] = {True: [], False: []}
        for feature in self.spec.of_kind(*IDS):
            term = self._lookup(feature, f"{feature.table_name}.linear", 1, "mean")
            terms[self.of_group([feature])].append(term)
        chosen = self.spec.of_kind(FeatureKind.DENSE)
        dense = self.dense(part="linear.dense", expand=False)
        if dense is not None:
            term = keras.layers.Dense(1, use_bias=False, name="dense.linear")(dense)
            terms[self.of_group(chosen)].append(term)
        of_items = terms[False]
        if terms[True]:
            of_items = [self.expand(add(terms[True], "linear.group")), *of_items]
        return add(of_items, "linear.sum")

    def concatenated(
        self, features: Iterable[Feature] | None = None, part: str = "all", *, expand: bool = True
    ) -> Tensor:
        """All (or these) features as one vector: embeddings, sequences as their mean, then dense columns.

        With `expand=False` it is `[groups, n]` where all of them are group-level.
        """
        chosen = list(self.spec.features if features is None else features)
        parts = [
            (self.embed(feature, expand=False), self.of_group([feature]))
            for feature in chosen
            if feature.kind is not FeatureKind.DENSE
        ]
        return self.side_by_side([*parts, *self._dense_parts(chosen)], f"{part}.inputs", expand=expand)

    def side_by_side(self, parts: Sequence[tuple[Tensor, bool]], name: str, *, expand: bool = True) -> Tensor:
        """Concatenate along the last axis, in order; group-level parts that are neighbours are expanded as one.

        Args:
            parts: `[batch, n]`, or with True `[groups, n]`.
            name: of the layer.
            expand: False leaves it `[groups, n]` where all parts are.
        """
        if all(of_group for _, of_group in parts):
            joined = concatenate([tensor for tensor, _ in parts], name)
            return self.expand(joined) if expand and self._index is not None else joined
        runs = [
            (of_group, [tensor for tensor, _ in run])
            for of_group, run in groupby(parts, key=lambda part: part[1])
        ]
        tensors = []
        for index, (of_group, run) in enumerate(runs):
            tensors += [self.expand(concatenate(run, f"{name}.group{index}"))] if of_group else run
        return concatenate(tensors, name)

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
        index = {} if self._index is None else {self._index.name: self._index}
        return keras.Model({**self.tensors, **index}, outputs, name=name)

    def _dense_parts(self, features: Iterable[Feature]) -> list[tuple[Tensor, bool]]:
        return [
            (self._columns(feature), self.of_group([feature]))
            for feature in features
            if feature.kind is FeatureKind.DENSE
        ]

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
