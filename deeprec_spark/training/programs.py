"""The traced TensorFlow functions that compute with rows: an evaluation, a prediction, and what a training step
(`training.train_program`) shares with them.

The model is traced in a `GatherContext`: its SparseEmbedding layers take rows that were pulled for the ids which
`training.recording` found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from deeprec_spark.layers import context
from deeprec_spark.training.buffers import as_array, as_tensor
from deeprec_spark.training.function_calls import call_function
from deeprec_spark.training.inputs import InputBinding, OutputBinding
from deeprec_spark.training.lookups import LookupPlan, Lookups

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

    outputs: Sequence[Tensor]
    sizes: Sequence[Tensor]

    def lists(self) -> list[list[Tensor]]:
        """The tensors in the order of `signature`."""
        return [list(self.outputs), list(self.sizes)]

    @staticmethod
    def signature(plan: LookupPlan) -> list[list[Any]]:
        """The specs of the two lists."""
        calls = [sum(len(plan.tables[name]) for name in group) for _, group in plan.groups]
        return [
            [tf.TensorSpec([None, width], tf.float32) for width in plan.widths],
            [tf.TensorSpec([count], tf.int32) for count in calls],
        ]

    @staticmethod
    def of(plan: LookupPlan, parts: Sequence[Lookups], rows: Mapping[str, Float32Array]) -> list[RowTensors]:
        """The tensors of pulled rows, for each part of a batch."""
        joined = plan.join_rows(rows)
        return [
            RowTensors(
                [as_tensor(array) for array in lookups.spread(joined)],
                [as_tensor(array) for array in lookups.sizes],
            )
            for lookups in parts
        ]


def gather_context(plan: LookupPlan, parts: Sequence[Tensor]) -> context.GatherContext:
    """The context that hands the calls of layers what `split_calls` gave."""
    return context.GatherContext(
        [call.table for call in plan.calls], parts, [call.combiner is not None for call in plan.calls]
    )


def split_calls(plan: LookupPlan, outputs: Sequence[Tensor], sizes: Sequence[Tensor]) -> list[Tensor]:
    """What each call of a layer gets, in the order of the calls, of one `[outputs, width]` for each width."""
    parts = [
        tf.split(rows, lengths, num=lengths.shape[0]) for rows, lengths in zip(outputs, sizes, strict=True)
    ]
    return [parts[group][place] for group, place in plan.places]


def sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sums that are finite only if every element is."""
    return [tf.reduce_sum(tf.cast(tensor, tf.float32)) for tensor in tensors]


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
        return as_array(call_function(self._function, *rows.lists(), columns, labels, weight))

    def _step(
        self,
        outputs: list[Tensor],
        sizes: list[Tensor],
        columns: list[Tensor],
        labels: list[Tensor],
        weight: list[Tensor],
    ) -> Tensor:
        inputs, targets = self._binding.pack(columns), self._outputs.pack(labels)
        gather = gather_context(self._plan, split_calls(self._plan, outputs, sizes))
        with context.use(gather):
            predicted = call_model(self._model, inputs, training=False)
            gather.finish()
            loss = loss_of(self._model, inputs, targets, predicted, weight, training=False)
            update_metrics(self._model, inputs, targets, predicted, weight, loss)
        return tf.stack(sums([loss, *keras.tree.flatten(predicted)]))


