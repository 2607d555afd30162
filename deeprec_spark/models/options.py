"""Options that every model has in common, readable from YAML and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass as validated_dataclass

from deeprec_spark.embedding.options import EmbeddingVariableOption

Units = tuple[PositiveInt, ...]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
EVOption = Annotated[
    InstanceOf[EmbeddingVariableOption],
    BeforeValidator(
        lambda value: EmbeddingVariableOption.from_dict(value) if isinstance(value, Mapping) else value
    ),
    PlainSerializer(lambda value: value.to_dict()),
]

OptionsT = TypeVar("OptionsT", bound="ModelOptions")
OPTIONS_CONFIG = ConfigDict(extra="forbid")


@validated_dataclass(frozen=True, config=OPTIONS_CONFIG)
class ModelOptions:
    """What every model can be told.

    Args:
        embedding_dim: Width of the tables whose feature does not name one.
        label: The label to predict, where the spec has several and the model one output.
        ev_option: Filter, eviction, storage and initial values of all tables of the model.
        seed: Of the tables' initial values; each table mixes its name into it. By default the name alone counts.
    """

    embedding_dim: PositiveInt = 16
    label: str | None = None
    ev_option: EVOption | None = None
    seed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON-able values; `from_dict` reads them back."""
        result: dict[str, Any] = TypeAdapter(type(self)).dump_python(self, mode="json")
        return result

    @classmethod
    def from_dict(cls: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
        """Options from JSON or YAML values; a ValueError names each wrong key and the known ones."""
        try:
            return TypeAdapter(cls).validate_python(dict(values))
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
            )
            known = ", ".join(field.name for field in fields(cls))
            raise ValueError(
                f"{cls.__name__}: {wrong}. Known: {known}. Received: {dict(values)!r}"
            ) from error


__all__ = ["EVOption", "ModelOptions", "OPTIONS_CONFIG", "Rate", "Units", "validated_dataclass"]
