"""Kinds of labels, and what they are allowed to be."""

import numpy as np
import pytest

from deeprec_spark.features.labels import LabelKind, LabelKinds, check_labels


def test_kinds_by_name_by_position_and_for_all() -> None:
    kinds = LabelKinds(("binary", "regression"), {"click": "binary", "watch": "regression"})
    assert kinds.of(["watch", "click"]) == ["regression", "binary"]
    assert kinds.of(["a", "b", "c"]) == ["binary", "regression", "regression"]
    assert LabelKinds(("binary",)).of(["a", "b"]) == ["binary", "binary"]
    assert LabelKinds().of(["a"]) == ["regression"]
    assert LabelKinds().of([]) == []


@pytest.mark.parametrize(
    ("kind", "values"), [("binary", [0, 0.25, 1]), ("regression", [-5.5, 1e9]), ("multiclass", [0, 7])]
)
def test_good_labels_pass(kind: LabelKind, values: list[float]) -> None:
    check_labels("y", np.array(values), kind)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("binary", [0, 5, 1, -1], r"'y' must be in \[0, 1\].*2 rows that are not, such as .*5"),
        ("regression", [0, np.nan, np.inf], r"must be finite.*2 rows"),
        ("multiclass", [0, 0.5], r"class number.*1 rows.*0\.5"),
        ("multiclass", [-1], "class number"),
    ],
)
def test_bad_labels_are_counted(kind: LabelKind, values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_labels("y", np.array(values), kind)