class PredictProgram:
    """The model's outputs for one batch, with its own weights."""

    def __init__(self, model: Any, binding: InputBinding, plan: LookupPlan) -> None:
        self._model, self._binding, self._plan = model, binding, plan
        self._function = tf.function(
            self._step, input_signature=[*RowTensors.signature(plan), binding.signature()], autograph=False
        ).get_concrete_function()

    def run(self, rows: RowTensors, columns: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        """One array for each output; those of half precision are float32."""
        return [as_array(tensor) for tensor in call_function(self._function, *rows.lists(), columns)]

    def _step(
        self,
        outputs: list[Tensor],
        sizes: list[Tensor],
        columns: list[Tensor],
    ) -> list[Tensor]:
        gather = gather_context(self._plan, split_calls(self._plan, outputs, sizes))
        with context.use(gather):
            predicted = call_model(self._model, self._binding.pack(columns), training=False)
            gather.finish()
        return [_readable(tf.convert_to_tensor(output)) for output in keras.tree.flatten(predicted)]


def _readable(output: Tensor) -> Tensor:
    """Half precision as float32: numpy has no bfloat16, and Arrow and Spark take neither half."""
    return tf.cast(output, tf.float32) if output.dtype in (tf.bfloat16, tf.float16) else output


class Predicted(NamedTuple):
    """The loss of (a part of) a batch, the model's outputs, flat, and what sums of each output's loss grow by."""

    loss: Tensor
    outputs: list[Tensor]
    tracked: list[Tensor]


class MetricProgram:
    """Adds training steps to the mean of the loss and to the metrics, one after another.

    It is no part of the step: steps may compute at the same time, while metrics add up in the order of the steps.

    Args:
        model, binding, outputs, weighted: see `TrainProgram`.
        predicted: specs of what a step predicts.
        trackers: Keras' sums of each output's loss.

    Raises:
        ValueError: the model's `compute_metrics` uses a tensor that its `call` or `compute_loss` has put somewhere.
    """

    def __init__(
        self,
        model: Any,
        binding: InputBinding,
        outputs: OutputBinding,
        predicted: Predicted,
        trackers: Sequence[Any],
        *,
        weighted: bool,
    ) -> None:
        self._model, self._binding, self._outputs, self._trackers = model, binding, outputs, trackers
        # Keras' own does not look at the inputs, and each tensor costs a call its time.
        self.takes_columns = type(model).compute_metrics is not keras.Model.compute_metrics
        traced = tf.function(
            self._update,
            input_signature=[
                binding.signature() if self.takes_columns else [],
                outputs.signature(),
                weight_signature(weighted),
                *tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), predicted),
            ],
            autograph=False,
        )
        self._function = traced.get_concrete_function()
        strangers = [tensor for tensor in self._function.captured_inputs if tf.is_symbolic_tensor(tensor)]
        if strangers:
            raise ValueError(
                "Metrics are computed apart from the step, from inputs, labels and outputs: return what they need as "
                "an output, or update them in compute_loss. Received: compute_metrics of "
                f"{type(model).__name__} with tensors of call or compute_loss: {[one.name for one in strangers]}"
            )

    def run(
        self,
        columns: Sequence[Tensor],
        labels: Sequence[Tensor],
        weight: Sequence[Tensor],
        predicted: Predicted,
    ) -> None:
        """Add a part of a batch."""
        given = columns if self.takes_columns else []
        call_function(
            self._function, given, labels, weight, predicted.loss, predicted.outputs, predicted.tracked
        )

    def _update(
        self,
        columns: list[Tensor],
        labels: list[Tensor],
        weight: list[Tensor],
        loss: Tensor,
        outputs: list[Tensor],
        tracked: list[Tensor],
    ) -> None:
        for variable, growth in zip(self._trackers, tracked, strict=True):
            variable.assign_add(growth)
        inputs = self._binding.pack(columns) if self.takes_columns else None
        predicted = self._outputs.restore(outputs)
        update_metrics(self._model, inputs, self._outputs.pack(labels), predicted, weight, loss)


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


def loss_of(
    model: Any, inputs: Any, targets: Any, predicted: Any, weight: Sequence[Tensor], *, training: bool
) -> Tensor:
    """The total loss as Keras' `fit` computes it."""
    return model._compute_loss(
        x=inputs, y=targets, y_pred=predicted, sample_weight=weight[0] if weight else None, training=training
    )


def update_metrics(
    model: Any, inputs: Any, targets: Any, predicted: Any, weight: Sequence[Tensor], loss: Tensor
) -> None:
    """Add a batch to the mean of the loss and to the metrics."""
    batch_size = tf.shape(keras.tree.flatten(predicted)[0])[0]
    model._loss_tracker.update_state(loss, sample_weight=batch_size)
    model.compute_metrics(inputs, targets, predicted, sample_weight=weight[0] if weight else None)
