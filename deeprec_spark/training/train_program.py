"""The traced training step: loss and gradients of a batch, in one part or in several.

    one part       outputs of lookups ─ split ─ dense part ─── gradients by row ─ clip
    several        outputs of lookups ─ split ─ dense part ─┐
                   outputs of lookups ─ split ─ dense part ─┴─ gradients by row ─ clip

TensorFlow splits, computes the dense part, and clips, if the optimizer does; the engine sums gradients by row. The
dense part is what XLA compiles: it has no shape that differs between batches of one size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

# There is no public way to ask whether an operation is stateful.
from tensorflow.python.framework import op_def_registry

from deeprec_spark.layers import context
from deeprec_spark.training import metrics
from deeprec_spark.training.buffers import as_array, as_tensor
from deeprec_spark.training.dense import FlatLayout
from deeprec_spark.training.function_calls import call_function
from deeprec_spark.training.inputs import InputBinding, OutputBinding
from deeprec_spark.training.lookups import LookupPlan, Lookups, sum_by_row
from deeprec_spark.training.optimizers import Clipping
from deeprec_spark.training.programs import (
    MetricProgram,
    Predicted,
    RowTensors,
    call_model,
    gather_context,
    loss_of,
    reached_inputs,
    split_calls,
    sums,
    weight_signature,
)

logger = logging.getLogger(__name__)

Tensor = Any
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TrainResult:
    """What the traced training step returns.

    `checks` float32: the loss, the sum of each output, then the sum of the gradients. `predicted` has the loss and the
    outputs of each part of the batch, for the metrics. `pulled_at` is the store's step whose parameters were used.
    """

    pulled_at: int
    checks: Float32Array
    dense_gradient: Float32Array
    state_delta: Float32Array | None
    row_gradients: Sequence[Float32Array]
    predicted: Sequence[Predicted]


@dataclass(frozen=True)
class PartTensors:
    """What a step takes of each part of a batch; `weight` holds the sample weights, or nothing."""

    rows: RowTensors
    lookups: Lookups
    columns: Sequence[Tensor]
    labels: Sequence[Tensor]
    weight: Sequence[Tensor]
    size: int


class _Given(NamedTuple):
    """What the traced functions take, in this order; lists by group of tables, by column, by output."""

    flat: Tensor
    state: Tensor
    lookups: list[Tensor]
    sizes: list[Tensor]
    columns: list[Tensor]
    labels: list[Tensor]
    weight: list[Tensor]


_GIVEN = len(_Given._fields)
_HARMLESS = frozenset(
    {
        *("Placeholder", "PartitionedCall", "StatefulPartitionedCall", "Assert", "PrintV2"),
        *("ReadVariableOp", "ResourceGather", "VariableShape", "VarIsInitializedOp"),
        *("HashTableV2", "LookupTableFindV2", "LookupTableSizeV2"),
    }
)
"""Operations that TensorFlow counts as stateful and that change nothing: reads, checks, and calls of functions, which
are looked at themselves."""
_Found = tuple[Tensor, Tensor, list[Tensor], list[Tensor], Predicted]
"""Checks, dense gradient, how the state moved, gradients of the lookups' outputs, and what is predicted."""


