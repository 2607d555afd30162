"""The traced TensorFlow functions that compute with rows: a training step, an evaluation, a prediction.

The model is traced in a `GatherContext`: its SparseEmbedding layers take rows that were pulled for the ids which
`training.recording` found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from deeprec_spark.layers import context
from deeprec_spark.training import metrics
from deeprec_spark.training.buffers import as_array, as_tensor
from deeprec_spark.training.dense import FlatLayout
from deeprec_spark.training.inputs import InputBinding, OutputBinding
from deeprec_spark.training.lookups import LookupPlan, Lookups
from deeprec_spark.training.optimizers import Clipping

Tensor = Any
Float32Array = npt.NDArray[np.float32]


def call_model(model: Any, inputs: Any, training: bool) -> Any:
    """The model's outputs; `training` is passed where the model takes it."""
    if model._call_has_training_arg:
        return model(inputs, training=training)
    return model(inputs)


@dataclass(frozen=True)
class RowTensors:
    """What a traced step takes for its lookups; see `training.lookups`. One tensor of each for each width."""

    rows: Sequence[Tensor]
    inverse: Sequence[Tensor]
    sizes: Sequence[Tensor]
    uniques: Sequence[Tensor]

    def lists(self) -> list[list[Tensor]]:
        """The tensors in the order of `signature`."""
        return [list(self.rows), list(self.inverse), list(self.sizes), list(self.uniques)]

    @staticmethod
    def signature(plan: LookupPlan) -> list[list[Any]]:
        """The specs of the four lists."""
        return [
            [tf.TensorSpec([None, width], tf.float32) for width, _ in plan.groups],
            [tf.TensorSpec([None], tf.int32) for _ in plan.groups],
            [
                tf.TensorSpec([sum(len(plan.tables[name]) for name in group)], tf.int32)
                for _, group in plan.groups
            ],
            [tf.TensorSpec([len(group)], tf.int32) for _, group in plan.groups],
        ]

    @staticmethod
    def of(plan: LookupPlan, lookups: Lookups, rows: Mapping[str, Float32Array]) -> RowTensors:
        """The tensors of pulled rows."""
        return RowTensors(
            [as_tensor(array) for array in plan.join_rows(rows)],
            [as_tensor(array) for array in lookups.inverse],
            [as_tensor(array) for array in lookups.sizes],
            [as_tensor(np.array([len(rows[name]) for name in group], np.int32)) for _, group in plan.groups],
        )


def _gather(
    plan: LookupPlan,
    gathered: Sequence[Tensor],
    sizes: Sequence[Tensor],
    frozen: Collection[str] = (),
) -> context.GatherContext:
    """The context that hands the calls their parts of `gathered`, one `[ids, width]` for each width.

    Rows of the tables in `frozen` take no gradient.
    """
    parts = [
        tf.split(rows, lengths, num=lengths.shape[0]) for rows, lengths in zip(gathered, sizes, strict=True)
    ]
    tables = [call.table for call in plan.calls]
    rows = [parts[group][place] for group, place in plan.places]
    return context.GatherContext(
        tables,
        [
            tf.stop_gradient(part) if table in frozen else part
            for table, part in zip(tables, rows, strict=True)
        ],
    )


def _lookup(rows: Sequence[Tensor], inverse: Sequence[Tensor]) -> list[Tensor]:
    return [tf.gather(values, numbers) for values, numbers in zip(rows, inverse, strict=True)]


def _sum_by_row(gradient: Tensor, numbers: Tensor, rows: Tensor) -> Tensor:
    """Sum `[ids, width]` over the ids of each row: `[rows, width]`, in the order of the ids.

    Twice as fast as `unsorted_segment_sum`. It leaves rows that no id names uninitialised, but there are none: every
    row was pulled for an id of this batch.
    """
    return tf.raw_ops.SparseSegmentSumGrad(
        grad=gradient, indices=numbers, segment_ids=tf.range(tf.size(numbers)), output_dim0=rows
    )


