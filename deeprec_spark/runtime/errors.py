"""What can go wrong with the nodes of a job."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass


class JobError(RuntimeError):
    """Base of every error that this package raises about nodes, slots and connections."""


class SlotsError(JobError):
    """The cluster has fewer task slots than the job has nodes."""


class RegistrationError(JobError):
    """Nodes did not register before the deadline."""


class ConnectionLostError(JobError):
    """The other side of a call is not there (any more)."""


class RemoteError(JobError):
    """The other side answered a call with an unexpected error; its message is quoted."""


class JobEndedError(JobError):
    """The job ended while this node waited for something."""


class StaleNodeError(JobError):
    """A newer copy of this rank has taken its place; this one must end."""


@dataclass(frozen=True)
class NodeFailure:
    """One node's failure as the driver saw it.

    `node` says which ("worker 1 (rank 2) on host a"), `reason` in one line why, `traceback` is the node's own
    where it could still report one, `log_tail` its last lines of output. `lasting`: it would fail again.
    """

    rank: int
    node: str
    reason: str
    traceback: str = ""
    log_tail: tuple[str, ...] = ()
    lasting: bool = False

    def describe(self) -> str:
        """Several lines for an error message."""
        lines = [f"{self.node}: {self.reason}"]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        elif self.log_tail:
            lines.append("Its last log lines:")
            lines.extend(f"    {line}" for line in self.log_tail)
        return "\n".join(lines)


class NodeError(JobError):
    """One or more nodes failed; `failures` has the likely cause first.

    `lasting` says that another attempt would fail as well: the model, the data or a setting is at fault.
    """

    def __init__(self, message: str, failures: Sequence[NodeFailure] = ()) -> None:
        self.failures = tuple(failures)
        self.lasting = any(failure.lasting for failure in failures)
        super().__init__("\n".join([message, *(failure.describe() for failure in self.failures)]))


def is_lasting(error: BaseException) -> bool:
    """Whether an error in a node would come again: it is the model's or the data's, not the cluster's.

    Example:
        >>> is_lasting(ValueError("bad model")), is_lasting(ConnectionLostError("a server is gone"))
        (True, False)
    """
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return True
    return not isinstance(error, (JobError, TimeoutError, OSError, MemoryError))


class TerminatedError(JobError):
    """The driver was asked to end (SIGTERM) and did, after it had saved."""


def describe_exit(code: int) -> str:
    """`ended with exit code 1` or `was killed by SIGKILL`, with a hint where one helps."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (out of memory? see spark.executor.memoryOverhead)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
