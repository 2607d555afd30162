"""DeepFM (Guo et al., 2017)."""

from __future__ import annotations

import keras

from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.models.inputs import IDS, Inputs, add, concatenate, mlp
from deeprec_spark.models.interactions import FactorizationMachine
from deeprec_spark.models.options import OPTIONS_CONFIG, ModelOptions, Rate, Units, validated_dataclass


@validated_dataclass(frozen=True, config=OPTIONS_CONFIG)
class DeepFMOptions(ModelOptions):
    """Options of `deepfm`: the widths of the deep part and its dropout."""

    hidden_units: Units = (64, 32)
    dropout: Rate = 0.0


def deepfm(spec: FeatureSpec, options: DeepFMOptions | None = None) -> keras.Model:
    """First-order weights, a factorization machine and an MLP over the same embeddings; output `[batch, 1]`.

    Sequences enter as the mean of their ids. Tables of another width than `embedding_dim` are projected to it.

    Example:
        >>> model = deepfm(spec, DeepFMOptions(embedding_dim=16, hidden_units=(64, 32)))
    """
    options = options or DeepFMOptions()
    inputs = Inputs(spec, options)
    chosen = spec.of_kind(*IDS)
    vectors = [
        (inputs.embed_same_dim(feature, expand=False), inputs.of_group([feature])) for feature in chosen
    ]
    joined = inputs.side_by_side(vectors, "fm.vectors")
    fields = keras.layers.Reshape((len(vectors), options.embedding_dim), name="fm.fields")(joined)
    dense = inputs.dense()
    deep = joined if dense is None else concatenate([joined, dense], "deep.inputs")
    deep = mlp(deep, options.hidden_units, name="deep", dropout=options.dropout)
    terms = [inputs.linear(), FactorizationMachine(name="fm.score")(fields)]
    logit = add([*terms, keras.layers.Dense(1, name="deep.logit")(deep)], "logit.sum")
    return inputs.model(inputs.output(logit), "deepfm")
