"""Raw values in the graph give what Spark's preparation gives, value by value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from deeprec_spark.data.columns import decode
from deeprec_spark.export import raw
from deeprec_spark.features.arrow import prepare_batch
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec
from deeprec_spark.udfs import functions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CATEGORICAL, SEQUENCE, DENSE = FeatureKind.CATEGORICAL, FeatureKind.SEQUENCE, FeatureKind.DENSE
SPEC = FeatureSpec(
    features=(
        Feature(name="name", kind=CATEGORICAL, raw_type="string"),
        Feature(name="id", kind=CATEGORICAL, raw_type="int64"),
        Feature(name="words", kind=SEQUENCE, raw_type="string", max_length=3, padding_value=-7),
        Feature(name="seen", kind=SEQUENCE, raw_type="int64", max_length=2),
        Feature(name="plain", kind=DENSE, raw_type="float32", default=1.5),
        Feature(name="logged", kind=DENSE, raw_type="float32", transform="log1p", default=9.0),
        Feature(name="whole", kind=DENSE, raw_type="int64", transform="log1p"),
        Feature(name="vector", kind=DENSE, raw_type="float32", width=2, default=0.5),
    )
)
NAMES = ["", "a", "Ärger über Öl", "日本", "x" * 300, "a\x00b"]
NUMBERS = [0.0, -3.0, 1e-9, 12345.678, 3.0e38, math.nan]
ROWS: dict[str, list[Any]] = {
    "name": NAMES,
    "id": [0, -1, 2**63 - 1, -(2**63), 7, 8],
    "words": [["a", "b", "c", "d"], [], ["日本"], ["a", "a"], ["z"], ["b", "c", "d"]],
    "seen": [[1], [], [1, 2, 3], [-5, 9], [4, 4, 4, 4], [2**63 - 1]],
    "plain": NUMBERS,
    "logged": NUMBERS,
    "whole": [0, 1, -4, 2**31, 2**53 + 1, 10],
    "vector": [[1.0, 2.0], [math.nan, 3.0], [math.inf, -math.inf], [0.0, -0.0], [1e30, 1.0], [5.0, 6.0]],
}
PADDED = {
    **ROWS,
    "words": [row + [""] * (4 - len(row)) for row in ROWS["words"]],
    "seen": [[-1] * (4 - len(row)) + row for row in ROWS["seen"]],  # wherever the padding stands
}


def in_graph() -> dict[str, Any]:
    """The prepared columns that the graph makes of PADDED."""
    signature = raw.raw_signature(SPEC)
    function = tf.function(lambda columns: raw.prepare(SPEC, columns)).get_concrete_function(signature)
    prepared = function(**{name: tf.constant(PADDED[name], spec.dtype) for name, spec in signature.items()})
    for name, spec in raw.prepared_signature(SPEC).items():
        assert spec.is_compatible_with(prepared[name])
    return {name: tensor.numpy() for name, tensor in prepared.items()}


def test_strings_are_hashed_as_in_spark() -> None:
    expected = functions.fingerprint64(NAMES).to_numpy()
    np.testing.assert_array_equal(raw.fingerprint64(tf.constant(NAMES)), expected)
    square = raw.fingerprint64(tf.reshape(tf.constant(NAMES), [2, 3]))
    np.testing.assert_array_equal(square, expected.reshape(2, 3))
    assert raw.fingerprint64(tf.zeros([0, 4], tf.string)).shape == (0, 4)


def test_graph_and_spark_agree(spark: SparkSession) -> None:
    from deeprec_spark.features.prepare import prepare_dataframe

    schema = (
        "name string, id long, words array<string>, seen array<long>, plain float, logged float, whole long, "
        "vector array<float>"
    )
    rows = list(zip(*(ROWS[name] for name in SPEC.feature_names), strict=True))
    frame = prepare_dataframe(spark.createDataFrame(rows, schema).coalesce(1), SPEC, labels=False)
    table = pa.Table.from_pylist([row.asDict() for row in frame.collect()], _arrow_schema())
    expected = decode(table, SPEC, labels=False).features
    found = in_graph()
    for name in SPEC.feature_names:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_values_are_those_written_by_hand() -> None:
    found = in_graph()
    assert found["seen"].tolist() == [[1, -1], [-1, -1], [2, 3], [-5, 9], [4, 4], [2**63 - 1, -1]]
    assert found["words"][:, 2].tolist()[1:5] == [-7] * 4
    assert found["words"][0].tolist() == functions.fingerprint64(["b", "c", "d"]).to_pylist()
    assert found["logged"][[0, 1, 5]].tolist() == [0.0, 0.0, np.float32(math.log(10))]
    assert found["plain"][[1, 5]].tolist() == [-3.0, 1.5]
    assert found["vector"].tolist()[1:3] == [[0.5, 3.0], [0.5, 0.5]]


@pytest.mark.parametrize("length", [0, 1, 9])
def test_sequences_may_have_any_length(length: int) -> None:
    spec = FeatureSpec(features=SPEC.features[2:4])
    prepared = raw.prepare(spec, {"words": tf.fill([2, length], "w"), "seen": tf.ones([2, length], tf.int64)})
    assert {name: tensor.shape.as_list() for name, tensor in prepared.items()} == {
        "words": [2, 3],
        "seen": [2, 2],
    }
    assert int(tf.reduce_sum(tf.cast(prepared["seen"] == 1, tf.int32))) == 2 * min(length, 2)


# Strings that are no ids, padding in front, between and behind, and more ids than are kept.
GAPS: dict[str, tuple[list[Any], list[list[Any]]]] = {
    "words": (
        [["a", "", "b"], ["", "a"], [""], [], ["a", "b", "", "c", "d", ""]],
        [["a", "b"], ["a"], [], [], ["b", "c", "d"]],
    ),
    "seen": (
        [[1, 2, 3, -1, 4], [-1, 5], [-1], [], [-1, -1, 2**63 - 1, 0]],
        [[2, 3, 4], [5], [], [], [2**63 - 1, 0]],
    ),
}


@pytest.mark.parametrize("name", GAPS)
def test_what_is_no_id_is_left_out_alike_before_the_last_are_kept(name: str) -> None:
    lists, kept = GAPS[name]
    text = name == "words"
    feature = Feature(name=name, kind=SEQUENCE, raw_type="string" if text else "int64", max_length=3)
    spec = FeatureSpec(features=(feature,))
    expected = [functions.fingerprint64(row).to_pylist() for row in kept] if text else kept
    arrow_type = pa.list_(pa.string() if text else pa.int64())
    for gaps in (lists, [[None, *row[:1], None, *row[1:], None] for row in lists]):
        prepared = prepare_batch(pa.record_batch({name: pa.array(gaps, arrow_type)}), spec, labels=False)
        assert prepared[name].to_pylist() == expected
    width = max(map(len, lists))
    fill = "" if text else -1
    padded = [row + [fill] * (width - len(row)) for row in lists]
    found = raw.prepare(spec, {name: tf.constant(padded, tf.string if text else tf.int64)})[name]
    assert found.numpy().tolist() == [row + [-1] * (3 - len(row)) for row in expected]


def test_a_hash_that_equals_the_padding_value_is_an_id_alike() -> None:
    padding = functions.fingerprint64(["b"]).to_pylist()[0]
    feature = Feature(name="w", kind=SEQUENCE, raw_type="string", max_length=2, padding_value=padding)
    spec = FeatureSpec(features=(feature,))
    expected = functions.fingerprint64(["b", "c"]).to_pylist()
    prepared = prepare_batch(pa.record_batch({"w": [["a", "b", "c"]]}), spec, labels=False)
    assert prepared["w"].to_pylist() == [expected]
    assert raw.prepare(spec, {"w": tf.constant([["a", "b", "c"]])})["w"].numpy().tolist() == [expected]


def _arrow_schema() -> pa.Schema:
    types = {
        CATEGORICAL: pa.int64(),
        SEQUENCE: pa.list_(pa.int64()),
        DENSE: pa.float32(),
    }
    return pa.schema(
        [(f.name, pa.list_(pa.float32()) if f.width is not None else types[f.kind]) for f in SPEC.features]
    )
