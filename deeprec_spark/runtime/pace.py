"""The pace of a worker's steps, as its main asks for it: free, or held by the rules of semi-synchronous training."""

from __future__ import annotations

from deeprec_spark.runtime.backup import BackupStore
from deeprec_spark.runtime.semi_sync import SemiSyncReport


class Pace:
    """A free pace; the base of those that are not.

    The training thread calls `enter`, then for each step either `skip`, or `may_begin`, `begun` and `ended`, and then
    `used`, and `starving` before it waits for rows; at last `leave`. The thread that reads calls `reading` for each
    batch.
    """

    def enter(self) -> None:
        """A phase of training begins."""

    def reading(self) -> None:
        """A batch was read."""

    def starving(self) -> None:
        """There is no row to train right now: all that had begun has ended."""

    @property
    def behind(self) -> bool:
        """Whether the next batch is to be left out, because its step is over."""
        return False

    def skip(self) -> None:
        """The next batch was left out."""

    def may_begin(self, *, wait: bool) -> bool:
        """Whether the next step may begin; with `wait` it does not return before."""
        return True

    def begun(self) -> None:
        """The step that may begin has begun."""

    def ended(self) -> None:
        """A step that had begun was pushed."""

    def used(self, samples: int) -> int:
        """How many of the samples of the step that was skipped or has ended have updated the model."""
        return samples

    def leave(self) -> SemiSyncReport:
        """The phase is over for this worker; what its pace has cost."""
        return SemiSyncReport()


class BackupPace(Pace):
    """Of a worker that steps may go on without: it leaves out those that are over."""

    def __init__(self, rank: int, store: BackupStore) -> None:
        self._rank = rank
        self._store = store
        self._void = False
        self._report = SemiSyncReport()

    def enter(self) -> None:
        """See `Pace`."""
        self._report = SemiSyncReport()

    @property
    def behind(self) -> bool:
        """See `Pace`."""
        return self._store.behind > 0

    def skip(self) -> None:
        """See `Pace`."""
        self._store.behind -= 1
        self._void = True

    def ended(self) -> None:
        """See `Pace`."""
        self._void = self._store.dropped

    def used(self, samples: int) -> int:
        """See `Pace`."""
        if not self._void:
            return samples
        self._report.drop(self._rank, samples)
        return 0

    def leave(self) -> SemiSyncReport:
        """See `Pace`."""
        return self._report
