"""StepPipeline: the results of unpipelined steps, bounded staleness, errors, no thread left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.tracing.spans import SpanRing, TraceBounds
from deeprec_spark.tracing.stages import StageClock
from deeprec_spark.training import function_options
from deeprec_spark.training.checks import NonFiniteError
from deeprec_spark.training.options import DenseStepOptions
from deeprec_spark.training.pipeline import PipelineOptions, StepPipeline
from deeprec_spark.training.trainer import Trainer, TrainerOptions
from tests.pipelined import STEPS, L, batches, model, state, tagged, trainer


@pytest.mark.parametrize("depth", [0, 1, 3, 20])
def test_the_result_is_that_of_one_step_after_the_other(depth: int) -> None:
    plain, piped = trainer(), trainer()
    for batch in batches():
        plain.train_step(batch)
    pipeline = StepPipeline(piped, PipelineOptions(depth=depth))
    assert list(pipeline.train(tagged(batches()))) == list(range(STEPS))
    assert pipeline.stale_pulls == 0
    for mine, theirs in zip(state(piped), state(plain), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dropout", [0.3, 0.0], ids=["one at a time", "side by side"])
@pytest.mark.parametrize(("staleness", "parallel"), [(1, 1), (1, 2), (2, 2), (2, 3)])
def test_pulls_run_ahead_of_so_many_pushes_and_no_more(staleness: int, parallel: int, dropout: float) -> None:
    """The same as the stages by hand in the documented order: pull i + staleness, then push i."""
    plain, piped = trainer(dropout), trainer(dropout)
    prepared = [plain.prepare(batch) for batch in batches()]
    replies = [plain.pull(entry) for entry in prepared[: staleness + 1]]
    for number, entry in enumerate(prepared):
        result = plain.compute(entry, replies[number])
        plain.measure(entry, result)
        plain.push(entry, result)
        if len(replies) < STEPS:
            replies.append(plain.pull(prepared[len(replies)]))
    pipeline = StepPipeline(piped, PipelineOptions(2, staleness, parallel))
    assert list(pipeline.train(tagged(batches()))) == list(range(STEPS))
    assert pipeline.stale_pulls == STEPS - 1
    for mine, theirs in zip(state(piped), state(plain), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dropout", [0.3, 0.0], ids=["one at a time", "side by side"])
def test_no_pull_runs_ahead_of_the_first_updates(dropout: float) -> None:
    """One step after the other until a pull has seen three updates, then pull i + 1 before push i; in all epochs."""
    plain, piped = trainer(dropout), trainer(dropout)
    pipeline = StepPipeline(piped, PipelineOptions(2, 1, warmup_updates=3))
    for epoch in range(2):
        prepared = [plain.prepare(batch) for batch in batches()]
        replies = [plain.pull(prepared[0])]
        for number, entry in enumerate(prepared):
            ahead = epoch > 0 or number > 3  # the pull of step 3 has seen three updates
            if ahead and len(replies) == number + 1 < STEPS:
                replies.append(plain.pull(prepared[number + 1]))
            result = plain.compute(entry, replies[number])
            plain.measure(entry, result)
            plain.push(entry, result)
            if not ahead:
                replies.append(plain.pull(prepared[number + 1]))
        list(pipeline.train(tagged(batches())))
        assert pipeline.stale_pulls == (STEPS - 5) + epoch * (STEPS - 1)
    for mine, theirs in zip(state(piped), state(plain), strict=True):
        np.testing.assert_array_equal(mine, theirs)


class Meeting(Trainer):
    """A trainer whose steps go on computing only when so many of them are computing."""

    def __init__(self, steps: int) -> None:
        super().__init__(model(dropout=0.0), LocalStore(), TrainerOptions(seed=11))
        self.initialize(batches()[0])
        self.barrier = threading.Barrier(steps, timeout=30)
        self.executors: list[Any] = []

    def compute(self, prepared: Any, reply: Any) -> Any:
        """Wait for the others."""
        self.barrier.wait()
        self.executors.append(function_options.current().executor_type)
        return super().compute(prepared, reply)


@pytest.mark.parametrize("inline", [False, True])
def test_steps_whose_rows_are_there_compute_at_the_same_time(inline: bool) -> None:
    made = Meeting(2)
    pipeline = StepPipeline(made, PipelineOptions(max_staleness=1, parallel_steps=2))
    with function_options.inline() if inline else nullcontext():
        here = function_options.current().executor_type
        assert len(list(pipeline.train(tagged(batches(6))))) == 6
    assert made.step == 6
    assert made.executors == [here] * 6, "the policy of the caller holds in all threads"
    assert ("SINGLE_THREADED" in str(here)) is inline


def test_steps_that_change_a_state_of_the_process_compute_one_after_the_other() -> None:
    random, plain = trainer(dropout=0.3), trainer(dropout=0.0)
    assert not random.overlaps(random.prepare(batches()[0]))
    assert plain.overlaps(plain.prepare(batches()[0]))
    parts = Trainer(
        model(dropout=0.0), LocalStore(), TrainerOptions(dense_step=DenseStepOptions(micro_batch=8))
    )
    parts.initialize(batches()[0])
    assert not parts.overlaps(parts.prepare(batches()[0]))


class Noise(L.Layer):
    """Keeps its state in TensorFlow, where Keras does not see it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = tf.Variable(0, trainable=False)

    def call(self, x: Any) -> Any:
        """The same, for a step."""
        if self.kind == "draws":
            return x + 0.001 * tf.random.normal(tf.shape(x))
        if self.kind == "counts":
            self.calls.assign_add(1)
        if self.kind == "leaves":
            return tf.ensure_shape(tf.numpy_function(lambda array: array, [x], tf.float32), x.shape)
        return x + tf.cast(self.calls, tf.float32)


