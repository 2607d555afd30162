"""Recommendation models built from a FeatureSpec; each returns an uncompiled functional Keras model."""

from deeprec_spark.models.deepfm import DeepFMOptions, deepfm
from deeprec_spark.models.din import DINOptions, din
from deeprec_spark.models.dlrm import DLRMOptions, dlrm
from deeprec_spark.models.dssm import DSSMOptions, dssm, towers
from deeprec_spark.models.mmoe import MMoEOptions, mmoe
from deeprec_spark.models.options import ModelOptions
from deeprec_spark.models.registry import create, names, options_of, register
from deeprec_spark.models.wdl import WDLOptions, wdl

__all__ = [
    "DINOptions",
    "DLRMOptions",
    "DSSMOptions",
    "DeepFMOptions",
    "MMoEOptions",
    "ModelOptions",
    "WDLOptions",
    "create",
    "deepfm",
    "din",
    "dlrm",
    "dssm",
    "mmoe",
    "names",
    "options_of",
    "register",
    "towers",
    "wdl",
]
