"""Models by name, for jobs that are written in YAML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras

from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.models.deepfm import DeepFMOptions, deepfm
from deeprec_spark.models.din import DINOptions, din
from deeprec_spark.models.dlrm import DLRMOptions, dlrm
from deeprec_spark.models.dssm import DSSMOptions, dssm
from deeprec_spark.models.mmoe import MMoEOptions, mmoe
from deeprec_spark.models.options import ModelOptions
from deeprec_spark.models.wdl import WDLOptions, wdl

OptionsT = TypeVar("OptionsT", bound=ModelOptions)
_MODELS: dict[str, tuple[type[ModelOptions], Callable[..., keras.Model]]] = {
    "wdl": (WDLOptions, wdl),
    "deepfm": (DeepFMOptions, deepfm),
    "dlrm": (DLRMOptions, dlrm),
    "dssm": (DSSMOptions, dssm),
    "din": (DINOptions, din),
    "mmoe": (MMoEOptions, mmoe),
}


def register(
    name: str, options: type[OptionsT], build: Callable[[FeatureSpec, OptionsT], keras.Model]
) -> None:
    """Add a model of your own, so that jobs can name it; a name that is taken is a ValueError."""
    if name in _MODELS:
        raise ValueError(f"A model of this name exists. Received: name={name!r}")
    _MODELS[name] = (options, build)


def names() -> list[str]:
    """The names that `create` knows."""
    return sorted(_MODELS)


def options_of(name: str, /, **options: Any) -> ModelOptions:
    """The model's options, checked; a ValueError names an unknown model, or each wrong key and the known ones."""
    if name not in _MODELS:
        raise ValueError(f"Unknown model; known are {', '.join(names())}. Received: name={name!r}")
    return _MODELS[name][0].from_dict(options)


def create(name: str, spec: FeatureSpec, /, **options: Any) -> keras.Model:
    """Build a model by name with options as YAML gives them; the model is not compiled.

    Raises:
        ValueError: Unknown name or option, or a spec that the model cannot use.

    Example:
        >>> model = create("deepfm", spec, embedding_dim=16, hidden_units=[64, 32])
    """
    checked = options_of(name, **options)
    return _MODELS[name][1](spec, checked)