def _sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sums that are finite only if every element is."""
    return [tf.reduce_sum(tf.cast(tensor, tf.float32)) for tensor in tensors]


@dataclass(frozen=True)
class TrainResult:
    """What the traced training step returns.

    `checks` float32: the loss, the sum of each output, then the sum of the gradients.
    """

    checks: Float32Array
    dense_gradient: Float32Array
    state_delta: Float32Array | None
    row_gradients: Sequence[Float32Array]


class TrainProgram:
    """Loss, gradients and metrics of one batch, as a pure function of the dense vector and the rows.

    Args:
        model: a compiled, built Keras model.
        binding, outputs: its inputs and outputs.
        plan: the lookups that the recording found.
        dense, state: where the model's weights lie in the flat vectors.
        weighted: whether batches carry sample weights.
        clipping: clips the gradients of the weights, and with `clip_rows` those of the tables too.
        frozen: tables whose rows take no gradient, so that they count in no norm either.
    """

    def __init__(
        self,
        model: Any,
        binding: InputBinding,
        outputs: OutputBinding,
        plan: LookupPlan,
        dense: FlatLayout,
        state: FlatLayout,
        *,
        weighted: bool,
        clipping: Clipping,
        clip_rows: bool,
        frozen: Collection[str] = (),
    ) -> None:
        self._model, self._binding, self._outputs, self._plan = model, binding, outputs, plan
        self._dense, self._state = dense, state
        self._weighted, self._clipping, self._clip_rows = weighted, clipping, clip_rows
        self._frozen = frozenset(frozen)
        mapped = {id(variable) for variable in (*dense.variables, *state.variables)}
        candidates = [*metrics.variables(model), *model.non_trainable_variables]
        # Metric states, seeds, counters: they stay in this process and are updated in place.
        self._local = list(
            {id(variable): variable for variable in candidates if id(variable) not in mapped}.values()
        )
        self._function = tf.function(
            self._step,
            input_signature=[
                tf.TensorSpec([dense.size], tf.float32),
                tf.TensorSpec([state.size], tf.float32),
                *RowTensors.signature(plan),
                binding.signature(),
                outputs.signature(),
                weight_signature(weighted),
            ],
            autograph=False,
        ).get_concrete_function()
        columns = self._function.inputs[2 + 4 * len(plan.groups) :][: len(binding.columns)]
        self._used = reached_inputs(self._function.graph, columns)

    @property
    def used_columns(self) -> list[bool]:
        """Which columns the step computes with; ids that only choose rows are not among them."""
        return self._used

    def run(
        self,
        flat: Float32Array,
        state: Float32Array,
        rows: RowTensors,
        columns: Sequence[Tensor],
        labels: Sequence[Tensor],
        weight: Sequence[Tensor],
    ) -> TrainResult:
        """Run one step; `weight` holds the sample weights, or nothing."""
        checks, gradient, delta, row_gradients = self._function(
            as_tensor(flat), as_tensor(state), *rows.lists(), list(columns), list(labels), list(weight)
        )
        return TrainResult(
            as_array(checks),
            as_array(gradient),
            as_array(delta[0]) if delta else None,
            [as_array(tensor) for tensor in row_gradients],
        )

    def _step(
        self,
        flat: Tensor,
        flat_state: Tensor,
        rows: list[Tensor],
        inverse: list[Tensor],
        sizes: list[Tensor],
        uniques: list[Tensor],
        columns: list[Tensor],
        labels: list[Tensor],
        weight: list[Tensor],
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        inputs, targets = self._binding.pack(columns), self._outputs.pack(labels)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(flat)
            gathered = _lookup(rows, inverse)
            tape.watch(gathered)
            gather = _gather(self._plan, gathered, sizes, self._frozen)
            mapping = [
                *zip(self._dense.variables, self._dense.split(flat), strict=True),
                *zip(self._state.variables, self._state.split(flat_state), strict=True),
            ]
            scope = keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False)
            with scope, context.use(gather):
                predicted = call_model(self._model, inputs, training=True)
                gather.finish()
                loss = _loss_and_metrics(self._model, inputs, targets, predicted, weight, training=True)
        flat_gradient, *gathered_gradients = tape.gradient(
            loss, [flat, *gathered], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        row_gradients = [
            _sum_by_row(tf.convert_to_tensor(gradient), numbers, tf.shape(values)[0])
            for gradient, numbers, values in zip(gathered_gradients, inverse, rows, strict=True)
        ]
        if self._clipping:
            flat_gradient, row_gradients = self._clip(flat_gradient, row_gradients, uniques)
        for variable in self._local:
            value = scope.get_current_value(variable)
            if value is not None:
                variable.assign(value)
        delta = []
        if self._state.size:
            new_state = [scope.get_current_value(variable) for variable in self._state.variables]
            delta = [self._state.join(new_state) - flat_state]
        checks = _sums([loss, *keras.tree.flatten(predicted)])
        checks.append(tf.add_n(_sums([flat_gradient, *row_gradients])))
        return tf.stack(checks), flat_gradient, delta, row_gradients

    def _clip(
        self, flat_gradient: Tensor, row_gradients: list[Tensor], uniques: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Clip by variable and by table: untouched rows have no gradient, so a table's norm is that of its rows."""
        dense = self._dense.split(flat_gradient)
        if not self._clip_rows:
            return self._dense.join(self._clipping.apply(dense)), row_gradients
        tables = [
            tf.split(gradient, lengths, num=lengths.shape[0])
            for gradient, lengths in zip(row_gradients, uniques, strict=True)
        ]
        clipped = self._clipping.apply([*dense, *(part for group in tables for part in group)])
        rest = iter(clipped[len(dense) :])
        joined = [tf.concat([next(rest) for _ in group], 0) for group in tables]
        return self._dense.join(clipped[: len(dense)]), joined


