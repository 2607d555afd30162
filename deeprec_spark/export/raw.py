"""Raw values to prepared columns inside an exported graph: `prepare_dataframe` in TensorFlow ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec

Tensor = Any  # tf.Tensor; TensorFlow ships no types
_DTYPES = {"float32": tf.float32, "int64": tf.int64, "string": tf.string}


def raw_signature(spec: FeatureSpec) -> dict[str, Any]:
    """A `tf.TensorSpec` for each feature as a caller of the deployed model gives it.

    Dense and categorical features are `[batch]`, dense vectors `[batch, width]`, sequences `[batch, length]` of any
    length.
    """
    return {
        feature.name: tf.TensorSpec(_raw_shape(feature), _DTYPES[feature.raw_type], name=feature.name)
        for feature in spec.features
    }


def prepared_signature(spec: FeatureSpec) -> dict[str, Any]:
    """A `tf.TensorSpec` for each prepared column: what the model itself takes."""
    return {
        feature.name: tf.TensorSpec(
            _prepared_shape(feature),
            tf.float32 if feature.kind is FeatureKind.DENSE else tf.int64,
            name=feature.name,
        )
        for feature in spec.features
    }


def prepare(spec: FeatureSpec, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prepared columns from raw ones.

    Strings are hashed by Fingerprint64, bit for bit as in Spark. A float that is NaN or infinite is missing and takes
    the feature's default before its transformation. Tensors have no null for integers and strings: a caller that
    misses one sends the feature's default (`""` and -1 where the spec names none). In sequences `""` and the padding
    value are no ids; the last `max_length` ids count.
    """
    return {feature.name: _prepare(feature, raw[feature.name]) for feature in spec.features}


def fingerprint64(strings: Tensor) -> Tensor:
    """FarmHash Fingerprint64 as int64, in the shape of the strings."""
    flat = tf.reshape(strings, [-1])
    return tf.reshape(tf.bitcast(tf.fingerprint(flat), tf.int64), tf.shape(strings))


def _prepare(feature: Feature, raw: Tensor) -> Tensor:
    if feature.kind is FeatureKind.DENSE:
        return _dense(feature, raw)
    ids = fingerprint64(raw) if feature.raw_type == "string" else raw
    if feature.kind is FeatureKind.CATEGORICAL:
        return ids
    real = tf.not_equal(raw, "") if feature.raw_type == "string" else tf.not_equal(raw, feature.padding_value)
    last = tf.ragged.boolean_mask(ids, real)[:, -(feature.max_length or 1) :]
    return last.to_tensor(default_value=feature.padding_value, shape=[None, feature.max_length])


def _dense(feature: Feature, raw: Tensor) -> Tensor:
    number = tf.cast(raw, tf.float32)
    default = 0.0 if feature.default is None else float(feature.default)
    number = tf.where(tf.math.is_finite(number), number, tf.constant(default, tf.float32))
    if feature.transform == "log1p":
        # In double, as Spark computes it: the float32 results are the same.
        return tf.cast(tf.math.log1p(tf.maximum(tf.cast(number, tf.float64), 0.0)), tf.float32)
    return number


def _raw_shape(feature: Feature) -> list[int | None]:
    if feature.kind is FeatureKind.SEQUENCE:
        return [None, None]
    return [None] if feature.width is None else [None, feature.width]


def _prepared_shape(feature: Feature) -> list[int | None]:
    if feature.kind is FeatureKind.SEQUENCE:
        return [None, feature.max_length]
    return [None] if feature.width is None else [None, feature.width]
