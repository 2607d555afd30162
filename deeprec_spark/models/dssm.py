"""DSSM: two towers that meet in a cosine (Huang et al., 2013)."""

from __future__ import annotations

import keras

from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.models.inputs import Inputs, Tensor, mlp
from deeprec_spark.models.options import OPTIONS_CONFIG, ModelOptions, Units, validated_dataclass

USER_VECTOR = "user.vector"
ITEM_VECTOR = "item.vector"


@validated_dataclass(frozen=True, config=OPTIONS_CONFIG)
class DSSMOptions(ModelOptions):
    """Options of `dssm`: the towers' widths (the last one is that of the vectors)."""

    user_units: Units = (128, 64)
    item_units: Units = (128, 64)

    def __post_init__(self) -> None:
        if not self.user_units or not self.item_units or self.user_units[-1] != self.item_units[-1]:
            raise ValueError(
                "Both towers must end in the same width. "
                f"Received: user_units={self.user_units}, item_units={self.item_units}"
            )


def dssm(spec: FeatureSpec, options: DSSMOptions | None = None) -> keras.Model:
    """The cosine of a user vector and an item vector, scaled by a learned factor; output `[batch, 1]`.

    Features of group "item" feed the item tower, "user" and "context" the user tower. Where all of the latter are
    group-level (`FeatureSpec.grouping`), the user tower is computed once for each group.

    Raises:
        ValueError: One of the towers has no feature.
    """
    options = options or DSSMOptions()
    item_features = [feature for feature in spec.features if feature.group == "item"]
    user_features = [feature for feature in spec.features if feature.group != "item"]
    if not item_features or not any(feature.group == "user" for feature in user_features):
        groups = {feature.name: feature.group for feature in spec.features}
        raise ValueError(
            "DSSM needs features of group 'user' and of group 'item': set `group` in the feature spec. "
            f"Received: groups={groups}"
        )
    inputs = Inputs(spec, options)
    columns = inputs.concatenated(user_features, "user", expand=False)
    user = _tower(columns, options.user_units, "user", USER_VECTOR)
    if inputs.of_group(user_features):
        user = inputs.expand(user)
    item = _tower(inputs.concatenated(item_features, "item"), options.item_units, "item", ITEM_VECTOR)
    cosine = keras.layers.Dot(axes=-1, name="score.cosine")([user, item])
    scale = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(5.0), name="score.scale")
    return inputs.model(inputs.output(scale(cosine)), "dssm")


def towers(model: keras.Model, spec: FeatureSpec) -> tuple[keras.Model, keras.Model]:
    """The user and the item tower of a `dssm` model; they share its weights and give unit vectors for retrieval.

    Example:
        >>> user_tower, item_tower = towers(model, spec)
        >>> item_tower(items).shape
        (1682, 64)
    """
    by_name = {tensor.name: tensor for tensor in model.inputs}
    item = {feature.name: by_name[feature.name] for feature in spec.features if feature.group == "item"}
    user = {feature.name: by_name[feature.name] for feature in spec.features if feature.group != "item"}
    vector = model.get_layer(USER_VECTOR).output
    if spec.grouping is not None and not set(user) <= set(spec.grouping.features):
        # Some of the user's features are item-level, so that the tower is as well.
        user[spec.grouping.index] = by_name[spec.grouping.index]
    return (
        keras.Model(user, vector, name="user_tower"),
        keras.Model(item, model.get_layer(ITEM_VECTOR).output, name="item_tower"),
    )


def _tower(x: Tensor, units: Units, name: str, output: str) -> Tensor:
    x = mlp(x, units[:-1], name=name)
    x = keras.layers.Dense(units[-1], name=f"{name}.out")(x)
    return keras.layers.UnitNormalization(name=output)(x)
