"""Match the columns of a batch to the inputs and outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from deeprec_spark.data.batch import Batch
from deeprec_spark.layers.groups import ExpandGroups

Array = npt.NDArray[Any]


class InputBinding:
    """Which columns a model takes, and in what structure it is called with them.

    - A functional or sequential model with named inputs that are all columns: by name.
    - As many columns as inputs, and no name in common: by position.
    - A subclassed model: the column itself if there is one, else a dict of all columns.

    Args:
        model: a Keras model.
        features: the feature arrays of a sample batch, by name, in order.

    Attributes:
        columns: the names of the columns that are used, in the order in which tensors travel.

    Raises:
        ValueError: the columns are others than the inputs, some of the names but not all, or of another type.
    """

    def __init__(self, model: Any, features: Mapping[str, Array]) -> None:
        names = list(features)
        struct = _input_structure(model)
        if struct is None:
            self.columns = names
            self._struct: Any = names[0] if len(names) == 1 else {name: name for name in names}
            declared: list[Any] = [None] * len(names)
        else:
            declared = keras.tree.flatten(struct)
            self.columns = _match(model, _names(struct), names)
            self._struct = keras.tree.pack_sequence_as(struct, self.columns)
        self.dtypes = [
            _dtype(name, features[name], tensor) for name, tensor in zip(self.columns, declared, strict=True)
        ]
        self._widths = [
            _width(features[name], tensor) for name, tensor in zip(self.columns, declared, strict=True)
        ]

    def signature(self) -> list[Any]:
        """A `tf.TensorSpec` for each column."""
        return [
            tf.TensorSpec([None, *width], dtype, name=f"input_{position}")
            for position, (width, dtype) in enumerate(zip(self._widths, self.dtypes, strict=True))
        ]

    @cached_property
    def empty_tensors(self) -> list[Any]:
        """A tensor without rows for each column, to stand for one that a function does not use."""
        return [
            tf.zeros([0 if side is None else side for side in spec.shape], spec.dtype)
            for spec in self.signature()
        ]

    def arrays(self, features: Mapping[str, Array]) -> list[Array]:
        """The columns' arrays `[batch, …]`, in the dtypes that the model takes.

        Raises:
            ValueError: a column is missing, or of another shape than the model takes. The step could not tell: ids that
                only choose rows do not reach it.
        """
        missing = [name for name in self.columns if name not in features]
        if missing:
            raise ValueError(
                f"The batch lacks columns that the model takes: {missing}. Received: columns {list(features)}"
            )
        for name, width in zip(self.columns, self._widths, strict=True):
            shape = list(features[name].shape[1:])
            if len(shape) != len(width) or any(
                wanted not in (None, side) for wanted, side in zip(width, shape, strict=True)
            ):
                raise ValueError(
                    f"Column {name!r} is of another shape than the model takes: pad or cut its lists to {width}. "
                    f"Received: shape {list(features[name].shape)}"
                )
        return [
            features[name].astype(dtype, copy=False)
            for name, dtype in zip(self.columns, self.dtypes, strict=True)
        ]

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Tensors in the order of `columns`, in the structure that the model is called with."""
        by_name = dict(zip(self.columns, tensors, strict=True))
        return keras.tree.map_structure(lambda name: by_name[name], self._struct)


class OutputBinding:
    """The outputs of a model, and which label columns each is compared with.

    Labels match outputs by name, or by position where no name is common to both. Several labels of a single output are
    stacked `[batch, labels]`.

    Args:
        model: a built Keras model.
        outputs: what the model returned for a sample.
        labels: the label arrays of the sample, by name, in order.
    """

    def __init__(self, model: Any, outputs: Any, labels: Mapping[str, Array]) -> None:
        self._struct = keras.tree.map_structure(lambda _: 0, outputs)
        self.names = output_names(model, outputs)
        self.labels = list(labels)
        named = set(self.names) <= set(self.labels)
        self._stacked = len(self.names) == 1 and len(self.labels) > 1 and not named
        strangers = not set(self.names) & set(self.labels)
        fits = not self.labels or named or (strangers and len(self.labels) == len(self.names))
        if self._stacked:
            # Labels `[batch, labels]` against an output `[batch, 1]` would be broadcast, to a loss of something else.
            fits = keras.tree.flatten(outputs)[0].shape[1:] == (len(self.labels),)
        if not fits:
            raise ValueError(
                "The labels do not fit the model's outputs: name all of them alike, or none and give as many labels as "
                f"outputs. Received: labels {self.labels}, outputs {self.names}"
            )
        if named:
            self.labels = list(self.names)
        self._shapes = [list(labels[name].shape[1:]) for name in self.labels]
        self._dtypes = [np.dtype(labels[name].dtype) for name in self.labels]

    def signature(self) -> list[Any]:
        """A `tf.TensorSpec` for each label."""
        return [
            tf.TensorSpec([None, *shape], dtype, name=f"label_{position}")
            for position, (shape, dtype) in enumerate(zip(self._shapes, self._dtypes, strict=True))
        ]

    def arrays(self, batch: Batch) -> list[Array]:
        """The label arrays, in the dtypes of the sample.

        Raises:
            ValueError: a label is missing, or of another shape than the sample's: a loss would be broadcast.
        """
        missing = [name for name in self.labels if name not in batch.labels]
        if missing:
            raise ValueError(f"The batch lacks labels: {missing}. Received: labels {list(batch.labels)}")
        for name, shape in zip(self.labels, self._shapes, strict=True):
            if list(batch.labels[name].shape[1:]) != shape:
                raise ValueError(
                    f"Label {name!r} is of another shape than in the sample that the trainer was initialized with: "
                    f"{['samples', *shape]}. Received: shape {list(batch.labels[name].shape)}"
                )
        return [
            batch.labels[name].astype(dtype, copy=False)
            for name, dtype in zip(self.labels, self._dtypes, strict=True)
        ]

    def restore(self, outputs: Sequence[Any]) -> Any:
        """Flattened outputs in the model's structure."""
        return keras.tree.pack_sequence_as(self._struct, list(outputs))

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Label tensors in the structure of the model's outputs."""
        if self._stacked:
            stacked = tf.stack([tf.cast(tensor, tensors[0].dtype) for tensor in tensors], axis=1)
            return keras.tree.pack_sequence_as(self._struct, [stacked])
        return keras.tree.pack_sequence_as(self._struct, list(tensors))


