"""DLRM (Naumov et al., 2019)."""

from __future__ import annotations

import keras

from deeprec_spark.features.spec import FeatureKind, FeatureSpec
from deeprec_spark.models.inputs import IDS, Inputs, concatenate, mlp
from deeprec_spark.models.interactions import DotInteraction
from deeprec_spark.models.options import OPTIONS_CONFIG, ModelOptions, Units, validated_dataclass


@validated_dataclass(frozen=True, config=OPTIONS_CONFIG)
class DLRMOptions(ModelOptions):
    """Options of `dlrm`: the bottom MLP ends in `embedding_dim`, the top one in the score."""

    bottom_units: Units = (64, 32)
    top_units: Units = (64, 32)


def dlrm(spec: FeatureSpec, options: DLRMOptions | None = None) -> keras.Model:
    """Dots of all pairs of embeddings and the dense features' vector, then an MLP; output `[batch, 1]`.

    Without dense features the bottom MLP is left out. Tables of another width than `embedding_dim` are projected to it.

    Example:
        >>> model = dlrm(spec, DLRMOptions(embedding_dim=16, bottom_units=(512, 256), top_units=(512, 256)))
    """
    options = options or DLRMOptions()
    inputs = Inputs(spec, options)
    vectors = [
        (inputs.embed_same_dim(feature, expand=False), inputs.of_group([feature]))
        for feature in spec.of_kind(*IDS)
    ]
    numbers = spec.of_kind(FeatureKind.DENSE)
    dense = inputs.dense(expand=False)
    if dense is not None:
        of_group = inputs.of_group(numbers)
        dense = mlp(dense, (*options.bottom_units, options.embedding_dim), name="bottom")
        vectors.insert(0, (dense, of_group))
        dense = inputs.expand(dense) if of_group else dense
    joined = inputs.side_by_side(vectors, "interaction.vectors")
    if len(vectors) == 1:
        top = joined
    else:
        shape = (len(vectors), options.embedding_dim)
        fields = keras.layers.Reshape(shape, name="interaction.fields")(joined)
        dots = DotInteraction(name="interaction.dots")(fields)
        top = dots if dense is None else concatenate([dense, dots], "top.inputs")
    top = mlp(top, options.top_units, name="top")
    return inputs.model(inputs.output(keras.layers.Dense(1, name="top.logit")(top)), "dlrm")
