"""The interaction layers against sums written out by hand."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark.models.interactions import DotInteraction, FactorizationMachine, TargetAttention

FIELDS = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)


def test_factorization_machine_is_the_sum_of_all_pairs() -> None:
    expected = sum(np.sum(FIELDS[:, i] * FIELDS[:, j], axis=-1) for i in range(4) for j in range(i))
    np.testing.assert_allclose(FactorizationMachine()(FIELDS)[:, 0], expected, atol=1e-5)


def test_dot_interaction_gives_each_pair_once() -> None:
    expected = np.stack(
        [np.sum(FIELDS[:, i] * FIELDS[:, j], axis=-1) for i in range(4) for j in range(i)], axis=1
    )
    np.testing.assert_allclose(DotInteraction()(FIELDS), expected, atol=1e-5)


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_dots_is_that_of_each_product(batch: int, compiled: bool) -> None:
    fields, weights = FIELDS[:batch], np.random.default_rng(1).normal(size=(batch, 6)).astype(np.float32)
    expected = np.zeros(fields.shape, np.float64)
    pairs = [(i, j) for i in range(4) for j in range(i)]
    for number, (i, j) in enumerate(pairs):
        expected[:, i] += weights[:, number, None].astype(np.float64) * fields[:, j]
        expected[:, j] += weights[:, number, None].astype(np.float64) * fields[:, i]
    layer = DotInteraction()

    @tf.function(jit_compile=compiled, input_signature=[tf.TensorSpec([None, 4, 3])])
    def gradient(vectors: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(vectors)
            total = tf.reduce_sum(layer(vectors) * weights)
        return tape.gradient(total, vectors)

    np.testing.assert_allclose(gradient(fields), expected, atol=1e-5)
    assert layer.compute_output_shape((None, 4, 3)) == (None, 6)


@pytest.mark.parametrize("normalize", [False, True])
def test_attention_sums_the_history_without_its_padding(normalize: bool) -> None:
    target, history = FIELDS[:, 0], FIELDS
    ids = np.array([[1, 2, -1, -1], [-1, -1, -1, -1], [3, -1, 4, -1], [1, 2, 3, 4], [9, -1, -1, -1]])
    layer = TargetAttention((6,), padding_value=-1, normalize=normalize)
    result = np.asarray(layer([target, history, ids]))
    hidden, score = layer._hidden[0], layer._score
    expected = np.zeros_like(target)
    for row in range(5):
        real = ids[row] != -1
        if not real.any():
            continue
        t = np.broadcast_to(target[row], history[row].shape)
        x = np.concatenate([t, history[row], t - history[row], t * history[row]], axis=-1)
        x = 1 / (1 + np.exp(-(x @ np.asarray(hidden.kernel) + np.asarray(hidden.bias))))
        scores = (x @ np.asarray(score.kernel) + np.asarray(score.bias))[:, 0]
        weights = np.where(real, np.exp(scores) if normalize else scores, 0)
        expected[row] = (weights / (weights.sum() if normalize else 1)) @ history[row]
    np.testing.assert_allclose(result, expected, atol=1e-5)
    # Whatever the padded places hold, it does not matter.
    changed = np.where((ids != -1)[..., None], history, 100).astype(np.float32)
    np.testing.assert_allclose(layer([target, changed, ids]), result, atol=1e-5)


def test_attention_config_makes_the_same_layer() -> None:
    layer = TargetAttention((6, 2), padding_value=5, normalize=True, name="a")
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert copy.get_config() == layer.get_config()
