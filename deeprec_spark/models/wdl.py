"""Wide & Deep (Cheng et al., 2016)."""

from __future__ import annotations

import keras

from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.models.inputs import Inputs, add, mlp
from deeprec_spark.models.options import OPTIONS_CONFIG, ModelOptions, Rate, Units, validated_dataclass


@validated_dataclass(frozen=True, config=OPTIONS_CONFIG)
class WDLOptions(ModelOptions):
    """Options of `wdl`: the widths of the deep part and its dropout."""

    hidden_units: Units = (1024, 512, 256)
    dropout: Rate = 0.0


def wdl(spec: FeatureSpec, options: WDLOptions | None = None) -> keras.Model:
    """A linear model of all features beside an MLP of their embeddings; output `[batch, 1]`.

    Example:
        >>> model = wdl(spec, WDLOptions(hidden_units=(64, 32)))
    """
    options = options or WDLOptions()
    inputs = Inputs(spec, options)
    deep = mlp(inputs.concatenated(), options.hidden_units, name="deep", dropout=options.dropout)
    logit = add([inputs.linear(), keras.layers.Dense(1, name="deep.logit")(deep)], "logit.sum")
    return inputs.model(inputs.output(logit), "wdl")
