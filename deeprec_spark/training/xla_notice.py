"""What keeps XLA from compiling a step that was asked to be compiled, said in the log."""

from __future__ import annotations

import logging

from deeprec_spark.data.batch import Batch
from deeprec_spark.training.lookups import LookupPlan

logger = logging.getLogger(__name__)


class XlaNotice:
    """Logs one warning where few or no steps will be compiled: XLA compiles for one number of samples and of ids.

    Args:
        wanted: whether XLA was asked for; nothing is said otherwise.
    """

    def __init__(self, wanted: bool) -> None:
        self._pending = wanted

    def look_at(self, plan: LookupPlan, batch: Batch) -> None:
        """Look at the model's lookups and the first batch that is trained.

        Lookups whose number of ids does not follow from that of the samples keep all steps from being compiled. In
        groups, batches of equally many groups seldom have equally many samples.
        """
        if self._pending:
            self._pending = False
            _warn(plan, batch)


def _warn(plan: LookupPlan, batch: Batch) -> None:
    changing = [call for call in plan.calls if not call.fixed]
    padded = sorted({call.column for call in changing if call.column is not None})
    computed = sorted({call.table for call in changing if call.column is None})
    if padded or computed:
        causes = [
            *([f"padded sequences that no combiner sums (columns {padded})"] if padded else []),
            *([f"ids that the model computes (tables {computed})"] if computed else []),
        ]
        logger.warning(
            "xla=True has no effect: batches of this model differ in their number of ids, by %s. Steps are computed "
            "without XLA; set xla=False, or give such layers a combiner (or no padding_value where sequences are full) "
            "and compute ids in feature preparation",
            " and ".join(causes),
        )
    elif batch.groups is not None:
        logger.warning(
            "xla=True has little effect on data in groups: only batches that have as many groups and samples as the "
            "first one (%d groups of %d samples) are compiled, all others are computed without XLA. Set xla=False, or "
            "prepare the data flat",
            batch.rows, batch.size,
        )  # fmt: skip
