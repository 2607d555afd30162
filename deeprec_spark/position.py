"""Where a fit is in its data: what a checkpoint keeps of it, and how a fit goes on from there."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deeprec_spark.data.arrays import pack_arrays, unpack_arrays
from deeprec_spark.runtime.cut import Cut

Arrays = Sequence[npt.NDArray[Any]]

_VERSION = 1


@dataclass(frozen=True)
class FitIdentity:
    """What must be the same for a fit to go on where another one was cut short.

    `data` is the fingerprint of the staged rows. `num_workers` is that for which leases are cut. In sync mode it must
    be the same, since each rank has its own rows; in async mode the old leases are kept. `columns` are the features,
    labels and weight that are trained, `cutting` the rules by which leases are cut: another release may have others.
    `class_weight` and `objective` say what is minimized and measured. Older checkpoints say nothing of the last ones.
    """

    mode: str
    epochs: int
    initial_epoch: int
    batch_size: int
    steps_per_epoch: int | None
    shuffle: bool
    seed: int
    num_workers: int
    data: str
    shuffle_rows: int = 0
    columns: str = ""
    cutting: str = ""
    class_weight: str = ""
    objective: str = ""

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """What differs from another identity, one text each: `epochs=3 instead of 2`."""
        mine = asdict(self)
        unsaid = ("columns", "cutting", "class_weight", "objective")
        other = {"shuffle_rows": 0, **{name: mine[name] for name in unsaid}, **other}
        if self.mode == "async":
            del mine["num_workers"]
        return [
            f"{name}={mine[name]!r} instead of {other.get(name)!r}"
            for name in mine
            if mine[name] != other.get(name)
        ]


@dataclass(frozen=True)
class EpochPosition:
    """Where the workers are in an epoch.

    Attributes:
        steps: of each synchronous worker.
        queue: what is done of the leases (async).
        metrics: states of all workers together, of the rows that are done.
        workers: each worker's own random state, and its metric states where it goes on with them itself.
        samples, updates: rows and updates of this epoch so far.
        logs: the metrics of the epoch once all its rows are trained; None before.
    """

    steps: int = 0
    queue: Mapping[str, Any] | None = None
    metrics: Arrays = ()
    workers: Sequence[WorkerArrays] = ()
    samples: int = 0
    updates: int = 0
    logs: Mapping[str, float] | None = None

    def resume(self) -> dict[str, Any]:
        """What the workers are told to go on from here."""
        return {"steps": self.steps, "workers": [worker.to_dict() for worker in self.workers]}

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "steps": self.steps,
            "queue": self.queue,
            "metrics": _text(self.metrics),
            "workers": [worker.to_dict() for worker in self.workers],
            "samples": self.samples,
            "updates": self.updates,
            "logs": None if self.logs is None else dict(self.logs),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EpochPosition:
        """Read back what `to_dict` gave."""
        workers = [WorkerArrays.from_dict(worker) for worker in data["workers"]]
        return cls(**{**data, "metrics": _arrays(data["metrics"]), "workers": workers})


@dataclass(frozen=True)
class WorkerArrays:
    """One worker's metric states and random state."""

    metrics: Arrays = ()
    random: Arrays = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON values; a train phase's `resume` has them for each worker."""
        return {"metrics": len(self.metrics), "arrays": _text([*self.metrics, *self.random])}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorkerArrays:
        """Read back what `to_dict` gave."""
        arrays, count = _arrays(data["arrays"]), data["metrics"]
        return cls(arrays[:count], arrays[count:])


@dataclass(frozen=True)
class FitPosition:
    """Where a fit is: epochs done, the running epoch, and what the driver itself must know to go on.

    Attributes:
        fit: whose position it is.
        epoch: the epoch of `fit` that is running or comes next.
        done_epochs: epochs of all fits that are behind.
        history: of the epochs of this fit.
        within: where the running epoch is; None at its start, where no worker has a state of its own yet.
        learning_rate: what a callback has set.
        step: updates of the model when this fit began.
        rows: rows of the epochs of this fit that are behind.
        finished: whether the fit is over: there is nothing to go on with.
    """

    fit: Mapping[str, Any]
    epoch: int
    done_epochs: int
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    within: EpochPosition | None = None
    learning_rate: float | None = None
    step: int = 0
    rows: int = 0
    finished: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the `position` of a manifest."""
        return {
            "version": _VERSION,
            "fit": dict(self.fit),
            "epoch": self.epoch,
            "done_epochs": self.done_epochs,
            "history": {name: list(values) for name, values in self.history.items()},
            "within": None if self.within is None else self.within.to_dict(),
            "learning_rate": self.learning_rate,
            "step": self.step,
            "rows": self.rows,
            "finished": self.finished,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> FitPosition | None:
        """Read back what `to_dict` gave; None where there is none, or one of another version."""
        if data is None or data.get("version") != _VERSION:
            return None
        values = {name: value for name, value in data.items() if name != "version"}
        within = None if data["within"] is None else EpochPosition.from_dict(data["within"])
        return cls(**{**values, "within": within})


def worker_arrays(cut: Cut) -> dict[int, WorkerArrays]:
    """What the workers told at a cut, by rank; metric states only of those that were in the phase."""
    found = {}
    for rank, state in cut.workers.items():
        arrays = unpack_arrays(state.blob) if state.blob else []
        count = int(state.data.get("metrics", 0))
        found[rank] = WorkerArrays(arrays[:count], arrays[count:])
    return found


def _text(arrays: Arrays) -> str:
    return base64.b64encode(pack_arrays([np.asarray(array) for array in arrays])).decode()


def _arrays(text: str) -> list[npt.NDArray[Any]]:
    return unpack_arrays(base64.b64decode(text))
