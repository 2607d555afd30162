"""Feature functions that are the same in training (Spark) and in serving (numpy and pyarrow).

`functions` holds the plain versions, `columns` the Spark ones; importing this package imports neither,
so that a serving process never loads pyspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeprec_spark.udfs.columns import register_udfs

__all__ = ["register_udfs"]


def __getattr__(name: str) -> Any:
    if name == "register_udfs":
        from deeprec_spark.udfs import columns

        return columns.register_udfs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
