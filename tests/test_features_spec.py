"""The spec survives JSON, and refuses what makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deeprec_spark.features import Feature, FeatureKind, FeatureSpec, Label

NAMES = st.text(min_size=1, max_size=8)
FEATURES = st.one_of(
    st.builds(
        Feature,
        name=NAMES,
        kind=st.just(FeatureKind.DENSE),
        raw_type=st.sampled_from(["float32", "int64"]),
        default=st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        transform=st.sampled_from(["none", "log1p"]),
        width=st.one_of(st.none(), st.integers(1, 9)),
    ),
    st.builds(
        Feature,
        name=NAMES,
        kind=st.just(FeatureKind.SEQUENCE),
        raw_type=st.sampled_from(["string", "int64"]),
        max_length=st.integers(1, 99),
        padding_value=st.integers(-(2**63), 2**63 - 1),
        table=st.one_of(st.none(), NAMES),
    ),
)


@given(st.lists(FEATURES, min_size=1, max_size=5, unique_by=lambda feature: feature.name))
def test_json_round_trip(features: list[Feature]) -> None:
    spec = FeatureSpec(features=tuple(features))
    assert FeatureSpec.model_validate_json(spec.model_dump_json()) == spec


def test_files(tmp_path: Path) -> None:
    spec = FeatureSpec(
        features=(Feature(name="é", kind=FeatureKind.CATEGORICAL, raw_type="string"),),
        labels=(Label(name="y"),),
    )
    spec.save(tmp_path / "spec.json")
    assert FeatureSpec.load(tmp_path / "spec.json") == spec
    assert (spec.feature_names, spec.label_names) == (["é"], ["y"])
    assert spec.features[0].table_name == "é"
    assert spec.of_kind(FeatureKind.DENSE) == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "sequence", "raw_type": "int64"}, "needs max_length"),
        ({"kind": "dense", "raw_type": "string"}, "must be a number"),
        ({"kind": "categorical", "raw_type": "float32"}, "holds ids"),
        ({"kind": "categorical", "raw_type": "int64", "dim": 3}, "Extra inputs"),
    ],
)
def test_what_makes_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Feature(name="a", **fields)


def test_names_are_unique() -> None:
    feature = Feature(name="a", kind=FeatureKind.CATEGORICAL, raw_type="int64")
    with pytest.raises(ValidationError, match=r"repeated names \['a'\]"):
        FeatureSpec(features=(feature,), labels=(Label(name="a"),))
