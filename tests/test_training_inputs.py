"""Columns meet model inputs, labels meet outputs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from deeprec_spark.data.batch import Batch
from deeprec_spark.training.inputs import InputBinding, OutputBinding, output_names

L = keras.layers
FEATURES = {"a": np.array([1, 2]), "b": np.array([0.5, 1.5], np.float32), "c": np.array([[1, 2], [3, 4]])}


def functional(struct: Any) -> keras.Model:
    return keras.Model(struct, L.Concatenate()([L.Flatten()(x) for x in keras.tree.flatten(struct)]))


def tensors(binding: InputBinding) -> list[Any]:
    return binding.arrays(FEATURES)


def test_named_inputs_take_columns_by_name() -> None:
    a, b = keras.Input((), dtype="int64", name="a"), keras.Input((), name="b")
    for struct, expected in (([b, a], list), ({"b": b, "a": a}, dict)):
        binding = InputBinding(functional(struct), FEATURES)
        assert sorted(binding.columns) == ["a", "b"]  # c is not asked for
        packed = binding.pack(tensors(binding))
        assert isinstance(packed, expected)
        found = packed if isinstance(packed, dict) else {"b": packed[0], "a": packed[1]}
        np.testing.assert_array_equal(found["b"], FEATURES["b"])
        np.testing.assert_array_equal(found["a"], FEATURES["a"])


def test_lists_of_another_length_are_refused_though_no_tensor_is_made_of_them() -> None:
    binding = InputBinding(functional([keras.Input((2,), dtype="int64", name="c")]), FEATURES)
    assert len(binding.arrays({"c": np.zeros((5, 2), np.int64)})[0]) == 5
    for shape in ((3, 4), (4, 3), (6,)):
        with pytest.raises(ValueError, match=r"Column 'c' is of another shape .* to \[2\].*Received: shape"):
            binding.arrays({"c": np.zeros(shape, np.int64)})
    open_ended = InputBinding(functional([keras.Input((None,), dtype="int64", name="c")]), FEATURES)
    assert open_ended.arrays({"c": np.zeros((3, 4), np.int64)})[0].shape == (3, 4)


def test_other_inputs_take_columns_by_position() -> None:
    struct = [keras.Input((), dtype="int64"), keras.Input(()), keras.Input((2,), dtype="int64")]
    assert InputBinding(functional(struct), FEATURES).columns == ["a", "b", "c"]
    one = keras.Sequential([keras.Input((), dtype="int64"), L.Flatten()])
    assert InputBinding(one, {"user": FEATURES["a"]}).columns == ["user"]


def test_a_subclassed_model_takes_the_column_or_a_dict() -> None:
    class Model(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

    binding = InputBinding(Model(), FEATURES)
    assert list(binding.pack(tensors(binding))) == ["a", "b", "c"]
    alone = InputBinding(Model(), {"a": FEATURES["a"]})
    np.testing.assert_array_equal(alone.pack(alone.arrays(FEATURES)), FEATURES["a"])


def test_columns_take_the_types_of_the_inputs() -> None:
    struct = [keras.Input((), dtype="int64", name="a"), keras.Input((2,), dtype="int64", name="c")]
    narrow = {**FEATURES, "a": FEATURES["a"].astype(np.int32)}
    binding = InputBinding(functional(struct), narrow)
    assert [array.dtype for array in binding.arrays(narrow)] == [np.int64, np.int64]
    assert [spec.shape.as_list() for spec in binding.signature()] == [[None], [None, 2]]


def test_a_list_of_any_length_stays_so() -> None:
    binding = InputBinding(functional([keras.Input((None,), dtype="int64", name="c")]), FEATURES)
    assert binding.signature()[0].shape.as_list() == [None, None]


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        (["a", "x"], r"inputs \['a', 'x'\], columns \['a', 'b', 'c'\], without a column: \['x'\]"),
        (
            ["b:float32", "a", "x"],
            r"inputs \['b', 'a', 'x'\], columns \['a', 'b', 'c'\], without a column: \['x'\]",
        ),
        (["a:float32"], "cannot hold every id"),
        (["a:int32"], "cannot hold every id.*dtype='int64'.*Received: column int64, input int32"),
        (["a:uint64"], "cannot hold every id"),
        (["a:int8"], "cannot hold every id"),
        (["b:int64"], "holds fractions"),
    ],
)
def test_columns_that_do_not_fit(inputs: list[str], error: str) -> None:
    made = []
    for each in inputs:
        name, _, dtype = each.partition(":")
        made.append(keras.Input((), name=name, dtype=dtype or "int64"))
    with pytest.raises(ValueError, match=error):
        InputBinding(functional(made), FEATURES)


def test_a_batch_without_a_column() -> None:
    binding = InputBinding(functional([keras.Input((), dtype="int64", name="a")]), FEATURES)
    with pytest.raises(ValueError, match=r"lacks columns .*\['a'\]"):
        binding.arrays({"b": FEATURES["b"]})


def outputs_of(*names: str) -> tuple[keras.Model, list[Any]]:
    x = keras.Input((1,))
    model = keras.Model(x, [L.Dense(1, name=name)(x) for name in names])
    return model, [np.zeros((2, 1), np.float32) for _ in names]


def labels_of(*names: str) -> dict[str, np.ndarray]:
    return {name: np.full(2, position, np.float32) for position, name in enumerate(names)}


def test_labels_match_outputs_by_name_then_position() -> None:
    model, outputs = outputs_of("click", "spend")
    by_name = OutputBinding(model, outputs, labels_of("spend", "click", "other"))
    assert by_name.labels == ["click", "spend"]
    by_position = OutputBinding(model, outputs, labels_of("y0", "y1"))
    assert by_position.labels == ["y0", "y1"]
    with pytest.raises(ValueError, match=r"labels \['y0'\], outputs \['click', 'spend'\]"):
        OutputBinding(model, outputs, labels_of("y0"))
    with pytest.raises(ValueError, match=r"labels \['spend', 'clik'\], outputs \['click', 'spend'\]"):
        OutputBinding(model, outputs, labels_of("spend", "clik"))


def test_several_labels_of_one_output_are_stacked() -> None:
    model, _ = outputs_of("all")
    binding = OutputBinding(model, np.zeros((2, 3), np.float32), labels_of("x", "y", "z"))
    batch = Batch({"a": FEATURES["a"]}, labels_of("x", "y", "z"))
    np.testing.assert_array_equal(binding.pack(binding.arrays(batch)), [[0, 1, 2], [0, 1, 2]])


def test_output_names() -> None:
    assert output_names(None, {"b": 1, "a": 2}) == ["a", "b"]  # the order of keras.tree
    assert output_names(None, [1, 2]) == ["output", "output_1"]
    assert output_names(None, 1) == ["output"]
    model, outputs = outputs_of("click", "spend")
    assert output_names(model, outputs) == ["click", "spend"]
    sequential = keras.Sequential([keras.Input((1,)), L.Dense(1, name="score")])
    assert output_names(sequential, 1) == ["score"]
