"""Arrow columns to batch arrays."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeprec_spark.data.columns import decode, pad_sequences
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label

CATEGORICAL = Feature(name="c", kind=FeatureKind.CATEGORICAL, raw_type="int64")
DENSE = Feature(name="d", kind=FeatureKind.DENSE, raw_type="float32")
VECTOR = Feature(name="v", kind=FeatureKind.DENSE, raw_type="float32", width=2)
SEQUENCE = Feature(name="s", kind=FeatureKind.SEQUENCE, raw_type="int64", max_length=3, padding_value=-1)


def test_every_kind() -> None:
    spec = FeatureSpec(
        features=(CATEGORICAL, DENSE, VECTOR, SEQUENCE),
        labels=(Label(name="y"), Label(name="k", kind="multiclass")),
    )
    table = pa.table(
        {
            "c": pa.array([-1, 2**63 - 1, -(2**63)]),
            "d": pa.array([0.5, 1.0, -2.0]),
            "v": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
            "s": pa.array([[1, 2, 3, 4], [], [9]]),
            "y": pa.array([0, 1, 1]),
            "k": pa.array([0, 7, 2]),
            "w": pa.array([1.0, 2.0, 0.5]),
            "extra": pa.array(["a", "b", "c"]),
        }
    )
    batch = decode(table, spec, sample_weight="w")
    assert batch.features["c"].dtype == np.int64
    assert batch.features["c"].tolist() == [-1, 2**63 - 1, -(2**63)]
    assert batch.features["d"].dtype == np.float32
    assert batch.features["v"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert batch.features["s"].tolist() == [[2, 3, 4], [-1, -1, -1], [9, -1, -1]]
    assert batch.labels["y"].dtype == np.float32
    assert batch.labels["k"].dtype == np.int64
    assert batch.sample_weight is not None
    assert batch.sample_weight.tolist() == [1.0, 2.0, 0.5]
    assert batch.size == 3
    assert decode(table, spec, labels=False).labels == {}


def test_slices_and_chunks_of_lists_read_their_own_rows() -> None:
    table = pa.table({"s": pa.chunked_array([[[1], [2, 3]], [[], [4, 5, 6, 7]]])})
    spec = FeatureSpec(features=(SEQUENCE,))
    expected = [[1, -1, -1], [2, 3, -1], [-1, -1, -1], [5, 6, 7]]
    assert decode(table, spec).features["s"].tolist() == expected
    assert decode(table.slice(1, 2), spec).features["s"].tolist() == expected[1:3]
    assert decode(table.slice(3, 1), spec).features["s"].tolist() == expected[3:]
    assert decode(table.slice(0, 0), spec).features["s"].shape == (0, 3)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, 0], pa.int8()),
        pa.array([True, False]),
        pa.array([Decimal("1.00"), Decimal("0.00")]),
        pa.array([1.0, 0.0], pa.float64()),
        pa.array([1, 0], pa.uint32()),
    ],
    ids=str,
)
def test_numbers_of_any_type_are_dense(values: pa.Array) -> None:
    batch = decode(pa.table({"d": values}), FeatureSpec(features=(DENSE,)))
    assert batch.features["d"].dtype == np.float32
    assert batch.features["d"].tolist() == [1.0, 0.0]


def test_unsigned_ids_keep_their_bits() -> None:
    table = pa.table({"c": pa.array([2**64 - 1], pa.uint64())})
    assert decode(table, FeatureSpec(features=(CATEGORICAL,))).features["c"].tolist() == [-1]


@pytest.mark.parametrize(
    ("feature", "values", "message"),
    [
        (CATEGORICAL, pa.array([1.5]), "'c' must hold integers.*double"),
        (CATEGORICAL, pa.array(["x"]), "'c' must hold integers.*string"),
        (CATEGORICAL, pa.array([1, None]), "'c' holds 1 nulls"),
        (DENSE, pa.array([None, None], pa.null()), "'d' holds 2 nulls"),
        (DENSE, pa.array(["x"]), "'d' must hold numbers"),
        (SEQUENCE, pa.array([1]), "'s' must hold lists"),
        (SEQUENCE, pa.array([[1], None]), "'s' holds 1 null lists"),
        (SEQUENCE, pa.array([[1, None]]), "'s' hold nulls"),
        (VECTOR, pa.array([[1.0, 2.0], [3.0]]), "'v' must have width 2. Received: a value of width 1"),
    ],
)
def test_wrong_data_names_the_column(feature: Feature, values: pa.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(pa.table({feature.name: values}), FeatureSpec(features=(feature,)))


def test_missing_columns_are_listed() -> None:
    spec = FeatureSpec(features=(CATEGORICAL, DENSE))
    with pytest.raises(ValueError, match=r"no column \['d'\].*Received: columns \['c'\]"):
        decode(pa.table({"c": [1]}), spec)


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), max_size=8), st.integers(1, 5))
def test_padding_keeps_the_last_values(lists: list[list[int]], length: int) -> None:
    offsets = np.cumsum([0, *map(len, lists)])
    values = np.array([value for row in lists for value in row], dtype=np.int64)
    padded = pad_sequences(offsets, values, length, -7)
    assert padded.shape == (len(lists), length)
    for row, original in zip(padded.tolist(), lists, strict=True):
        kept = original[-length:]
        assert row == kept + [-7] * (length - len(kept))
