"""How TensorFlow runs the operations of a traced function: a setting of each thread, which has no public door."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def inline() -> Iterator[None]:
    """Run operations one after the other in the calling thread; each may still use all threads."""
    from tensorflow.python.eager import context

    with context.function_executor_type("SINGLE_THREADED_EXECUTOR"):
        yield


def current() -> Any:
    """What holds in this thread."""
    from tensorflow.python.eager import context

    return context.context().function_call_options


def adopt(options: Any) -> None:
    """Have what `current` gave in another thread hold in this one."""
    from tensorflow.python.eager import context

    context.context().function_call_options = options
