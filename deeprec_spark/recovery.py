"""Starting again after nodes failed: how often, after what pause, and what is not worth another try."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deeprec_spark.runtime.errors import (
    JobError,
    NodeError,
    RegistrationError,
    SlotsError,
    TerminatedError,
    is_lasting,
)
from deeprec_spark.runtime.orders import StorageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestartOptions:
    """What happens when a node that the job cannot do without fails. Spark itself would not try again.

    Args:
        max_restarts: how often the nodes of a fit are started again from one checkpoint. A save that was made since
            begins the count anew, so that a job of weeks is not ended by a few failures far apart.
        backoff_secs: the pause before the first of them; doubled each time, up to `max_backoff_secs`.
        slots_secs: how long a restart waits for Spark to replace executors that were lost.
    """

    max_restarts: int = 3
    backoff_secs: float = 2.0
    max_backoff_secs: float = 60.0
    slots_secs: float = 180.0

    def __post_init__(self) -> None:
        for name in ("max_restarts", "backoff_secs", "max_backoff_secs", "slots_secs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative. Received: {name}={getattr(self, name)}")


def with_restarts(
    attempt: Callable[[], None],
    options: RestartOptions,
    *,
    on_restart: Callable[[JobError], None],
    interrupt: threading.Event,
    saves: Callable[[], int] = lambda: 0,
) -> None:
    """Make attempts until one succeeds.

    An attempt that fails by a NodeError which is not `lasting` is followed by another one, and so is a restart whose
    nodes did not come up, or could not read their checkpoint for the moment. Everything else is raised.

    Arguments:
        on_restart: told of the error before each restart.
        interrupt: set by whoever wants the pauses to end: then a TerminatedError is raised.
        saves: how many checkpoints were written; once there are more, the restarts before do not count.
    """
    restarts, saved, restarted = 0, saves(), False
    slots_until: float | None = None
    while True:
        try:
            attempt()
            return
        except SlotsError as error:  # noqa: PERF203  # to try again is what the loop is for
            if slots_until is None or time.monotonic() > slots_until:
                raise
            logger.info("Waiting for task slots to start again: %s", str(error).splitlines()[0])
            _pause(options.backoff_secs, interrupt, error)
        except (NodeError, RegistrationError, StorageError) as error:
            if isinstance(error, NodeError) and error.lasting:
                raise
            if isinstance(error, (RegistrationError, StorageError)) and not restarted:
                raise
            if saves() > saved:
                restarts, saved = 0, saves()
            if restarts >= options.max_restarts:
                if restarts:
                    error.args = (
                        f"{error.args[0]}\nThe job had been restarted {restarts} times (max_restarts), and made no "
                        "save since.",
                    )
                raise
            restarts, restarted = restarts + 1, True
            pause = min(options.backoff_secs * 2 ** (restarts - 1), options.max_backoff_secs)
            logger.warning(
                "Restart %d of at most %d in %.0f s, because: %s",
                restarts,
                options.max_restarts,
                pause,
                error,
            )
            _pause(pause, interrupt, error)
            on_restart(error)
            slots_until = time.monotonic() + options.slots_secs


@contextmanager
def going_back(*, restart: bool) -> Iterator[None]:
    """Around reading a checkpoint in the driver: where it cannot for the moment, a `restart` is to be tried again.

    Raises:
        StorageError: in a restart, for an OSError that may pass.
    """
    try:
        yield
    except OSError as error:
        # A checkpoint that is not found may be one that the storage did not give.
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        if not restart or is_lasting(cause):
            raise
        message = f"The checkpoint to go on from could not be read: {type(error).__name__}: {error}"
        raise StorageError(message, type(error).__name__) from error


def _pause(seconds: float, interrupt: threading.Event, error: JobError) -> None:
    if interrupt.wait(seconds):
        raise TerminatedError(
            "SIGTERM came while the job was waiting to start its nodes again. Submit it again: it goes on from its "
            f"last checkpoint. Received: {str(error).splitlines()[0]}"
        ) from error
