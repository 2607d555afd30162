"""ScalarBoard: scalars of each worker and server as TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import tensorflow as tf


class ScalarBoard:
    """Writes scalars with TensorFlow's own writer; each node is a run of its own, so that TensorBoard compares them.

    Args:
        folder: a local folder; a run is a folder in it.

    Example:
        >>> with ScalarBoard(Path("logs")) as board:
        ...     board.write("worker 0", step=100, values={"samples per second": 5e4})
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def __enter__(self) -> ScalarBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, run: str, step: int, values: Mapping[str, float]) -> None:
        """Scalars of a run at a step of the model; an OSError where they cannot be written."""
        with _os_errors():
            if run not in self._writers:
                self._writers[run] = tf.summary.create_file_writer(str(self._folder / run))
            with self._writers[run].as_default():
                for name, value in values.items():
                    tf.summary.scalar(name, value, step=step)

    def flush(self) -> None:
        """Bring everything that was written to the files."""
        with _os_errors():
            for writer in self._writers.values():
                writer.flush()

    def close(self) -> None:
        """Close the files."""
        with _os_errors():
            for writer in self._writers.values():
                writer.close()
        self._writers.clear()


@contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(f"TensorBoard's files cannot be written: {error}") from error