@pytest.mark.parametrize(
    ("kind", "overlaps"), [("draws", False), ("counts", False), ("leaves", False), ("reads", True)]
)
def test_state_of_tensorflow_keeps_steps_apart_too(kind: str, overlaps: bool) -> None:
    user = keras.Input((), dtype="int64", name="user")
    x = Noise(kind)(SparseEmbedding(4, table="user")(user))
    made = keras.Model(user, L.Dense(1, name="click")(x))
    made.compile("sgd", "mse")
    found = Trainer(made, LocalStore())
    found.initialize(batches()[0])
    assert found.overlaps(found.prepare(batches()[0])) is overlaps


def test_models_with_several_outputs_compute_side_by_side_and_keep_the_mean_of_each_loss() -> None:
    def two_outputs() -> Trainer:
        keras.utils.set_random_seed(3)
        user = keras.Input((), dtype="int64", name="user")
        x = SparseEmbedding(4, table="user")(user)
        outputs = {name: L.Dense(1, name=name)(x) for name in ("click", "spend")}
        model = keras.Model(user, outputs)
        model.compile(
            "adam", {"click": "mse", "spend": "mae"}, metrics={"click": [keras.metrics.MeanSquaredError()]}
        )
        made = Trainer(model, LocalStore())
        made.initialize(with_spend()[0])
        return made

    def with_spend() -> list[Batch]:
        return [
            Batch(each.features, {**each.labels, "spend": each.labels["click"] + 1}) for each in batches()
        ]

    one, two = two_outputs(), two_outputs()
    assert two.overlaps(two.prepare(with_spend()[0]))
    list(StepPipeline(one, PipelineOptions(max_staleness=1, parallel_steps=1)).train(tagged(with_spend())))
    list(StepPipeline(two, PipelineOptions(max_staleness=1, parallel_steps=2)).train(tagged(with_spend())))
    found = two.metric_results()
    assert found == one.metric_results()
    assert found["loss"] == pytest.approx(found["click_loss"] + found["spend_loss"], rel=1e-5)
    assert found["click_mean_squared_error"] == pytest.approx(found["click_loss"], rel=1e-5)


class Stashing(keras.Model):
    """Hands its metrics a tensor behind TensorFlow's back."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """Keep the loss."""
        self.kept = super().compute_loss(*arguments, **options)
        return self.kept

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Use it."""
        self.seen.update_state(self.kept)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def trainer_with_metrics(kind: type[keras.Model], seen: keras.metrics.Metric) -> Trainer:
    """Of a model whose `compute_metrics` updates `seen`."""
    plain = model(dropout=0.0)
    made = kind(plain.inputs, plain.outputs)
    made.seen = seen
    made.compile("sgd", "binary_crossentropy")
    found = Trainer(made, LocalStore())
    found.initialize(batches()[0])
    return found


