"""The only room that imports bigdl.friesian: the classes that ours stand under, and the way to and from them.

Our FeatureTable keeps Friesian's names and signatures, and does its work in PySpark, so that it also runs
without BigDL (on Spark 4, through Spark Connect). Where BigDL is installed and Spark is 3 it is a subclass of
Friesian's, which other code of BigDL may ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyspark

from deeprec_spark import orca

if TYPE_CHECKING:
    from deeprec_spark.features.table import FeatureTable

__all__ = ["from_friesian", "friesian_class", "to_friesian"]


def friesian_class(name: str) -> type[Any]:
    """Friesian's class of this name (FeatureTable, StringIndex, TargetCode); `object` where BigDL cannot run."""
    if not orca.installed() or not pyspark.__version__.startswith("3."):
        return object
    try:
        module = orca.import_bigdl("bigdl.friesian.feature")
    except orca.OrcaError:
        return object
    found: type[Any] = getattr(module, name)
    return found


def to_friesian(table: FeatureTable) -> Any:
    """A FeatureTable of Friesian itself over the same DataFrame: its methods run on BigDL's JVM classes.

    Raises:
        OrcaError: BigDL is not installed.

    Example:
        >>> to_friesian(table).gen_string_idx("city")  # Friesian's own, in the JVM
    """
    return orca.import_bigdl("bigdl.friesian.feature").FeatureTable(table.df)


def from_friesian(table: Any) -> FeatureTable:
    """Our FeatureTable over the DataFrame of Friesian's."""
    from deeprec_spark.features.table import FeatureTable

    return FeatureTable(table.df)
