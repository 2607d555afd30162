"""Flat vectors of weights, and arrays shared with TensorFlow."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark.training.buffers import ALIGNMENT, aligned_empty, as_array, as_tensor, concatenate
from deeprec_spark.training.checks import class_weights
from deeprec_spark.training.dense import state_layout, trainable_layout

L = keras.layers


def model() -> keras.Model:
    frozen = L.Dense(2, name="frozen", trainable=False)
    layers = [
        keras.Input((3,)),
        L.Dense(4),
        L.BatchNormalization(),
        frozen,
        L.Dropout(0.5),
        L.Dense(1, use_bias=False),
    ]
    return keras.Sequential(layers)


def test_weights_survive_packing() -> None:
    one, other = model(), model()
    trainable, state = trainable_layout(one), state_layout(one)
    assert trainable.size == 3 * 4 + 4 + 4 + 4 + 2 * 1  # dense, gamma and beta, the last kernel
    assert (
        state.size == 4 + 4 + 4 * 2 + 2
    )  # moving mean and variance, the frozen layer; no seed of the dropout
    trainable_layout(other).unpack(trainable.pack())
    state_layout(other).unpack(state.pack())
    for our, their in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(our, their)
    assert trainable.pack().ctypes.data % ALIGNMENT == 0
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(26,\)"):
        trainable.unpack(np.zeros(3, np.float32))


def test_split_and_join_are_inverse_and_differentiable() -> None:
    layout = trainable_layout(model())
    flat = tf.random.normal([layout.size])
    with tf.GradientTape() as tape:
        tape.watch(flat)
        parts = layout.split(flat)
        loss = tf.reduce_sum(parts[0]) + 3 * tf.reduce_sum(parts[-1])
    assert [tuple(part.shape) for part in parts] == layout.shapes
    np.testing.assert_array_equal(layout.join(parts), flat)
    gradient = tape.gradient(loss, flat).numpy()
    assert gradient[:12].tolist() == [1.0] * 12
    assert gradient[-2:].tolist() == [3.0] * 2
    assert not gradient[12:-2].any()


def test_a_model_without_weights_packs_to_nothing() -> None:
    layout = trainable_layout(keras.Sequential([keras.Input((1,)), L.Activation("relu")]))
    assert layout.pack().shape == (0,)
    assert layout.split(tf.zeros([0])) == []
    assert layout.join([]).shape == (0,)


def test_aligned_arrays_are_shared_and_others_copied() -> None:
    shared = aligned_empty((5, 3), np.float32)
    shared[:] = 1
    tensor = as_tensor(shared)
    shared[0, 0] = 7  # seen through the tensor: no copy was made
    assert float(tensor[0, 0]) == 7
    copied = shared[:, 1:]
    other = as_tensor(copied)
    copied[0, 0] = 9
    assert float(other[0, 0]) == 1
    for empty in (np.empty((0, 4), np.float32), aligned_empty((0,), np.int64)):
        assert as_tensor(empty).shape == empty.shape
    fixed = aligned_empty((2,), np.int64)
    fixed[:] = 4
    fixed.flags.writeable = False
    assert as_tensor(fixed).numpy().tolist() == [4, 4]


def test_tensors_are_read_without_a_copy_and_outlive_their_name() -> None:
    tensor = tf.constant([1.0, 2.0])
    array = as_array(tensor)
    del tensor
    assert array.tolist() == [1.0, 2.0]
    assert not array.flags.writeable
    assert as_array(tf.constant(3.0)).shape == ()


def test_concatenation_is_aligned() -> None:
    joined = concatenate([np.ones((2, 3), np.float32), np.zeros((0, 3), np.float32)], (3,), np.float32)
    assert joined.shape == (2, 3)
    assert joined.ctypes.data % ALIGNMENT == 0
    assert concatenate([], (3,), np.float32).shape == (0, 3)


@pytest.mark.parametrize(
    "labels", [np.array([0, 1, 2, 1]), np.array([[0.0], [1.0], [2.0], [1.0]]), np.eye(3)[[0, 1, 2, 1]]]
)
def test_class_weights(labels: np.ndarray) -> None:
    found = class_weights(labels, {0: 2.0, 1: 0.5})
    assert found.dtype == np.float32
    assert found.tolist() == [2.0, 0.5, 1.0, 0.5]
