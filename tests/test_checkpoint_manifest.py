"""The manifest: JSON round trip, and whose checkpoint it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest

from deeprec_spark import checkpoint
from deeprec_spark.embedding.optimizers import SGD, Adam
from deeprec_spark.embedding.options import CounterFilter, GlobalStepEvict, StorageOption, StorageType
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


def test_options_that_rows_or_training_depend_on_must_be_equal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = checkpoints.write(tmp_path).manifest
    specs = manifest.table_specs
    manifest.check_options(specs)
    assert specs[0].optimizer is not None
    manifest.check_options(
        [replace(specs[0], optimizer=replace(specs[0].optimizer, learning_rate=0.5)), *specs[1:]]
    )
    for changes, message in [
        ({"optimizer": Adam(beta_1=0.8)}, "another optimizer than the table to restore"),
        (
            {"option": replace(specs[0].option, value_dtype="bfloat16")},
            "value_dtype=float32 in the checkpoint",
        ),
        ({"seed": specs[0].seed + 1}, "another seed"),
    ]:
        with pytest.raises(checkpoint.CheckpointMismatchError, match=message):
            manifest.check_options([replace(specs[0], **changes), *specs[1:]], changed_options=True)
    moved = replace(specs[0].option, storage_option=StorageOption(StorageType.DRAM_SSDHASH, "/x", (1 << 20,)))
    manifest.check_options([replace(specs[0], option=moved), *specs[1:]])
    for option in (
        replace(specs[0].option, filter_option=CounterFilter(7)),
        replace(specs[0].option, evict_option=GlobalStepEvict(5), evict_steps=2),
    ):
        changed = [replace(specs[0], option=option), *specs[1:]]
        with pytest.raises(
            checkpoint.CheckpointMismatchError, match=r"in the model and .* in the checkpoint"
        ):
            manifest.check_options(changed)
        caplog.clear()
        manifest.check_options(changed, changed_options=True)
        assert "Going on with changed options: table 'a/b c' has" in caplog.text


def test_the_optimizer_of_the_dense_weights_is_compared(tmp_path: Path) -> None:
    manifest = checkpoints.write(tmp_path).manifest
    own = manifest.model.model_copy(update={"optimizer": Adam(0.1).to_dict()})
    manifest = manifest.model_copy(update={"model": own})
    manifest.check_options(manifest.table_specs, Adam(0.2))
    with pytest.raises(
        checkpoint.CheckpointMismatchError, match=r"Received: SGD.* in the model, Adam.* in the"
    ):
        manifest.check_options(manifest.table_specs, SGD())