def test_metrics_that_use_a_tensor_of_the_step_are_refused() -> None:
    stashing = trainer_with_metrics(Stashing, keras.metrics.Mean(name="seen"))
    with pytest.raises(ValueError, match=r"update them in compute_loss.*Stashing"):
        stashing.train_step(batches()[0])


class Counting(keras.Model):
    """Counts in its metrics what it was given."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """A metric over the inputs."""
        self.seen.update_state(x[2])
        return super().compute_metrics(x, y, y_pred, sample_weight)


def test_metrics_of_its_own_see_the_inputs() -> None:
    counted = trainer_with_metrics(Counting, keras.metrics.Sum(name="seen"))
    list(StepPipeline(counted, PipelineOptions(max_staleness=1)).train(tagged(batches())))
    wanted = sum(batch.features["price"].sum() for batch in batches())
    assert counted.metric_results()["seen"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_without_samples_is_a_step(staleness: int) -> None:
    made = trainer()
    data = batches(2)
    empty = Batch(
        {name: array[:0] for name, array in data[0].features.items()}, {"click": np.empty(0, np.float32)}
    )
    pipeline = StepPipeline(made, PipelineOptions(max_staleness=staleness))
    assert list(pipeline.train(tagged([data[0], empty, data[1]]))) == [0, 1, 2]
    assert made.step == 3


def step_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("step-")]


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_a_stage_raises_is_raised_and_no_thread_stays(staleness: int) -> None:
    options = PipelineOptions(max_staleness=staleness)

    def failing() -> Iterator[tuple[Batch, int]]:
        yield from tagged(batches(3))
        raise OSError("the file is gone")

    made = trainer()
    done = []
    with pytest.raises(OSError, match="the file is gone"):
        done.extend(StepPipeline(made, options).train(failing()))
    assert not step_threads()

    made = trainer()
    data = batches()
    data[2].features["price"][0] = np.nan
    with pytest.raises(NonFiniteError):
        list(StepPipeline(made, options).train(tagged(data)))
    assert not step_threads()


@pytest.mark.parametrize("depth", [0, 2])
def test_giving_up_early_closes_the_source_and_ends_the_threads(depth: int) -> None:
    closed: list[bool] = []

    def source() -> Iterator[tuple[Batch, int]]:
        try:
            yield from tagged(batches())
        finally:
            closed.append(True)

    made = trainer()
    training = StepPipeline(made, PipelineOptions(depth)).train(source())
    while next(training) < 2:
        pass
    training.close()
    assert closed == [True]
    assert not step_threads()


@pytest.mark.parametrize(
    "arguments",
    [
        {"depth": -1},
        {"max_staleness": -1},
        {"depth": 0, "max_staleness": 1},
        {"parallel_steps": 0},
        {"warmup_updates": -1},
    ],
)
def test_options_that_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Received: (depth|parallel_steps)="):
        PipelineOptions(**arguments)


@pytest.mark.parametrize(
    ("options", "dropout"),
    [
        (PipelineOptions(0), 0.3),
        (PipelineOptions(2), 0.3),
        (PipelineOptions(2, max_staleness=1), 0.3),
        (PipelineOptions(2, max_staleness=1), 0.0),
    ],
)
def test_each_stage_of_each_step_is_timed(options: PipelineOptions, dropout: float) -> None:
    made = trainer(dropout)
    clock = StageClock(SpanRing(TraceBounds(1000)))
    started = time.monotonic()
    assert len(list(StepPipeline(made, options, clock=clock).train(tagged(batches())))) == STEPS
    took = time.monotonic() - started
    assert clock.spans is not None
    spans = clock.spans.drain()
    for stage in ("prepare", "pull", "compute", "measure", "push"):
        assert [span.number for span in spans if span.name == stage] == list(range(1, STEPS + 1))
        # Two steps may compute at once.
        assert 0 < clock.seconds[stage] < (2 if stage == "compute" else 1) * took
    # One more: the reading that finds the end.
    assert sum(span.name == "read" for span in spans) >= STEPS + 1
    here = [span for span in spans if span.thread == threading.current_thread().name]
    assert sum(span.seconds for span in here) <= took
    here.sort(key=lambda span: span.start)
    assert all(before.start + before.seconds <= after.start for before, after in pairwise(here))
