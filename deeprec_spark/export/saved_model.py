"""Export a trained model as a SavedModel of stock TensorFlow ops, its embedding tables inside."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from deeprec_spark.checkpoint.manifest import Manifest
from deeprec_spark.checkpoint.snapshot import SnapshotStore
from deeprec_spark.data.batch import Batch
from deeprec_spark.export import raw
from deeprec_spark.export.commit import committed_directory
from deeprec_spark.export.names import METADATA, input_names, prediction_names
from deeprec_spark.export.tables import SortedTable
from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.layers import context
from deeprec_spark.layers.tables import table_specs
from deeprec_spark.redaction import redact
from deeprec_spark.training.dense import state_layout, trainable_layout
from deeprec_spark.training.inputs import InputBinding, output_names, takes_groups
from deeprec_spark.training.programs import call_model

logger = logging.getLogger(__name__)

RAW = "serving_default"
PREPARED = "prepared"
GROUPED = "grouped"
Tensor = Any
Forward = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def export_saved_model(
    model: Any,
    store: SnapshotStore,
    location: str,
    *,
    spec: FeatureSpec | None = None,
    sample: Batch | None = None,
    overwrite: bool = False,
) -> str:
    """Write a SavedModel that loads and predicts where only TensorFlow is installed.

    Its signatures take one tensor for each feature, by its name (`export.names.input_names` where TensorFlow does
    not take that), and return `prediction` (`prediction_<output>` where the model has several outputs): `[batch]`
    for an output `[batch, 1]`, else the output's own shape.

    - `serving_default` takes raw values as the FeatureSpec says: strings are hashed and numbers transformed in the
      graph (see `export.raw.prepare`). Without a FeatureSpec it takes prepared columns.
    - `prepared` takes what the model takes: dense float32, ids int64, sequences padded.
    - `grouped`, of a model that expands groups: raw values, group-level features `[groups]` and others `[batch]`, and
      `group_index` (`FeatureSpec.grouping.index`), int32 `[batch]`: a user's side is computed once for many items. The
      other two signatures take flat rows.

    An id without a row reads its table's `default_value_no_permission`, as in `predict`. A table may be of any
    size that memory holds once; it is copied from the store's memory map into a variable.

    Args:
        model: The Keras model; its dense weights are set to the checkpoint's.
        store: The checkpoint.
        location: Folder to make, a path or URI; it appears when all is written.
        spec: How raw values are prepared; default: the checkpoint's own spec.
        sample: Arrays of a few rows by feature, for a model without a spec whose inputs have no shapes (subclassed).
        overwrite: Replace a SavedModel that is there.

    Returns:
        `location`.

    Raises:
        CheckpointMismatchError: The checkpoint is another model's; names both sides.
        ValueError: The model's inputs are unknown: neither spec, nor sample, nor symbolic inputs.
        FileExistsError: `location` exists (see `overwrite`).

    Example:
        >>> export_saved_model(model, SnapshotStore("/models/ctr"), "/deploy/ctr/1")
        '/deploy/ctr/1'
    """
    spec = spec or store.manifest.feature_spec
    binding, columns = _binding(model, spec, sample)
    store.create_tables(table_specs(model))
    _load_dense(model, store)
    module = _ExportedModel(model, store, binding)
    # A model may take some of the spec's features only: its callers need not send the others.
    used = None if spec is None else _features_of(spec, columns)
    signatures = {}
    forward: Forward = module.forward
    index = spec.grouping.index if spec is not None and spec.grouping is not None else None
    if used is not None and index in columns:
        signatures[GROUPED] = _raw_signature(module.forward, used, {index: columns.pop(index)})
        forward = _flat(module.forward, index)
    prepared = _signature(forward, columns)
    signatures |= {PREPARED: prepared, RAW: prepared}
    if used is not None:
        signatures[RAW] = _raw_signature(forward, used)
    with committed_directory(location, overwrite=overwrite) as folder:
        tf.saved_model.save(module, str(folder), signatures=signatures)
        extra = folder / METADATA
        extra.parent.mkdir(parents=True)
        metadata = _metadata(store.manifest, used, input_names(columns))
        extra.write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    logger.info("Exported step %d of model %r to %s", store.step, model.name, redact(location))
    return location


class _ExportedModel(tf.Module):
    """Holds every variable that the graph reads, and the graph itself."""

    def __init__(self, model: Any, store: SnapshotStore, binding: InputBinding) -> None:
        super().__init__(name=None)
        self._model = [lambda: model]  # in a closure: TensorFlow would save the whole Keras object otherwise
        self._binding = [lambda: binding]
        self.tables = {
            name: SortedTable(name, table.rows.keys, table.rows.values, table.default_value)
            for name, table in store.tables.items()
        }
        self.weights = [variable.value for variable in model.variables]
        self.resources = _resources(model)

    def forward(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Predictions by name from prepared columns by name."""
        model, binding = self._model[0](), self._binding[0]()
        tensors = [
            tf.cast(columns[name], dtype) for name, dtype in zip(binding.columns, binding.dtypes, strict=True)
        ]
        with context.use(context.FrozenContext(self.tables)):
            outputs = call_model(model, binding.pack(tensors), training=False)
        flat = keras.tree.flatten(outputs)
        names = prediction_names(output_names(model, outputs))
        return {name: _squeeze(tensor) for name, tensor in zip(names, flat, strict=True)}


