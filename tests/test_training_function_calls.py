"""Calls of traced functions: the same as TensorFlow's own, whatever the structure of arguments and results."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import tensorflow as tf

from deeprec_spark.training.function_calls import call_function


class Found(NamedTuple):
    total: Any
    parts: list[Any]


def test_a_call_gives_what_tensorflow_own_gives() -> None:
    seen = tf.Variable(0.0)

    def body(first: Any, parts: list[Any], none: list[Any], last: Any) -> tuple[Any, Found]:
        seen.assign_add(tf.reduce_sum(first))
        return first + last, Found(tf.add_n(parts), [part * seen for part in parts])

    scalar = tf.TensorSpec([], tf.float32)
    traced = tf.function(body, input_signature=[tf.TensorSpec([None]), [scalar, scalar], [], scalar])
    function = traced.get_concrete_function()
    arguments = tf.constant([1.0, 2.0]), [tf.constant(3.0), tf.constant(4.0)], [], tf.constant(5.0)
    once, again = call_function(function, *arguments), function(*arguments)
    assert seen.numpy() == 6.0
    assert (once[0].numpy().tolist(), once[1].total.numpy()) == ([6.0, 7.0], 7.0)
    assert [part.numpy() for part in once[1].parts] == [9.0, 12.0]
    assert [part.numpy() for part in again[1].parts] == [18.0, 24.0]
    tf.nest.assert_same_structure(once, again)


def test_a_tensor_of_another_type_is_an_error() -> None:
    traced = tf.function(lambda x: x * 2, input_signature=[tf.TensorSpec([], tf.float32)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="float"):
        call_function(traced.get_concrete_function(), tf.constant(1))
