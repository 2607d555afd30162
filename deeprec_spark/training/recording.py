"""The trace that finds the ids which reach the SparseEmbedding layers of a model.

Ids that are a column of the batch are read from the batch from then on; only ids that the model computes (hashed,
crossed, shifted) cost a run of this trace, from which TensorFlow prunes all else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from deeprec_spark.layers import context
from deeprec_spark.training.buffers import as_array
from deeprec_spark.training.inputs import InputBinding
from deeprec_spark.training.lookups import LookupCall, LookupPlan, Lookups
from deeprec_spark.training.programs import call_model

Tensor = Any
# What only changes the shape of ids, or widens their type, keeps "the ids are this column" true.
_TRANSPARENT = {"Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "EnsureShape"}


class Recording:
    """Finds the ids that reach the SparseEmbedding layers of a model, and the plan to look them up."""

    def __init__(self, model: Any, binding: InputBinding, training: bool) -> None:
        calls: list[context.RecordedCall] = []
        sources: list[str | None] = []

        def record(*tensors: Tensor) -> list[Tensor]:
            calls.clear()
            sources.clear()
            recorder = context.RecordContext()
            # The scope keeps this trace from updating anything: moving averages, seeds.
            with keras.StatelessScope(), context.use(recorder):
                call_model(model, binding.pack(tensors), training)
            columns = {tensor.ref(): name for name, tensor in zip(binding.columns, tensors, strict=True)}
            outputs = []
            for call in recorder.calls:
                _check_graph(call)
                source = _column(call.origin.ids, columns)
                calls.append(call)
                sources.append(source)
                if source is None:
                    outputs.append(call.ids)
            return outputs

        function = tf.function(record, input_signature=binding.signature(), autograph=False)
        self._function = function.get_concrete_function()
        self._binding = binding
        computed = -1
        planned = []
        for call, source in zip(calls, sources, strict=True):
            computed += source is None
            padding = call.origin.padding_value
            length = call.origin.bag_length
            # Of ids that the model computes, those that count are recorded: bags with padding have lost their ends.
            combines = length is not None and (source is not None or padding is None)
            planned.append(
                LookupCall(
                    call.layer.table,
                    call.layer.embedding_dim,
                    column=source,
                    padding_value=None if source is None else padding,
                    recorded=computed if source is None else None,
                    combiner=call.origin.combiner if combines else None,
                    length=length if combines and length is not None else 1,
                )
            )
        self.plan = LookupPlan(planned)

    def lookups(self, parts: Sequence[tuple[Sequence[npt.NDArray[Any]], Sequence[Tensor]]]) -> list[Lookups]:
        """The distinct keys of a batch and how its parts spread over them.

        Args:
            parts: each as arrays and as tensors, in the order of the binding's columns.
        """
        columns = self._binding.columns
        return self.plan.collect(
            [(dict(zip(columns, arrays, strict=True)), self._recorded(tensors)) for arrays, tensors in parts]
        )

    def _recorded(self, tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        """The ids that the model computes of these columns."""
        return [as_array(ids) for ids in self._function(*tensors)] if self.plan.needs_recording else []


def _check_graph(call: context.RecordedCall) -> None:
    graph = tf.compat.v1.get_default_graph()
    if call.ids.graph is not graph:
        raise ValueError(
            f"SparseEmbedding {call.layer.name!r} is called inside of tf.cond, tf.while_loop, tf.map_fn or a nested "
            "tf.function, where its ids cannot be known before the step. Call it outside and use its result "
            f"there. Received: a call in graph {call.ids.graph.name!r}"
        )


def _column(tensor: Tensor, columns: Mapping[Any, str]) -> str | None:
    """The column that `tensor` is, whatever its shape; None if it is computed."""
    if isinstance(tensor, tf.RaggedTensor):
        return None
    while tensor.ref() not in columns:
        operation = tensor.op
        widening = operation.type == "Cast" and _holds_all(tensor.dtype, operation.inputs[0].dtype)
        if not widening and operation.type not in _TRANSPARENT:
            return None
        tensor = operation.inputs[0]
    return columns[tensor.ref()]


def _holds_all(wide: Any, narrow: Any) -> bool:
    """Whether integers of type `narrow` are the same in type `wide`."""
    return bool(narrow.is_integer and np.can_cast(narrow.as_numpy_dtype, wide.as_numpy_dtype, "safe"))
