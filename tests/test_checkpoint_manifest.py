"""The manifest: JSON round trip, and whose checkpoint it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest

from deeprec_spark import checkpoint
from deeprec_spark.embedding.optimizers import Adam
from tests import checkpoints


def test_json_gives_back_the_same_manifest(tmp_path: Path) -> None:
    manifest = checkpoints.write(tmp_path).manifest
    again = checkpoint.Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.fingerprint == manifest.fingerprint
    assert again.table_specs == checkpoints.table_specs()
    assert [table.default_value for table in again.tables] == [0.0, 0.25]
    assert (again.model.dense_size, again.model.state_size) == (7, 2)
    assert again.fingerprint != again.model_copy(update={"step": 11}).fingerprint


def test_another_models_checkpoint_is_refused_with_both_sides(tmp_path: Path) -> None:
    manifest = checkpoints.write(tmp_path).manifest
    specs, weights = manifest.table_specs, manifest.model.weights
    manifest.check_model(specs, weights)
    # Layer names and learning rates differ between runs of one model.
    manifest.check_model(
        [replace(spec, optimizer=Adam()) for spec in specs],
        [weight.model_copy(update={"path": "x"}) for weight in weights],
    )
    for tables, message in [
        (specs[:1], "table 'filtered' is in the checkpoint only"),
        ([*specs, replace(specs[0], name="new")], "table 'new' is in the model only"),
        (
            [replace(specs[0], embedding_dim=5), specs[1]],
            "embedding_dim 5 in the model and 3 in the checkpoint",
        ),
    ]:
        with pytest.raises(checkpoint.CheckpointMismatchError, match=message):
            manifest.check_model(tables)
    other = weights[0].model_copy(update={"path": "mine", "shape": (3, 2)})
    with pytest.raises(
        checkpoint.CheckpointMismatchError, match=r"'mine' has shape \(3, 2\).*\(2, 3\) \('kernel'\)"
    ):
        manifest.check_model(specs, [other, *weights[1:]])
    with pytest.raises(checkpoint.CheckpointMismatchError, match="2 dense weights and the checkpoint 3"):
        manifest.check_model(specs, weights[1:])
    with pytest.raises(
        checkpoint.CheckpointMismatchError, match=r"'x', checkpoint tables=\['a/b c', 'filtered'\]"
    ):
        manifest.table("x")


def test_the_record_of_a_model_lists_its_flat_vectors() -> None:
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        ]
    )
    record = checkpoint.ModelRecord.of(model, Adam())
    assert [(weight.shape, weight.trainable) for weight in record.weights] == [
        ((2, 3), True),
        ((3,), True),
        ((3,), True),
        ((3,), True),
        ((3,), False),
        ((3,), False),
    ]
    assert (record.dense_size, record.state_size) == (15, 6)
    assert record.config is not None
    copy = keras.saving.deserialize_keras_object(record.config)
    assert copy.count_params() == model.count_params()


def test_a_model_without_a_config_is_recorded_without_one() -> None:
    class Own(keras.Model):
        def __init__(self, units: int) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(units)

        def call(self, x: object) -> object:
            return self.dense(x)

        def get_config(self) -> dict[str, object]:
            raise NotImplementedError("has none")

    model = Own(3)
    model(np.zeros((1, 2), np.float32))
    record = checkpoint.ModelRecord.of(model)
    assert record.config is None
    assert record.dense_size == 9
