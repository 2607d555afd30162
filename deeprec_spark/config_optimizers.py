"""The optimizers that a job's configuration names: found, made, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field

from deeprec_spark.config_sections import Section, unknown_key
from deeprec_spark.embedding.optimizers import Optimizer

if TYPE_CHECKING:
    import keras


class OptimizerSection(Section):
    """An optimizer by name; further keys are its own arguments (`beta_1: 0.9`)."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(description="In any case: adam, Adagrad, sgd …")
    learning_rate: float | None = Field(None, gt=0.0, description="Default: the optimizer's own.")

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that the YAML gives."""
        given = dict(self.model_extra or {})
        if self.learning_rate is not None:
            given["learning_rate"] = self.learning_rate
        return given


def make_keras_optimizer(name: str, arguments: Mapping[str, Any]) -> keras.optimizers.Optimizer:
    """Keras's optimizer of this name, in any case; a ValueError names the known ones, or the wrong argument."""
    known = _keras_optimizers()
    if name.lower() not in known:
        raise ValueError(f"Unknown optimizer; known are {', '.join(sorted(known))}. Received: name={name!r}")
    try:
        return known[name.lower()](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Optimizer {name!r}: {error}. Received: {dict(arguments)!r}") from error


def sparse_optimizer_problems(section: OptimizerSection) -> list[str]:
    """What is wrong with the optimizer of the embedding rows."""
    path, known = "training.sparse_optimizer", sparse_optimizers()
    kind = known.get(section.name.lower())
    if kind is None:
        return [_unknown_optimizer(path, section, known)]
    wrong = _unknown_arguments(path, section, [field.name for field in dataclasses.fields(kind)])
    if wrong:
        return wrong
    try:
        kind(**section.arguments)
    except (TypeError, ValueError) as error:
        return [f"{path}: {error}"]
    return []


def optimizer_problems(section: OptimizerSection) -> list[str]:
    """What is wrong with the optimizer of the dense parameters."""
    path, known = "training.optimizer", _keras_optimizers()
    kind = known.get(section.name.lower())
    if kind is None:
        return [_unknown_optimizer(path, section, known)]
    parameters = inspect.signature(kind).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    wrong = _unknown_arguments(path, section, names)
    if wrong:
        return wrong
    try:
        make_keras_optimizer(section.name, section.arguments)
    except ValueError as error:
        return [f"{path}: {error}"]
    return []


def _keras_optimizers() -> dict[str, type[keras.optimizers.Optimizer]]:
    """Keras's optimizers by their names in lower case."""
    import keras  # here, not above: it takes seconds that `--help` need not wait

    return {
        key.lower(): kind
        for key, kind in vars(keras.optimizers).items()
        if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer) and key != "Optimizer"
    }


def sparse_optimizers() -> dict[str, type[Optimizer]]:
    """The engine's optimizers by their names in lower case."""
    return {kind.__name__.lower(): kind for kind in Optimizer.__subclasses__()}


def _unknown_optimizer(path: str, section: OptimizerSection, known: Mapping[str, object]) -> str:
    names = ", ".join(sorted(known))
    return f"{path}.name: unknown optimizer; known are {names}. Received: {section.name!r}"


def _unknown_arguments(path: str, section: OptimizerSection, known: Sequence[str]) -> list[str]:
    return [
        unknown_key(f"{path}.{key}", key, value, ["name", *(name for name in known if name != "name")])
        for key, value in section.arguments.items()
        if key not in known
    ]