class TrainProgram:
    """Loss and gradients of one batch, as a function of the dense vector and the rows.

    Args:
        model: a compiled, built Keras model.
        binding, outputs: its inputs and outputs.
        plan: the lookups that the recording found.
        dense, state: where the model's weights lie in the flat vectors.
        weighted: whether batches carry sample weights.
        clipping: clips the gradients of the weights, and with `clip_rows` those of the tables too.
        frozen: tables whose rows take no gradient, so that they count in no norm either.
        xla: compile the dense part for batches of shapes that come again.
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
        xla: bool = False,
    ) -> None:
        self._model, self._binding, self._outputs, self._plan = model, binding, outputs, plan
        self._dense, self._state = dense, state
        self._clipping, self._clip_rows = clipping, clip_rows
        self._frozen = frozenset(frozen)
        mapped = {id(variable) for variable in (*dense.variables, *state.variables)}
        candidates = [*metrics.variables(model), *model.non_trainable_variables]
        # Sums of each output's loss begin at zero in each step; `MetricProgram` adds them up.
        self._trackers = [
            variable
            for metric in getattr(getattr(model, "_compile_loss", None), "metrics", [])
            for variable in metric.variables
        ]
        added = {id(variable) for variable in self._trackers}
        candidates = [variable for variable in candidates if id(variable) not in added]
        # Metric states, seeds, counters: they stay in this process and are updated in place.
        self._local = list(
            {id(variable): variable for variable in candidates if id(variable) not in mapped}.values()
        )
        self._signature = [
            tf.TensorSpec([dense.size], tf.float32),
            tf.TensorSpec([state.size], tf.float32),
            *RowTensors.signature(plan),
            binding.signature(),
            outputs.signature(),
            weight_signature(weighted),
        ]
        self._xla = xla and _has_fixed_shapes(plan)
        self._shapes: tuple[Any, ...] | None = None
        self._changed: list[Any] = []
        self._functions: dict[tuple[bool, bool], Any] = {}
        self._clip_function = self._trace(self._clip, self._clip_signature()) if clipping else None
        whole = self._function(whole=True, compiled=False)
        columns = whole.inputs[2 + 2 * len(plan.groups) :][: len(binding.columns)]
        self._used = reached_inputs(whole.graph, columns)
        self._stateful = _changes_state(whole.graph)
        self.metrics = MetricProgram(
            model, binding, outputs, whole.structured_outputs[-1], self._trackers, weighted=weighted
        )

    @property
    def used_columns(self) -> list[bool]:
        """Which columns step and metrics compute with; ids that only choose rows are not among them."""
        return [used or self.metrics.takes_columns for used in self._used]

    @property
    def overlaps(self) -> bool:
        """Whether steps may compute at the same time: no state of this process (random draws) passes between them.

        That is neither a variable of Keras that the step assigns, nor what an operation of TensorFlow's own keeps. With
        XLA they may not: its function is made where it is first needed, which must be the thread that calls Keras.
        """
        return not self._changed and not self._stateful and not self._xla

    def run(
        self, pulled_at: int, flat: Float32Array, state: Float32Array, parts: Sequence[PartTensors]
    ) -> TrainResult:
        """Run one step on a batch, given in one part or more, with parameters of the store's step `pulled_at`."""
        founds = []
        moved = state
        total = sum(part.size for part in parts)
        for part in parts:
            share = [] if len(parts) == 1 else [tf.constant(part.size / total, tf.float32)]
            found = self._call(flat, moved, part, *share, whole=len(parts) == 1)
            if found[2]:
                moved = moved + as_array(found[2][0])
            founds.append(found)
        checks = _sum([as_array(found[0]) for found in founds])
        gradient = _sum([as_array(found[1]) for found in founds])
        of_outputs = [[as_array(tensor) for tensor in found[3]] for found in founds]
        predicted: list[Predicted] = [found[4] for found in founds]
        rows, check = sum_by_row([part.lookups for part in parts], of_outputs, self._plan.widths)
        if self._clip_function is not None:
            gradient, rows = self._clipped(self._clip_function, gradient, rows, parts[0].lookups)
        checks = np.append(checks[:-1], checks[-1] + np.float32(check))
        delta = moved - state if self._state.size else None
        return TrainResult(pulled_at, checks, gradient, delta, rows, predicted)

    def _clipped(
        self, clip: Any, gradient: Float32Array, rows: list[Float32Array], lookups: Lookups
    ) -> tuple[Float32Array, list[Float32Array]]:
        lengths = [
            as_tensor(np.array([len(lookups.keys[name].keys) for name in group], np.int32))
            for _, group in self._plan.groups
        ]
        clipped, clipped_rows = call_function(
            clip, as_tensor(gradient), [as_tensor(values) for values in rows], lengths
        )
        return as_array(clipped), [as_array(values) for values in clipped_rows]

    def _call(
        self, flat: Float32Array, state: Float32Array, part: PartTensors, *share: Tensor, whole: bool
    ) -> Any:
        columns = list(part.columns)
        compiled = self._xla and self._comes_again(part)
        if compiled:
            # What is not computed with has no shape of its own, so that XLA compiles once.
            columns = [
                column if used else empty
                for column, used, empty in zip(columns, self._used, self._binding.empty_tensors, strict=True)
            ]
        function = self._function(whole=whole, compiled=compiled)
        return call_function(
            function,
            as_tensor(flat),
            as_tensor(state),
            *part.rows.lists(),
            columns,
            list(part.labels),
            list(part.weight),
            *share,
        )

    def _comes_again(self, part: PartTensors) -> bool:
        """Whether an earlier batch had these shapes: the first ones that were met are those to compile for."""
        columns = [tuple(column.shape) for column, used in zip(part.columns, self._used, strict=True) if used]
        shapes = (part.size, *columns, *(tuple(np.asarray(sizes)) for sizes in part.rows.sizes))
        if self._shapes is None:
            self._shapes = shapes
            return False
        return shapes == self._shapes

    def _function(self, *, whole: bool, compiled: bool) -> Any:
        """The concrete function of a whole batch or of a part, with its dense part compiled or not."""
        key = (whole, compiled)
        if key not in self._functions:
            dense_part = self._dense_part
            if compiled:
                logger.info("XLA compiles the dense part of the step")
                dense_part = tf.function(self._dense_part, jit_compile=True, autograph=False)
            share = [] if whole else [tf.TensorSpec([], tf.float32)]
            self._functions[key] = self._trace(
                lambda *arguments: self._part(dense_part, _Given(*arguments[:_GIVEN]), *arguments[_GIVEN:]),
                [*self._signature, *share],
            )
        return self._functions[key]

    @staticmethod
    def _trace(function: Any, signature: Sequence[Any]) -> Any:
        traced = tf.function(function, input_signature=list(signature), autograph=False)
        return traced.get_concrete_function()

    def _part(self, dense_part: Any, given: _Given, share: Tensor | None = None) -> _Found:
        """What the step finds of a batch or of a part of it; the checks are those of `TrainResult`."""
        parts = split_calls(self._plan, given.lookups, given.sizes)
        loss, outputs, gradient, of_calls, new_state, local, tracked = dense_part(
            given.flat, given.state, parts, given.columns, given.labels, given.weight, share
        )
        for variable, value in zip(self._changed, local, strict=True):
            variable.assign(value)
        checks = tf.stack(sums([loss, *outputs, gradient]))
        delta = [new_state - given.state] if self._state.size else []
        return checks, gradient, delta, _join_calls(self._plan, of_calls), Predicted(loss, outputs, tracked)

    def _dense_part(
        self,
        flat: Tensor,
        flat_state: Tensor,
        parts: list[Tensor],
        columns: list[Tensor],
        labels: list[Tensor],
        weight: list[Tensor],
        share: Tensor | None,
    ) -> tuple[Any, ...]:
        """Loss, outputs, gradients and new states, of what each call of a layer gets."""
        inputs, targets = self._binding.pack(columns), self._outputs.pack(labels)
        tables = [call.table for call in self._plan.calls]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([flat, *parts])
            gather = gather_context(
                self._plan,
                [
                    tf.stop_gradient(part) if table in self._frozen else part
                    for table, part in zip(tables, parts, strict=True)
                ],
            )
            mapping = [
                *zip(self._dense.variables, self._dense.split(flat), strict=True),
                *zip(self._state.variables, self._state.split(flat_state), strict=True),
                *((variable, tf.zeros(variable.shape, variable.dtype)) for variable in self._trackers),
            ]
            scope = keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False)
            with scope, context.use(gather):
                predicted = call_model(self._model, inputs, training=True)
                gather.finish()
                loss = loss_of(self._model, inputs, targets, predicted, weight, training=True)
            scaled = loss if share is None else loss * tf.cast(share, loss.dtype)
        gradient, *of_calls = tape.gradient(
            scaled, [flat, *parts], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        new_state = self._state.join(
            [scope.get_current_value(variable) for variable in self._state.variables]
        )
        self._changed = [
            variable for variable in self._local if scope.get_current_value(variable) is not None
        ]
        local = [scope.get_current_value(variable) for variable in self._changed]
        tracked = [scope.get_current_value(variable) for variable in self._trackers]
        outputs = keras.tree.flatten(predicted)
        return loss, outputs, gradient, of_calls, new_state, local, tracked

    def _clip_signature(self) -> list[Any]:
        return [
            tf.TensorSpec([self._dense.size], tf.float32),
            [tf.TensorSpec([None, width], tf.float32) for width in self._plan.widths],
            [tf.TensorSpec([len(group)], tf.int32) for _, group in self._plan.groups],
        ]

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


def _changes_state(graph: Any) -> bool:
    """Whether an operation of a function draws random numbers of its own, changes a variable, or leaves TensorFlow."""
    definition = graph.as_graph_def()
    names = {node.op for node in definition.node}
    for function in definition.library.function:
        names.update(node.op for node in function.node_def)
    found = [op_def_registry.get(name) for name in names - _HARMLESS]
    return any(operation is not None and operation.is_stateful for operation in found)


def _has_fixed_shapes(plan: LookupPlan) -> bool:
    """Whether all shapes of a step follow from the size of the batch."""
    return all(call.fixed for call in plan.calls)


def _sum(arrays: Sequence[Float32Array]) -> Float32Array:
    return functools.reduce(np.add, arrays)


def _join_calls(plan: LookupPlan, of_calls: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `split_calls`: one tensor for each width."""
    joined: list[list[tuple[int, Tensor]]] = [[] for _ in plan.groups]
    for (group, place), tensor in zip(plan.places, of_calls, strict=True):
        joined[group].append((place, tensor))
    return [
        tf.concat([tf.convert_to_tensor(tensor) for _, tensor in sorted(calls, key=lambda call: call[0])], 0)
        for calls in joined
    ]
