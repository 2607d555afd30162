"""What Keras callbacks count (patience, best values), remembered by epoch, so that training can go back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_COPIED_BYTES = 1 << 16
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


class CallbackStates:
    """The plain attributes of callbacks (numbers, texts, arrays and collections of them) after each epoch.

    Keras has no protocol for a callback's state. Attributes of other types, such as open files, stay as they are.
    Arrays of more than 64 KiB are remembered without a copy: Keras' callbacks replace them, and do not write into them.

    Example:
        >>> states = CallbackStates([stopper])
        >>> states.remember(0)
        >>> stopper.wait = 3
        >>> states.go_back(0)
        >>> stopper.wait
        0
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = list(callbacks)
        self._states: dict[int, list[Mapping[str, Any]]] = {}

    def remember(self, epochs: int) -> None:
        """Keep the state now, when so many epochs are done."""
        self._states[epochs] = [_plain_attributes(callback) for callback in self._callbacks]

    def go_back(self, epochs: int) -> None:
        """Give the callbacks the state of then, and forget later ones; nothing where it was never remembered."""
        for callback, state in zip(self._callbacks, self._states.get(epochs, ()), strict=False):
            vars(callback).update({name: _copied(value) for name, value in state.items()})
        self._states = {done: state for done, state in self._states.items() if done <= epochs}


def _plain_attributes(callback: Any) -> dict[str, Any]:
    # The model, and the parameters of the fit, are not the callback's own.
    own = {name: value for name, value in vars(callback).items() if name not in ("_model", "model", "params")}
    return {name: _copied(value) for name, value in own.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, np.ndarray):
        return bool(value.dtype != np.dtype(object))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    return isinstance(value, list | tuple | set) and all(map(_is_plain, value))


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _COPIED_BYTES else value
    # Subclasses are made in ways of their own: a defaultdict of its factory, a Counter of what it counts.
    if isinstance(value, dict):
        mapping = copy.copy(value)
        for key, entry in value.items():
            mapping[key] = _copied(entry)
        return mapping
    if isinstance(value, list):
        items = copy.copy(value)
        items[:] = map(_copied, value)
        return items
    if isinstance(value, set):
        return copy.copy(value)
    if type(value) is tuple:
        return tuple(map(_copied, value))
    return value
