"""Features: FeatureSpec, FeatureTable, the pipelines of known data sets, generated data.

Importing this package imports no pyspark: serving reads specs from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label

if TYPE_CHECKING:
    from deeprec_spark.features.criteo import prepare_criteo
    from deeprec_spark.features.infer import infer_spec
    from deeprec_spark.features.movielens import prepare_movielens
    from deeprec_spark.features.prepare import prepare_dataframe
    from deeprec_spark.features.synthetic import generate_criteo
    from deeprec_spark.features.table import FeatureTable, StringIndex, TargetCode

__all__ = [
    "Feature",
    "FeatureKind",
    "FeatureSpec",
    "Label",
    "FeatureTable",
    "StringIndex",
    "TargetCode",
    "infer_spec",
    "prepare_dataframe",
    "prepare_criteo",
    "prepare_movielens",
    "generate_criteo",
]

_HOMES = {
    "FeatureTable": "table",
    "StringIndex": "table",
    "TargetCode": "table",
    "infer_spec": "infer",
    "prepare_dataframe": "prepare",
    "prepare_criteo": "criteo",
    "prepare_movielens": "movielens",
    "generate_criteo": "synthetic",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