def _features_of(spec: FeatureSpec, columns: Mapping[str, Any]) -> FeatureSpec:
    return spec.with_columns([feature for feature in spec.features if feature.name in columns], spec.labels)


def _flat(forward: Forward, index: str) -> Forward:
    """Each row is a group of its own."""

    def flat(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = tf.shape(next(iter(columns.values())))[0]
        return forward({**columns, index: tf.range(rows)})

    return flat


def _raw_signature(forward: Forward, spec: FeatureSpec, extra: Mapping[str, Any] | None = None) -> Any:
    """From raw columns, and `extra` ones that reach the model as they are."""
    extra = extra or {}

    def predict(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return forward({**raw.prepare(spec, columns), **{name: columns[name] for name in extra}})

    return _signature(predict, {**raw.raw_signature(spec), **extra})


def _signature(forward: Forward, columns: Mapping[str, Any]) -> Any:
    """The concrete function of columns by name, under names that TensorFlow takes."""
    names = input_names(columns)

    def predict(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return forward({column: arguments[name] for column, name in names.items()})

    specs = {
        names[column]: tf.TensorSpec(spec.shape, spec.dtype, name=names[column])
        for column, spec in columns.items()
    }
    return tf.function(predict, autograph=False).get_concrete_function(specs)


def _binding(
    model: Any, spec: FeatureSpec | None, sample: Batch | None
) -> tuple[InputBinding, dict[str, Any]]:
    """How columns reach the model, and the specs of those that it takes."""
    if spec is not None:
        signature = raw.prepared_signature(spec)
    elif sample is not None:
        signature = {
            name: tf.TensorSpec([None, *array.shape[1:]], array.dtype, name=name)
            for name, array in sample.features.items()
        }
    else:
        inputs = getattr(model, "inputs", None)
        if not inputs:
            raise ValueError(
                "The model has no symbolic inputs: give the FeatureSpec, or a sample batch. "
                f"Received: model={model.name!r}, spec=None, sample=None"
            )
        signature = {
            tensor.name: tf.TensorSpec(tensor.shape, tensor.dtype, name=tensor.name) for tensor in inputs
        }
    empty = {
        name: tf.zeros([0 if side is None else side for side in tensor.shape], tensor.dtype).numpy()
        for name, tensor in signature.items()
    }
    index = spec.grouping.index if spec is not None and spec.grouping is not None else None
    if index is not None and takes_groups(model, index):
        signature[index] = tf.TensorSpec([None], tf.int32, name=index)
        empty[index] = tf.zeros([0], tf.int32).numpy()
    binding = InputBinding(model, empty)
    return binding, {name: signature[name] for name in binding.columns}


def _load_dense(model: Any, store: SnapshotStore) -> None:
    dense, state = trainable_layout(model), state_layout(model)
    dense.unpack(store.dense)
    state.unpack(store.state)


def _resources(model: Any) -> list[Any]:
    """Lookup tables of preprocessing layers (StringLookup and the like), which must be saved with the graph."""
    kind = tf.saved_model.experimental.TrackableResource
    return [
        value
        for layer in model._flatten_layers()
        for value in vars(layer).values()
        if isinstance(value, kind)
    ]


def _squeeze(tensor: Tensor) -> Tensor:
    return tf.squeeze(tensor, -1) if tensor.shape.rank == 2 and tensor.shape[-1] == 1 else tensor


def _metadata(manifest: Manifest, spec: FeatureSpec | None, inputs: Mapping[str, str]) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "checkpoint": manifest.fingerprint,
        "model": manifest.model.name,
        "inputs": dict(inputs),
        "feature_spec": None if spec is None else spec.model_dump(mode="json"),
    }
