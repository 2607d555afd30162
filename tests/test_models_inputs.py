"""Models read the spec: widths, shared tables, padding, labels."""

from __future__ import annotations

import re

import pytest

from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.layers.tables import find_layers, table_specs
from deeprec_spark.models.inputs import IDS, Inputs, layer_name, table_dims
from deeprec_spark.models.options import ModelOptions


def ids(name: str, **options: object) -> Feature:
    """A categorical feature, or with max_length a sequence."""
    kind = FeatureKind.SEQUENCE if "max_length" in options else FeatureKind.CATEGORICAL
    return Feature.model_validate({"name": name, "kind": kind, "raw_type": "int64", **options})


def dense(name: str, **options: object) -> Feature:
    """A dense feature."""
    return Feature.model_validate({"name": name, "kind": FeatureKind.DENSE, "raw_type": "float32", **options})


def test_each_feature_is_an_input_by_name() -> None:
    spec = FeatureSpec(features=(ids("u"), ids("h", max_length=3), dense("d"), dense("v", width=2)))
    tensors = Inputs(spec, ModelOptions()).tensors
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == {
        "u": ((None,), "int64"),
        "h": ((None, 3), "int64"),
        "d": ((None,), "float32"),
        "v": ((None, 2), "float32"),
    }


def test_tables_are_shared_by_name_and_padding_is_the_specs() -> None:
    spec = FeatureSpec(
        features=(
            ids("item", table="t", embedding_dim=3),
            ids("last", table="t"),
            ids("seen", table="t", max_length=4, padding_value=-7),
        )
    )
    inputs = Inputs(spec, ModelOptions(embedding_dim=8))
    model = inputs.model(inputs.concatenated(), "m")
    assert model.output.shape == (None, 9)
    [table] = table_specs(model)
    assert (table.name, table.embedding_dim) == ("t", 3)
    # One layer serves both categorical features: -1 is an id there, while the sequence ends at -7.
    assert [(layer.combiner, layer.padding_value) for layer in find_layers(model)] in (
        [(None, None), ("mean", -7)],
        [("mean", -7), (None, None)],
    )


def test_first_order_weights_have_tables_of_width_one() -> None:
    inputs = Inputs(FeatureSpec(features=(ids("u"), dense("d"))), ModelOptions(embedding_dim=8))
    model = inputs.model(inputs.linear(), "m")
    assert [(table.name, table.embedding_dim) for table in table_specs(model)] == [("u.linear", 1)]
    assert model.output.shape == (None, 1)


def test_seeds_differ_by_table_and_follow_the_option() -> None:
    def seeds(seed: int | None) -> list[int]:
        inputs = Inputs(FeatureSpec(features=(ids("a"), ids("b"))), ModelOptions(seed=seed))
        return [table.seed for table in table_specs(inputs.model(inputs.concatenated(), "m"))]

    assert len({*seeds(None), *seeds(0), *seeds(1)}) == 6
    assert seeds(1) == seeds(1)


def test_two_widths_for_one_table_are_refused() -> None:
    spec = FeatureSpec(features=(ids("a", table="t", embedding_dim=4), ids("b", table="t", embedding_dim=8)))
    with pytest.raises(ValueError, match=r"'a' and 'b' share table 't'.*Received: 4 and 8"):
        Inputs(spec, ModelOptions())
    assert table_dims(
        FeatureSpec(features=(ids("a", table="t"), ids("b", table="t", embedding_dim=8))), 4
    ) == {"t": 8}


def test_a_spec_without_ids_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least one categorical or sequence feature.*\['d'\]"):
        Inputs(FeatureSpec(features=(dense("d"),)), ModelOptions())


@pytest.mark.parametrize(
    ("labels", "label", "expected"),
    [
        ([], None, "prediction"),
        (["a"], None, "a"),
        (["a", "b"], "b", "b"),
        (["a", "b"], None, "this model has one output"),
        (["a"], "x", "not in the feature spec"),
    ],
)
def test_the_label_of_a_model_with_one_output(labels: list[str], label: str | None, expected: str) -> None:
    spec = FeatureSpec(features=(ids("u"),), labels=tuple(Label(name=name) for name in labels))
    inputs = Inputs(spec, ModelOptions(label=label))
    if " " in expected:
        with pytest.raises(ValueError, match=f"(?i){expected}"):
            inputs.label()
    else:
        assert inputs.label().name == expected


def test_class_numbers_have_no_output() -> None:
    spec = FeatureSpec(features=(ids("u"),), labels=(Label(name="c", kind="multiclass"),))
    inputs = Inputs(spec, ModelOptions())
    with pytest.raises(ValueError, match="kind='multiclass'"):
        inputs.output(inputs.linear())


def test_columns_may_have_names_that_tensorflow_forbids() -> None:
    assert layer_name("zip") == "zip"
    clean = {layer_name(name) for name in ("zip code", "zip_code", "zip:code", "ünï", "_x", "a/b")}
    assert len(clean) == 6
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name) for name in clean)


def test_internal_names_never_meet_feature_names() -> None:
    from deeprec_spark import models

    names = ("fm", "deep", "add", "concatenate", "dense", "score", "all", "user", "item", "logit", "top")
    features = tuple(ids(name, group="item" if index % 2 else "user") for index, name in enumerate(names))
    spec = FeatureSpec(features=(*features, ids("h", table="fm", max_length=2)), labels=(Label(name="y"),))
    for model in models.names():
        layers = [layer.name for layer in models.create(model, spec).layers]
        assert len(layers) == len(set(layers))
    assert len(spec.of_kind(*IDS)) == len(names) + 1
