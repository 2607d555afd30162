"""Type-tagged JSON round trip of frozen option dataclasses."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, TypeVar

_TAG = "type"
FLOAT32_MAX = 3.4028234663852886e38
"""The largest number that the engine can hold."""
_Member = TypeVar("_Member", bound=Enum)
_T = TypeVar("_T", bound="Serializable")


class Serializable:
    """Base of option dataclasses: `to_dict` gives plain JSON values, `from_dict` reads them back.

    Every dict carries the class name under `type`; `from_dict` accepts only subclasses of the class
    it is called on, so that a filter can never be read where an optimizer is meant.
    """

    _registry: ClassVar[dict[str, type[Serializable]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Serializable._registry[cls.__name__] = cls

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, and the class name as `type`."""
        result: dict[str, Any] = {_TAG: type(self).__name__}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            result[field.name] = _encode(getattr(self, field.name))
        return result

    @classmethod
    def from_dict(cls: type[_T], data: Mapping[str, Any]) -> _T:
        """Read back what `to_dict` gave; a ValueError names an unknown type or field."""
        name = data.get(_TAG) if isinstance(data, Mapping) else None
        target = Serializable._registry.get(name) if isinstance(name, str) else None
        if target is None or not issubclass(target, cls):
            raise ValueError(
                f"Not a known {cls.__name__}; was it written by a newer version? Received: type={name!r}"
            )
        known = {field.name for field in dataclasses.fields(target)}  # type: ignore[arg-type]  # a dataclass
        unknown = sorted(set(data) - known - {_TAG})
        if unknown:
            raise ValueError(f"{target.__name__} has no such fields. Received: {unknown}")
        return target(**{key: _decode(value) for key, value in data.items() if key != _TAG})


def _encode(value: Any) -> Any:
    if isinstance(value, Serializable):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Serializable.from_dict(value)
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value


def require(condition: bool, message: str, **received: object) -> None:
    """A ValueError that says `message` and what was received, unless the condition holds."""
    if not condition:
        values = ", ".join(f"{name}={value!r}" for name, value in received.items())
        raise ValueError(f"{message} Received: {values}")


def member(kind: type[_Member], name: str, value: object) -> _Member:
    """The member of an enum by its value; a ValueError lists the members otherwise."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(one.name for one in kind)
        raise ValueError(f"{name} must be one of {known}. Received: {name}={value!r}") from None


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """The value as an int, at least `low` and below `high`; a ValueError names one that is not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer. Received: {name}={value!r}")
    whole = int(value)
    if (low is not None and whole < low) or (high is not None and whole >= high):
        bounds = f"at least {low}" if high is None else f"within [{low}, {high})"
        raise ValueError(f"{name} must be {bounds}. Received: {name}={whole!r}")
    return whole


def number(name: str, value: object) -> float:
    """The value as a float; a ValueError names one that is not a finite number that float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a finite number. Received: {name}={value!r}")
    real = float(value)
    if not math.isfinite(real) or abs(real) > FLOAT32_MAX:
        raise ValueError(
            f"{name} must be a finite number, at most {FLOAT32_MAX:.3g}. Received: {name}={value!r}"
        )
    return real


def normalize(option: object, integers: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> None:
    """Make fields of a frozen dataclass plain ints and floats; None stays. A ValueError names a field that is not."""
    for names, convert in ((integers, integer), (numbers, number)):
        for name in names:
            value = getattr(option, name)
            if value is not None:
                object.__setattr__(option, name, convert(name, value))
