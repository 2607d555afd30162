"""Every optimizer, on rows and on a flat vector, against float64 numpy and against Keras."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from deeprec_spark.embedding.dense import DenseVector
from deeprec_spark.embedding.optimizers import (
    SGD,
    Adagrad,
    AdagradDecay,
    Adam,
    AdamAsync,
    AdamW,
    Ftrl,
    Momentum,
    Optimizer,
    RMSprop,
    RowwiseAdagrad,
)
from deeprec_spark.embedding.variable import EmbeddingVariable
from tests.embedding_reference import ReferenceOptimizer

OPTIMIZERS: list[Optimizer] = [
    SGD(0.1),
    SGD(0.1, momentum=0.9),
    SGD(0.1, momentum=0.9, nesterov=True),
    Adagrad(0.1),
    Adagrad(0.5, initial_accumulator_value=0.0, epsilon=1e-3),
    Adam(0.01),
    Adam(0.01, beta_1=0.5, beta_2=0.9, epsilon=1e-3),
    AdamW(0.01, weight_decay=0.1),
    AdamAsync(0.01),
    AdamAsync(0.01, apply_sparse_rmsprop=True),
    Ftrl(0.1),
    Ftrl(
        0.1,
        l1_regularization_strength=0.02,
        l2_regularization_strength=0.03,
        l2_shrinkage_regularization_strength=0.01,
        beta=0.1,
    ),
    Ftrl(0.1, learning_rate_power=-0.7, l1_regularization_strength=0.01),
    RMSprop(0.01),
    RMSprop(0.01, momentum=0.9),
    RMSprop(0.01, centered=True),
    RMSprop(0.01, momentum=0.9, centered=True),
]
OURS: list[Optimizer] = [
    Momentum(0.1, 0.9),
    Momentum(0.1, 0.9, use_nesterov=True),
    AdagradDecay(0.1, accumulator_decay_step=3, accumulator_decay_rate=0.5),
]
ROWS_ONLY: list[Optimizer] = [
    RowwiseAdagrad(0.1),
    Adagrad(0.1, clipvalue=0.7),
    Adam(0.1, clipnorm=0.5),
    SGD(0.1, clipvalue=1.0, clipnorm=1.5),
]
KERAS = [optimizer for optimizer in OPTIMIZERS if not isinstance(optimizer, AdamAsync)]
STEPS = 12
DIM = 19  # not a multiple of any vector width


def _name(optimizer: Optimizer) -> str:
    return repr(optimizer)


def _gradients(steps: int, size: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(3).normal(0, 1, (steps, size)).astype(np.float32)


@pytest.mark.parametrize("optimizer", OPTIMIZERS + OURS + ROWS_ONLY, ids=_name)
def test_rows_follow_the_float64_reference(optimizer: Optimizer) -> None:
    """Keys come and go: only the rows of a step change, and Adam's correction follows the step."""
    table = EmbeddingVariable("t", DIM, optimizer=optimizer)
    keys = np.array([5, -1, 2**63 - 1])
    start = table.lookup(keys, train=True)
    rows = [ReferenceOptimizer(optimizer, row) for row in start]
    rng = np.random.default_rng(5)
    for step in range(1, STEPS + 1):
        present = np.flatnonzero(rng.random(3) < 0.7)
        gradients = rng.normal(0, 1, (len(present), DIM)).astype(np.float32)
        table.apply_gradients(keys[present], gradients, step=step)
        for at, gradient in zip(present, gradients, strict=True):
            rows[at].update(gradient, step)
    np.testing.assert_allclose(table.lookup(keys), [row.value for row in rows], rtol=1e-5, atol=1e-5)
    block = next(table.export(keys=keys))
    for name, slot in block.slots.items():
        np.testing.assert_allclose(slot, [row.slots[name] for row in rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS + OURS, ids=_name)
def test_dense_follows_the_float64_reference(optimizer: Optimizer) -> None:
    size = 70_001  # several chunks, and a rest
    start = np.random.default_rng(1).normal(0, 1, size).astype(np.float32)
    vector = DenseVector(start, optimizer)
    reference = ReferenceOptimizer(optimizer, start)
    for step, gradient in enumerate(_gradients(4, size), 1):
        vector.apply(gradient)
        reference.update(gradient, step, sparse=False)
    # Where a Ftrl weight crosses its l1 threshold, float32 and float64 part by a little more.
    np.testing.assert_allclose(vector.values, reference.value, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("optimizer", KERAS, ids=_name)
def test_rows_and_vectors_follow_keras(optimizer: Optimizer) -> None:
    keras = pytest.importorskip("keras")
    ours_only = ("type", "clipvalue", "clipnorm")
    arguments: dict[str, Any] = {
        key: value for key, value in optimizer.to_dict().items() if key not in ours_only
    }
    theirs = getattr(keras.optimizers, type(optimizer).__name__)(**arguments)
    start = np.random.default_rng(2).normal(0, 1, DIM).astype(np.float32)
    variable = keras.Variable(start)
    theirs.build([variable])
    vector = DenseVector(start, optimizer)
    table = EmbeddingVariable("t", DIM, optimizer=optimizer)
    table.upsert([1], start[None])
    for step, gradient in enumerate(_gradients(STEPS, DIM), 1):
        theirs.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        vector.apply(gradient)
        table.apply_gradients([1], gradient[None], step=step)
    expected = np.asarray(variable.value)
    np.testing.assert_allclose(vector.values, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(table.lookup([1])[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS + OURS + ROWS_ONLY, ids=_name)
def test_repeated_keys_are_summed_into_one_update(optimizer: Optimizer) -> None:
    """TFRA #376: of repeated keys only one gradient was applied."""
    keys = np.array([4, 9, 4, 4, -7, 9])
    gradients = _gradients(len(keys), DIM)
    repeated = EmbeddingVariable("t", DIM, optimizer=optimizer)
    summed = EmbeddingVariable("t", DIM, optimizer=optimizer)
    for step in (1, 2, 3):
        repeated.apply_gradients(keys, gradients, step=step)
        total = np.stack([gradients[keys == key].astype(np.float64).sum(0) for key in (4, 9, -7)])
        summed.apply_gradients([4, 9, -7], total.astype(np.float32), step=step)
    np.testing.assert_allclose(repeated.lookup([4, 9, -7]), summed.lookup([4, 9, -7]), rtol=1e-6, atol=1e-6)


def test_adam_async_counts_the_updates_of_its_table() -> None:
    optimizer = AdamAsync(0.1)
    table = EmbeddingVariable("t", DIM, optimizer=optimizer)
    reference = ReferenceOptimizer(optimizer, table.lookup([1], train=True)[0])
    for count, (step, gradient) in enumerate(zip((100, 250, 300), _gradients(3, DIM), strict=True), 1):
        table.apply_gradients([1], gradient[None], step=step)
        reference.update(gradient, count)
    np.testing.assert_allclose(table.lookup([1])[0], reference.value, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_of_a_step_overrides() -> None:
    optimizer = Adagrad(0.1)
    table = EmbeddingVariable("t", DIM, optimizer=optimizer)
    reference = ReferenceOptimizer(optimizer, table.lookup([1], train=True)[0])
    for step, gradient in enumerate(_gradients(3, DIM), 1):
        table.apply_gradients([1], gradient[None], step=step, learning_rate=0.3 / step)
        reference.update(gradient, step, lr=0.3 / step)
    np.testing.assert_allclose(table.lookup([1])[0], reference.value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ROWS_ONLY, ids=_name)
def test_flat_vectors_refuse_what_needs_whole_rows(optimizer: Optimizer) -> None:
    with pytest.raises(ValueError, match="Received: "):
        DenseVector(np.zeros(3), optimizer)


def test_a_row_that_missed_decay_periods_makes_up_for_them() -> None:
    optimizer = AdagradDecay(0.1, accumulator_decay_step=10, accumulator_decay_rate=0.5)
    table = EmbeddingVariable("t", 2, optimizer=optimizer)
    table.apply_gradients([1], np.full((1, 2), 3.0), step=1)
    table.apply_gradients([1], np.zeros((1, 2)), step=25)  # two periods
    accumulator = next(table.export()).slots["accumulator"]
    np.testing.assert_allclose(accumulator, 9.1 / 4, rtol=1e-6)
    table.apply_gradients([1], np.zeros((1, 2)), step=1000)
    np.testing.assert_allclose(next(table.export()).slots["accumulator"], 0.1, rtol=1e-6)


def test_ftrl_refuses_a_learning_rate_of_zero() -> None:
    with pytest.raises(ValueError, match="Received: learning_rate=0"):
        DenseVector(np.zeros(3), Ftrl()).apply(np.zeros(3), learning_rate=0.0)


_BITS = """
import hashlib, numpy as np
from deeprec_spark.embedding import _core
from tests.test_embedding_optimizers import OPTIMIZERS, OURS, _gradients
from deeprec_spark.embedding.dense import DenseVector
digest = hashlib.sha256()
for optimizer in OPTIMIZERS + OURS:
    if getattr(optimizer, "learning_rate_power", -0.5) != -0.5:
        continue
    vector = DenseVector(np.linspace(-1, 1, 1003), optimizer)
    for gradient in _gradients(5, 1003):
        vector.apply(gradient)
    digest.update(vector.values.tobytes())
print(_core.cpu(), digest.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits() -> None:
    results = {}
    for limit in ("base", "avx2", "avx512"):
        environment = {**os.environ, "DEEPREC_CPU": limit}
        done = subprocess.run(
            [sys.executable, "-c", _BITS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        cpu, digest = done.stdout.split()
        results[cpu] = digest
    assert "base" in results
    assert len(set(results.values())) == 1, results
