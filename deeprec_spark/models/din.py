"""DIN: Deep Interest Network (Zhou et al., 2018)."""

from __future__ import annotations

import keras

from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec
from deeprec_spark.models.inputs import IDS, Inputs, layer_name, mlp
from deeprec_spark.models.interactions import TargetAttention
from deeprec_spark.models.options import OPTIONS_CONFIG, ModelOptions, Rate, Units, validated_dataclass


@validated_dataclass(frozen=True, config=OPTIONS_CONFIG)
class DINOptions(ModelOptions):
    """Options of `din`: widths of the MLP and of the attention's scorer; softmax over the history or none."""

    hidden_units: Units = (200, 80)
    attention_units: Units = (36,)
    normalize_attention: bool = False
    dropout: Rate = 0.0


def din(spec: FeatureSpec, options: DINOptions | None = None) -> keras.Model:
    """A user's history, weighted by what it says about the target item, then an MLP; output `[batch, 1]`.

    The target of a sequence is the categorical feature that shares its table (`Feature.table`; of several, one of group
    "item" first). Sequences without one enter as the mean of their ids.

    Raises:
        ValueError: No sequence shares its table with a categorical feature.
    """
    options = options or DINOptions()
    targets = {
        sequence.name: target
        for sequence in spec.of_kind(FeatureKind.SEQUENCE)
        if (target := _target(spec, sequence)) is not None
    }
    if not targets:
        tables = {feature.name: feature.table_name for feature in spec.of_kind(*IDS)}
        raise ValueError(
            "DIN needs a sequence (the history) and a categorical feature (the target) of the same `table` in the "
            f"feature spec. Received: tables={tables}"
        )
    inputs = Inputs(spec, options)
    vectors = []
    for feature in spec.of_kind(*IDS):
        target = targets.get(feature.name)
        if target is None:
            vectors.append((inputs.embed(feature, expand=False), inputs.of_group([feature])))
            continue
        attention = TargetAttention(
            options.attention_units,
            padding_value=feature.padding_value,
            normalize=options.normalize_attention,
            name=layer_name(f"{feature.name}.attention"),
        )
        history = inputs.embed(feature, combiner=None)
        vectors.append((attention([inputs.embed(target), history, inputs.ids(feature)]), False))
    dense = inputs.dense()
    x = inputs.side_by_side(vectors if dense is None else [*vectors, (dense, False)], "deep.inputs")
    x = mlp(x, options.hidden_units, name="deep", dropout=options.dropout)
    return inputs.model(inputs.output(keras.layers.Dense(1, name="deep.logit")(x)), "din")


def _target(spec: FeatureSpec, sequence: Feature) -> Feature | None:
    sharing = [
        feature
        for feature in spec.of_kind(FeatureKind.CATEGORICAL)
        if feature.table_name == sequence.table_name
    ]
    return next((feature for feature in sharing if feature.group == "item"), sharing[0] if sharing else None)