class EvaluateProgram:
    """Loss and metrics of one batch with the model's own weights."""

    def __init__(
        self, model: Any, binding: InputBinding, outputs: OutputBinding, plan: LookupPlan, *, weighted: bool
    ) -> None:
        self._model, self._binding, self._outputs, self._plan = model, binding, outputs, plan
        self._function = tf.function(
            self._step,
            input_signature=[
                *RowTensors.signature(plan),
                binding.signature(),
                outputs.signature(),
                weight_signature(weighted),
            ],
            autograph=False,
        ).get_concrete_function()

    def run(
        self, rows: RowTensors, columns: Sequence[Tensor], labels: Sequence[Tensor], weight: Sequence[Tensor]
    ) -> Float32Array:
        """Update the metrics; the checks of `TrainResult`, without the gradients' sum."""
        return as_array(self._function(*rows.lists(), list(columns), list(labels), list(weight)))

    def _step(
        self,
        rows: list[Tensor],
        inverse: list[Tensor],
        sizes: list[Tensor],
        uniques: list[Tensor],
        columns: list[Tensor],
        labels: list[Tensor],
        weight: list[Tensor],
    ) -> Tensor:
        inputs, targets = self._binding.pack(columns), self._outputs.pack(labels)
        gather = _gather(self._plan, _lookup(rows, inverse), sizes)
        with context.use(gather):
            predicted = call_model(self._model, inputs, training=False)
            gather.finish()
            loss = _loss_and_metrics(self._model, inputs, targets, predicted, weight, training=False)
        return tf.stack(_sums([loss, *keras.tree.flatten(predicted)]))


class PredictProgram:
    """The model's outputs for one batch, with its own weights."""

    def __init__(self, model: Any, binding: InputBinding, plan: LookupPlan) -> None:
        self._model, self._binding, self._plan = model, binding, plan
        self._function = tf.function(
            self._step, input_signature=[*RowTensors.signature(plan), binding.signature()], autograph=False
        ).get_concrete_function()

    def run(self, rows: RowTensors, columns: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        """One array for each output."""
        return [as_array(tensor) for tensor in self._function(*rows.lists(), list(columns))]

    def _step(
        self,
        rows: list[Tensor],
        inverse: list[Tensor],
        sizes: list[Tensor],
        uniques: list[Tensor],
        columns: list[Tensor],
    ) -> list[Tensor]:
        gather = _gather(self._plan, _lookup(rows, inverse), sizes)
        with context.use(gather):
            predicted = call_model(self._model, self._binding.pack(columns), training=False)
            gather.finish()
        return [tf.convert_to_tensor(output) for output in keras.tree.flatten(predicted)]


def reached_inputs(graph: Any, inputs: Sequence[Tensor]) -> list[bool]:
    """Which of these placeholders the outputs or the side effects of a function graph depend on."""
    waiting = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    seen = {id(op) for op in waiting}
    while waiting:
        op = waiting.pop()
        for source in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if id(source) not in seen:
                seen.add(id(source))
                waiting.append(source)
    return [id(tensor.op) in seen for tensor in inputs]


def weight_signature(weighted: bool) -> list[Any]:
    """The specs of the sample weights: one tensor or none."""
    return [tf.TensorSpec([None], tf.float32)] if weighted else []


def _loss_and_metrics(
    model: Any, inputs: Any, targets: Any, predicted: Any, weight: list[Tensor], *, training: bool
) -> Tensor:
    """The total loss as Keras' `fit` computes it; metrics are updated on the way."""
    sample_weight = weight[0] if weight else None
    loss = model._compute_loss(
        x=inputs, y=targets, y_pred=predicted, sample_weight=sample_weight, training=training
    )
    batch_size = tf.shape(keras.tree.flatten(predicted)[0])[0]
    model._loss_tracker.update_state(loss, sample_weight=batch_size)
    model.compute_metrics(inputs, targets, predicted, sample_weight=sample_weight)
    return loss
