"""Trainer: the training step of one worker, over any embedding store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from deeprec_spark.data.batch import Batch
from deeprec_spark.embedding.store import EmbeddingStore, PullReply, PullRequest, PushRequest, SparseGradient
from deeprec_spark.layers import context, tables
from deeprec_spark.tracing.staleness import Staleness
from deeprec_spark.training import metrics, optimizers
from deeprec_spark.training.buffers import as_tensor
from deeprec_spark.training.checks import check_finite, check_weight, class_weights
from deeprec_spark.training.dense import state_layout, trainable_layout
from deeprec_spark.training.inputs import InputBinding, OutputBinding, takes_groups
from deeprec_spark.training.options import TrainerOptions
from deeprec_spark.training.prepared import PreparedBatch, PreparedPart, split_batch
from deeprec_spark.training.programs import EvaluateProgram, PredictProgram, RowTensors, call_model
from deeprec_spark.training.recording import Recording
from deeprec_spark.training.train_program import PartTensors, TrainProgram, TrainResult
from deeprec_spark.training.xla_notice import XlaNotice

logger = logging.getLogger(__name__)

__all__ = ["PreparedBatch", "Trainer", "TrainerOptions"]

Float32Array = npt.NDArray[np.float32]
T = TypeVar("T")


class Trainer:
    """Trains a Keras model whose SparseEmbedding tables and dense weights live in an embedding store.

    A step is five stages, each a method, so that a pipeline may overlap them: `prepare`, `pull`, `compute`, `measure`,
    `push`.
    The step is always one traced function: `run_eagerly`, `jit_compile` and `steps_per_execution` of `compile` have no
    effect. Tables of layers that have `trainable = False` at `initialize` are read as in `predict` and never updated.
    Batches in groups reach a model with an `ExpandGroups` layer as they are, any other model flat.

    Args:
        model: a compiled Keras model with at least one SparseEmbedding.
        store: where its parameters live.
        options: see TrainerOptions.

    Example:
        >>> trainer = Trainer(model, LocalStore())
        >>> trainer.initialize(sample)
        >>> for batch in batches:
        ...     trainer.train_step(batch)
        >>> trainer.metric_results()
    """

    def __init__(self, model: Any, store: EmbeddingStore, options: TrainerOptions | None = None) -> None:
        self.model = model
        self.store = store
        self.options = options or TrainerOptions()
        self.step = 0
        self.staleness = Staleness()
        """Of the steps so far; whoever reports it may begin it anew."""
        _check_model(model)
        self._dense_optimizer = optimizers.from_keras(model.optimizer)
        self._sparse_optimizer = self.options.sparse_optimizer or self._dense_optimizer
        self._rate = optimizers.LearningRate(model.optimizer)
        self._clipping = optimizers.Clipping(model.optimizer)
        self._initialized = False
        self._weights_are_current = False
        self._recordings: dict[bool, Recording] = {}
        self._xla_notice = XlaNotice(self.options.dense_step.xla)
        self._train_programs: dict[bool, TrainProgram] = {}
        self._evaluate_programs: dict[bool, EvaluateProgram] = {}
        self._predict_program: PredictProgram | None = None
        if self.options.deterministic:
            keras.utils.set_random_seed(self.options.seed)
            tf.config.experimental.enable_op_determinism()

    def initialize(self, sample: Batch) -> None:
        """Build the model on a sample batch, and make its tables and dense parameters in the store.

        The model's current weights are the start values, unless the store has some already. A sample without
        labels is enough to predict.
        """
        if sample.size == 0:
            raise ValueError("The sample batch must hold at least one sample. Received: sample.size=0")
        self._grouped = takes_groups(self.model, sample.group_index)
        sample = sample.slice(0, 2)
        features = self._features(sample)
        self._inputs = InputBinding(self.model, features)
        head = [as_tensor(array) for array in self._inputs.arrays(features)]
        inputs = self._inputs.pack(head)
        with context.use(context.RecordContext()):
            outputs = call_model(self.model, inputs, training=False)
        self._outputs = OutputBinding(self.model, outputs, sample.labels)
        if sample.labels:
            self._build_loss(sample, inputs, outputs)
        specs = tables.table_specs(self.model, self._sparse_optimizer)
        self._frozen = tables.frozen_tables(self.model)
        self._own_optimizers = [
            layer.table
            for layer in tables.find_layers(self.model)
            if layer.optimizer is not None and layer.table not in self._frozen
        ]
        self._dense = trainable_layout(self.model)
        self._state = state_layout(self.model)
        self.store.create_tables(specs)
        self.store.init_dense(self._dense.pack(), self._state.pack(), self._dense_optimizer)
        self._initialized = True
        self._weights_are_current = False

    @property
    def input_columns(self) -> list[str]:
        """Names of the columns that the model takes."""
        return list(self._inputs.columns)

    @property
    def output_names(self) -> list[str]:
        """Names of the model's outputs, in order."""
        return self._outputs.names

    # Training: one method for each stage.

    def train_step(self, batch: Batch) -> None:
        """Train on one batch; metrics add up until `reset_metrics`. A batch without samples is `train_empty`."""
        if batch.size == 0:
            self.train_empty()
            return
        prepared = self.prepare(batch)
        result = self.compute(prepared, self.pull(prepared))
        self.measure(prepared, result)
        self.push(prepared, result)

    def record(self) -> None:
        """Make the trace that finds the ids of a training batch, if it is not made yet."""
        self._recording(training=True)

    def prepare(self, batch: Batch) -> PreparedBatch:
        """First stage: tensors, sample weights, and the distinct keys of the batch. Reads no parameter."""
        self._xla_notice.look_at(self._recording(training=True).plan, batch)
        return self._prepare(batch, training=True, max_samples=self.options.dense_step.micro_batch)

    def pull(self, prepared: PreparedBatch) -> PullReply:
        """Second stage: read the rows and the dense parameters; new rows are made, but not in frozen tables."""
        keys = prepared.keys
        reply = self.store.pull(PullRequest(self._trained(keys), train=True, dense=True))
        self.step = reply.step
        if frozen := {name: unique for name, unique in keys.items() if name in self._frozen}:
            read = self.store.pull(PullRequest(frozen, train=False, dense=False, unknown="default"))
            reply = replace(reply, rows={**reply.rows, **read.rows})
        return reply

    def compute(self, prepared: PreparedBatch, reply: PullReply) -> TrainResult:
        """Third stage: loss and gradients. Several threads may be in it where `overlaps` says so.

        Raises:
            NonFiniteError: the loss or a gradient is NaN or infinite; nothing has been pushed.
        """
        program = self._train_program(prepared.weighted)
        plan = self._recording(training=True).plan
        dense, state = _dense_of(reply)
        rows = RowTensors.of(plan, [part.lookups for part in prepared.parts], reply.rows)
        parts = [
            PartTensors(tensors, part.lookups, part.columns, part.labels, part.weight, part.size)
            for tensors, part in zip(rows, prepared.parts, strict=True)
        ]
        result = program.run(reply.step, dense, state, parts)
        if self.options.check_finite:
            self._check(result.checks, prepared.batch, "training")
        return result

    def overlaps(self, prepared: PreparedBatch) -> bool:
        """Whether this step may compute at the same time as others, with the same result; makes its trace.

        Not if the model draws random numbers, nor with XLA or in micro batches, which are there to save memory.
        """
        return len(prepared.parts) == 1 and self._train_program(prepared.weighted).overlaps

    def measure(self, prepared: PreparedBatch, result: TrainResult) -> None:
        """Fourth stage: add the step to the metrics; in the order of the steps, by one thread at a time."""
        metric_program = self._train_program(prepared.weighted).metrics
        for part, predicted in zip(prepared.parts, result.predicted, strict=True):
            metric_program.run(part.columns, part.labels, part.weight, predicted)

    def push(self, prepared: PreparedBatch, result: TrainResult) -> None:
        """Last stage: give the gradients to the store."""
        plan = self._recording(training=True).plan
        rate, sparse_rate = self._rates()
        request = PushRequest(
            self._trained(plan.split_gradients(prepared.keys, result.row_gradients)),
            result.dense_gradient,
            result.state_delta,
            samples=prepared.batch.size,
            sparse_learning_rate=sparse_rate,
            dense_learning_rate=rate,
        )
        self._push(request, result.pulled_at)

    def train_empty(self) -> None:
        """Take part in a step without a sample, which by itself changes no parameter."""
        plan = self._recording(training=True).plan
        keys = self._trained(plan.empty())
        self.step = pulled = self.store.pull(PullRequest(keys, train=True, dense=True)).step
        rate, sparse_rate = self._rates()
        request = PushRequest(
            {
                name: SparseGradient(unique.keys, np.zeros((0, plan.dims[name]), np.float32))
                for name, unique in keys.items()
            },
            # A gradient of zeros is none: momenta and weight decay would move the weights by it.
            dense_gradient=None,
            state_delta=None,
            samples=0,
            sparse_learning_rate=sparse_rate,
            dense_learning_rate=rate,
        )
        self._push(request, pulled)

    def _push(self, request: PushRequest, pulled: int) -> None:
        self.step = self.store.push(request)
        self.staleness = self.staleness.after(pulled=pulled, pushed=self.step)
        self._weights_are_current = False

    # Evaluation and prediction: the model's own weights, refreshed from the store when it has moved. Ids without a row
    # read the default of their table, as in a checkpoint or an exported model.

    def evaluate_step(self, batch: Batch) -> None:
        """Add one batch to the metrics; changes no parameter."""
        if batch.size == 0:
            return
        part, rows = self._read(batch)
        weighted = bool(part.weight)
        if weighted not in self._evaluate_programs:
            plan = self._recording(training=False).plan
            self._evaluate_programs[weighted] = EvaluateProgram(
                self.model, self._inputs, self._outputs, plan, weighted=weighted
            )
        checks = self._evaluate_programs[weighted].run(rows, part.columns, part.labels, part.weight)
        if self.options.check_finite:
            self._check(checks, batch, "evaluation")

    def predict_step(self, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        """The outputs for one batch, by name."""
        part, rows = self._read(batch, labels=False)
        if self._predict_program is None:
            self._predict_program = PredictProgram(
                self.model, self._inputs, self._recording(training=False).plan
            )
        outputs = self._predict_program.run(rows, part.columns)
        return dict(zip(self._outputs.names, outputs, strict=True))

    def refresh(self) -> None:
        """Read the dense parameters from the store into the model; call it where other workers may have pushed."""
        self.step, dense, state = self.pull_dense()
        self.load_dense(dense, state)
        self._weights_are_current = True

    def pull_dense(self) -> tuple[int, Float32Array, Float32Array]:
        """The store's step, and its flat vectors of trainable and of other float weights."""
        reply = self.store.pull(PullRequest({}, train=False, dense=True))
        return (reply.step, *_dense_of(reply))

    def dense_vector(self) -> tuple[Float32Array, Float32Array]:
        """The model's trainable float weights and its other float weights, each as one flat vector."""
        return self._dense.pack(), self._state.pack()

    def load_dense(self, vector: Float32Array, state: Float32Array) -> None:
        """Set the model's weights; the store is not changed."""
        self._dense.unpack(vector)
        self._state.unpack(state)

    def reseed(self, rank: int) -> None:
        """Let what the model draws at random (dropout) differ between workers; their start values stay equal."""
        for variable in self.model.non_trainable_variables:
            if variable.path.endswith("seed_generator_state"):
                seed, count = variable.numpy().tolist()
                variable.assign([(seed + (rank + 1) * 0x9E3779B9) % 2**31, count])

    def random_state(self) -> list[npt.NDArray[Any]]:
        """What this worker's model has beside its weights: states of random draws (dropout) and whole numbers."""
        return [np.array(variable.numpy()) for variable in self._own_variables()]

    def load_random_state(self, values: Sequence[npt.NDArray[Any]]) -> None:
        """Take over what `random_state` gave; a ValueError if it is another model's."""
        variables = self._own_variables()
        shapes = [tuple(variable.shape) for variable in variables]
        if shapes != [value.shape for value in values]:
            raise ValueError(
                f"The random state of this model has shapes {shapes}. Received: {[value.shape for value in values]}"
            )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def _own_variables(self) -> list[Any]:
        """Variables that do not lie in the store, in model order."""
        return [
            variable
            for variable in self.model.non_trainable_variables
            if np.dtype(variable.dtype).kind in "iu" or variable.path.endswith("seed_generator_state")
        ]

    # Learning rate and metrics.

    def set_learning_rate(self, value: float) -> None:
        """Use this learning rate from the next step on; tables follow unless they have an optimizer of their own."""
        self._rate.set(value)

    def metric_states(self) -> list[npt.NDArray[Any]]:
        """The sums and counts of all metrics since the last reset, to be merged with other workers'."""
        return metrics.states(self.model)

    def merge_metric_states(self, parts: Sequence[Sequence[npt.NDArray[Any]]]) -> None:
        """Set the metrics to what one worker that saw all samples would have."""
        metrics.load(self.model, metrics.merge(parts))

    def metric_results(self) -> dict[str, float]:
        """The metrics by name, the loss included."""
        return metrics.results(self.model)

    def load_metric_states(self, values: Sequence[npt.NDArray[Any]]) -> None:
        """Go on from what `metric_states` gave."""
        metrics.load(self.model, values)

    def reset_metrics(self) -> None:
        """Begin the metrics anew."""
        self.model.reset_metrics()

    def _prepare(
        self, batch: Batch, *, training: bool, labels: bool = True, max_samples: int | None = None
    ) -> PreparedBatch:
        found = [
            self._arrays(part, training=training, labels=labels) for part in split_batch(batch, max_samples)
        ]
        recording = self._recording(training)
        program = self._train_programs.get(found[0].weight is not None) if training else None
        used = [True] * len(self._inputs.columns)
        if program is not None and not recording.plan.needs_recording:
            # Ids that only choose rows are not handed to TensorFlow: their rows are.
            used = program.used_columns
        empty = self._inputs.empty_tensors
        columns = [
            [
                as_tensor(array) if needed else none
                for array, needed, none in zip(part.columns, used, empty, strict=True)
            ]
            for part in found
        ]
        lookups = recording.lookups(
            [(part.columns, tensors) for part, tensors in zip(found, columns, strict=True)]
        )
        return PreparedBatch(
            batch,
            [
                PreparedPart(
                    tensors,
                    [as_tensor(array) for array in part.labels],
                    [] if part.weight is None else [as_tensor(np.asarray(part.weight, np.float32))],
                    lookup,
                    part.size,
                )
                for part, tensors, lookup in zip(found, columns, lookups, strict=True)
            ],
        )

    def _arrays(self, part: Batch, *, training: bool, labels: bool) -> _Arrays:
        label_arrays = self._outputs.arrays(part) if labels else []
        weight = part.sample_weight if labels else None
        if training and self.options.class_weight is not None:
            if weight is not None:
                raise ValueError("Give class_weight or sample weights, not both. Received: both")
            weight = class_weights(label_arrays[0], self.options.class_weight)
        check_weight(weight)
        return _Arrays(self._inputs.arrays(self._features(part)), label_arrays, weight, part.size)

    def _features(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """The columns of a batch, in groups only for a model that can take them so."""
        return batch.grouped_inputs() if self._grouped else batch.flat().features

    def _read(self, batch: Batch, *, labels: bool = True) -> tuple[PreparedPart, RowTensors]:
        if not self._weights_are_current:
            self.refresh()
        prepared = self._prepare(batch, training=False, labels=labels)
        reply = self.store.pull(PullRequest(prepared.keys, train=False, dense=False, unknown="default"))
        part = prepared.parts[0]
        plan = self._recording(training=False).plan
        return part, RowTensors.of(plan, [part.lookups], reply.rows)[0]

    def _recording(self, training: bool) -> Recording:
        if not self._initialized:
            raise RuntimeError(
                "Call Trainer.initialize(sample) first. Received: a trainer that has no model yet"
            )
        if training not in self._recordings:
            self._recordings[training] = Recording(self.model, self._inputs, training)
        return self._recordings[training]

    def _train_program(self, weighted: bool) -> TrainProgram:
        if weighted not in self._train_programs:
            self._train_programs[weighted] = TrainProgram(
                self.model,
                self._inputs,
                self._outputs,
                self._recording(training=True).plan,
                self._dense,
                self._state,
                weighted=weighted,
                clipping=self._clipping,
                clip_rows=self.options.sparse_optimizer is None,
                frozen=self._frozen,
                xla=self.options.dense_step.xla,
            )
        return self._train_programs[weighted]

    def _trained(self, by_table: Mapping[str, T]) -> dict[str, T]:
        """Without the frozen tables."""
        return {name: value for name, value in by_table.items() if name not in self._frozen}

    def _rates(self) -> tuple[float | None, float | None]:
        rate = self._rate.value(self.step)
        if rate is None or self.options.sparse_optimizer is not None:
            return rate, None
        if self._own_optimizers:
            raise ValueError(
                "A learning rate that changes reaches all tables alike, but some have an optimizer of their own. Give "
                "the trainer a sparse_optimizer, or those tables none. "
                f"Received: tables with an optimizer {self._own_optimizers}"
            )
        return rate, rate

    def _build_loss(self, sample: Batch, inputs: Any, outputs: Any) -> None:
        """Have Keras make the states of losses and metrics, which it cannot do inside of a trace."""
        if self.options.class_weight is not None and len(self._outputs.names) > 1:
            raise ValueError(
                "class_weight needs a model with one output; weigh the samples instead. "
                f"Received: outputs {self._outputs.names}"
            )
        # Functions and names have no reduction: Keras makes means of them. That of a loss object may be None: a vector.
        losses = [loss for loss in keras.tree.flatten(self.model.loss) if hasattr(loss, "reduction")]
        other = [loss.reduction for loss in losses if loss.reduction not in ("sum_over_batch_size", "mean")]
        summed = [reduction for reduction in other if reduction in ("sum", "none", None)]
        if other and self.options.dense_step.micro_batch is not None:
            raise ValueError(
                "micro_batch adds up losses that are means over samples: compile the model with the reduction "
                f"'sum_over_batch_size', or set micro_batch=None. Received: reduction={other[0]!r}"
            )
        if summed:
            logger.warning(
                "A loss has reduction=%r: several synchronous workers average their gradients by samples, so the "
                "result depends on their number; use sum_over_batch_size and a learning rate to match",
                summed[0],
            )
        labels = self._outputs.pack([tf.constant(array) for array in self._outputs.arrays(sample)])
        self.model._compute_loss(x=inputs, y=labels, y_pred=outputs, training=False)
        self.model.compute_metrics(inputs, labels, outputs)
        self.model.reset_metrics()

    def _check(self, checks: npt.NDArray[np.float32], batch: Batch, doing: str) -> None:
        columns = {**batch.features, **batch.labels}
        if batch.sample_weight is not None:
            columns["sample_weight"] = batch.sample_weight
        check_finite(checks, self._outputs.names, columns, self.step, doing)


@dataclass(frozen=True)
class _Arrays:
    """The arrays of a part of a batch, in the order of the model's inputs and outputs."""

    columns: Sequence[npt.NDArray[Any]]
    labels: Sequence[npt.NDArray[Any]]
    weight: npt.NDArray[Any] | None
    size: int


def _dense_of(reply: PullReply) -> tuple[Float32Array, Float32Array]:
    if reply.dense is None or reply.state is None:
        raise ValueError("The store's reply lacks the dense parameters that were asked for. Received: None")
    return reply.dense, reply.state


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"The model must be a keras.Model of Keras 3. Received: {type(model).__module__}.{type(model).__name__}"
        )
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            "The model must be compiled with an optimizer and a loss: model.compile(optimizer, loss=…). "
            f"Received: model {model.name!r}, compiled={model.compiled}"
        )
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            "The trainer computes the step itself, so a train_step of the model's own would be ignored. Override "
            f"compute_loss and compute_metrics instead. Received: {type(model).__name__}.train_step"
        )