def output_names(model: Any, outputs: Any) -> list[str]:
    """One name for each output: the dict's keys, Keras' names, or `output`, `output_1`, …"""
    if isinstance(outputs, Mapping):
        return ["_".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(outputs)]
    count = len(keras.tree.flatten(outputs))
    # A sequential model keeps its names in the functional one inside.
    known = list(getattr(getattr(model, "_functional", None) or model, "output_names", None) or [])
    if len(known) == count and len(set(known)) == count:
        return known
    return ["output" if position == 0 else f"output_{position}" for position in range(count)]


def takes_groups(model: Any, index: str | None) -> bool:
    """Whether a model computes parts of itself once for each group: it has an ExpandGroups layer, or the input `index`.

    Raises:
        ValueError: it does, but the data have no grouping.
    """
    struct = _input_structure(model)
    if struct is not None and index is not None and index in _names(struct):
        return True
    found = [layer.name for layer in model._flatten_layers() if isinstance(layer, ExpandGroups)]
    if found and index is None:
        raise ValueError(
            "The model has ExpandGroups layers, but the feature spec has no grouping: prepare the data with group_by, "
            f"or make the model without them. Received: layers {found}"
        )
    return bool(found)


def _input_structure(model: Any) -> Any | None:
    """The symbolic inputs of a functional or built sequential model, as they are passed; None otherwise."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0] if model._functional else None
    if getattr(model, "_is_graph_network", False) or hasattr(model, "_inputs_struct"):
        return model._inputs_struct
    return None


def _names(struct: Any) -> list[str]:
    if isinstance(struct, Mapping):
        return [str(path[0]) for path, _ in keras.tree.flatten_with_path(struct)]
    return [tensor.name for tensor in keras.tree.flatten(struct)]


def _match(model: Any, inputs: list[str], columns: list[str]) -> list[str]:
    if set(inputs) <= set(columns):
        return inputs
    missing = [name for name in inputs if name not in columns]
    # Some names in common and some not is a misspelt one: by position, columns would reach inputs of other names.
    if len(inputs) == len(columns) and len(missing) == len(inputs):
        return columns
    raise ValueError(
        f"The inputs of model {model.name!r} do not fit the columns: name all of them alike, or none and give as many "
        f"columns as inputs. Received: inputs {inputs}, columns {columns}, without a column: {missing}"
    )


def _dtype(name: str, array: Array, tensor: Any | None) -> np.dtype[Any]:
    if tensor is None:
        return np.dtype(np.float32) if array.dtype == np.float64 else np.dtype(array.dtype)
    wanted: np.dtype[Any] = np.dtype(keras.backend.standardize_dtype(tensor.dtype))
    if array.dtype.kind in "iu" and wanted.kind == "f" and array.dtype.itemsize > 4:
        raise ValueError(
            f"Column {name!r} holds int64 but its model input is {wanted.name}, which cannot hold every id. "
            f"Declare keras.Input(…, dtype='int64'). Received: column {array.dtype.name}, input {wanted.name}"
        )
    if array.dtype.kind in "iu" and wanted.kind in "iu" and not np.can_cast(array.dtype, wanted, "safe"):
        raise ValueError(
            f"Column {name!r} holds {array.dtype.name} but its model input is {wanted.name}, which cannot hold every "
            f"id: ids beyond it would become other ids. Declare keras.Input(…, dtype='{array.dtype.name}'). "
            f"Received: column {array.dtype.name}, input {wanted.name}"
        )
    if array.dtype.kind == "f" and wanted.kind in "iu":
        raise ValueError(
            f"Column {name!r} holds fractions but its model input is {wanted.name}. "
            f"Received: column {array.dtype.name}, input {wanted.name}"
        )
    return wanted


def _width(array: Array, tensor: Any | None) -> list[int | None]:
    width: list[int | None] = list(array.shape[1:])
    if tensor is not None and len(tensor.shape) == array.ndim:
        width = [
            None if declared is None else side for side, declared in zip(width, tensor.shape[1:], strict=True)
        ]
    return width
