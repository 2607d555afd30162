"""What the leases of asynchronous epochs ask of the coordinator, and what the end of an epoch costs: by epoch size."""

from __future__ import annotations

import math
from collections.abc import Mapping

from benchmarks.node_load import NodeLoad
from benchmarks.plots import table
from deeprec_spark.runtime.node_service import SLOWED


def _rules() -> tuple[int, int]:
    """Leases of a worker in an epoch, and rows of the largest."""
    # Only when asked: it imports TensorFlow, which the processes that this benchmark starts do not need.
    from deeprec_spark.epochs import LEASES_PER_WORKER, MAX_LEASE_ROWS

    return LEASES_PER_WORKER, MAX_LEASE_ROWS


def lease_rows(epoch_rows: int, workers: int, batch: int) -> int:
    """Rows of a lease, as `EpochPlan` cuts an epoch: whole batches, at least one."""
    leases, largest = _rules()
    share = min(max(epoch_rows // (workers * leases), batch), largest)
    return max(share // batch, 1) * batch


def smallest_epoch(samples_per_s: float, leases_per_s: float, workers: int, batch: int) -> int | None:
    """Rows of the smallest epoch whose leases are large enough for so many leases a second; None if none is.

    0 if leases of one batch are.
    """
    needed = samples_per_s / leases_per_s
    if needed <= batch:
        return 0
    leases, largest = _rules()
    rows = math.ceil(needed / batch) * batch
    return None if rows > max(largest // batch, 1) * batch else rows * workers * leases


def reserve_rows(workers: int, batch: int) -> int:
    """Rows at the end of an epoch in which the first step of a lease waits until the step before it has ended."""
    return SLOWED * (workers - 1) * batch


def text(rates: Mapping[int, float], batch: int, load: NodeLoad) -> str:
    """Both, by number of workers, with samples a second at best; and which sizes of epochs that matters for."""
    leases, largest = _rules()
    rows = []
    for workers, rate in sorted(rates.items()):
        epoch = smallest_epoch(rate, load.leases_per_s, workers, batch)
        reserve = reserve_rows(workers, batch)
        rows.append(
            [
                f"{workers:,}",
                f"{rate:,.0f}",
                f"{rate / batch:,.0f}",
                f"{rate / lease_rows(largest * workers * leases, workers, batch):,.1f}",
                "none" if epoch is None else "any" if epoch == 0 else f"{epoch:,}",
                f"{reserve:,}",
                f"{10 * reserve:,}",
            ]
        )
    header = [
        "workers",
        "samples/s, at best",
        "leases/s of one batch",
        "of the largest leases",
        "rows of an epoch, at least",
        "its last rows, one step at a time",
        "a tenth of it, at rows",
    ]
    return "\n\n".join(
        [
            f"Asynchronous workers lease rows: an epoch has {leases} leases for each worker, of whole "
            f"batches, {largest:,} rows at most. The coordinator was seen to give, begin and complete "
            f"{load.leases_per_s:,.0f} leases a second to {load.nodes} nodes, which had to share its cores here. Small "
            "epochs have small leases, and so more of them for the same samples: below the epoch in the fifth column "
            "the coordinator would hold workers back. Synchronous workers have their rows dealt out beforehand.",
            table(header, rows),
            f"Near the end of an epoch a worker begins no lease while a step of the one before is under way, unless "
            f"{SLOWED} (workers - 1) times its rows under way (here one batch) are left to hand out: others could have "
            "taken that lease. In those last rows pulls do not run ahead from one lease to the next. In an epoch "
            "with no more rows than that, where leases are of one batch, no two steps of a worker ever overlap; the "
            "last column is the epoch of which it is a tenth.",
        ]
    )
