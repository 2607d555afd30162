"""MMoE: multi-gate mixture of experts (Ma et al., 2018)."""

from __future__ import annotations

from typing import Annotated

import keras
from pydantic import Field

from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.models.inputs import Inputs, activate, layer_name, mlp
from deeprec_spark.models.options import OPTIONS_CONFIG, ModelOptions, Units, validated_dataclass


@validated_dataclass(frozen=True, config=OPTIONS_CONFIG)
class MMoEOptions(ModelOptions):
    """Options of `mmoe`: how many experts, their widths, and the widths of each label's tower."""

    num_experts: Annotated[int, Field(ge=2)] = 4
    expert_units: Units = (64, 32)
    tower_units: Units = (32,)


def mmoe(spec: FeatureSpec, options: MMoEOptions | None = None) -> keras.Model:
    """One output `[batch, 1]` for each label of the spec, by name, over experts that all labels share.

    With the option `label` only that one is predicted.

    Raises:
        ValueError: The spec has no label.

    Example:
        >>> model = mmoe(spec, MMoEOptions(num_experts=8))
        >>> model.output
        {'click': <KerasTensor …>, 'buy': <KerasTensor …>}
    """
    options = options or MMoEOptions()
    inputs = Inputs(spec, options)
    if not spec.labels:
        raise ValueError("MMoE makes one output for each label of the feature spec. Received: labels=()")
    labels = spec.labels if options.label is None else (inputs.label(),)
    x = inputs.concatenated()
    experts = [
        keras.layers.Reshape((1, -1), name=f"expert{index}.row")(
            mlp(x, options.expert_units or (options.embedding_dim,), name=f"expert{index}")
        )
        for index in range(options.num_experts)
    ]
    rows = keras.layers.Concatenate(axis=1, name="experts.rows")(experts)
    outputs = {}
    for label in labels:
        name = layer_name(label.name)
        gate = keras.layers.Dense(options.num_experts, activation="softmax", name=f"{name}.gate")(x)
        mixed = keras.layers.Dot(axes=(1, 1), name=f"{name}.mix")([gate, rows])
        tower = mlp(mixed, options.tower_units, name=f"{name}.tower")
        logit = keras.layers.Dense(1, name=f"{name}.logit")(tower)
        outputs[label.name] = activate(logit, label)
    return inputs.model(outputs, "mmoe")
