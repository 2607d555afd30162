"""Checkpoint directories: committed by the manifest, verified, pruned, copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeprec_spark import checkpoint
from tests import checkpoints


def test_a_checkpoint_is_there_once_its_manifest_is(tmp_path: Path) -> None:
    assert checkpoint.latest(str(tmp_path)) is None
    first = checkpoints.write(tmp_path, step=5)
    second = checkpoints.write(tmp_path, step=12)
    (tmp_path / "checkpoints" / f"{20:012d}" / "tables").mkdir(parents=True)  # a save that never finished
    assert checkpoint.steps(str(tmp_path)) == [5, 12]
    assert checkpoint.latest(str(tmp_path)) == second.directory
    assert checkpoint.load(str(tmp_path)) == second.manifest
    assert checkpoint.load(first.directory) == first.manifest
    assert [path.name for path in Path(first.directory).glob(".*")] == []


def test_paths_without_a_checkpoint_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(checkpoint.CheckpointNotFoundError, match=str(path)):
            checkpoint.load(str(path))
    with pytest.raises(ValueError, match="gopher://x"):
        checkpoint.load("gopher://x")


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_every_damaged_file_is_found_and_named(tmp_path: Path, damage: str) -> None:
    written = checkpoints.write(tmp_path)
    for record in written.manifest.files:
        file = Path(written.directory, record.path)
        content = file.read_bytes()
        if damage == "flip":
            middle = len(content) // 2
            file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        elif damage == "cut":
            file.write_bytes(content[:-1])
        else:
            file.unlink()
        with pytest.raises(checkpoint.CheckpointCorruptError, match=record.path):
            checkpoint.load(written.directory)
        file.write_bytes(content)
    assert checkpoint.load(written.directory) == written.manifest


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path)
    file = Path(written.directory, "manifest.json")
    content = file.read_text()
    for bad in (content[:-20], content.replace('"format_version": 3', '"format_version": 9'), "{}", "[]"):
        file.write_text(bad)
        with pytest.raises(checkpoint.CheckpointCorruptError, match=r"manifest\.json"):
            checkpoint.load(written.directory)


def test_prune_keeps_the_newest_and_what_is_being_written(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoints.write(tmp_path, step=step, rows=1)
    folder = tmp_path / "checkpoints"
    for step in (0, 9):  # one was never finished, one is being written
        (folder / f"{step:012d}").mkdir()
    (folder / "notes").mkdir()
    assert checkpoint.prune(str(tmp_path), 2) == [0, 1]
    assert checkpoint.steps(str(tmp_path)) == [2, 3]
    assert sorted(path.name for path in folder.iterdir()) == [*(f"{s:012d}" for s in (2, 3, 9)), "notes"]
    with pytest.raises(ValueError, match="keep_max=0"):
        checkpoint.prune(str(tmp_path), 0)


def test_a_second_save_of_a_step_starts_from_nothing(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path, num_shards=2)
    checkpoint.begin(written.directory)
    assert checkpoint.latest(str(tmp_path)) is None
    assert list(Path(written.directory).iterdir()) == []


def test_copies_are_checkpoints(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path / "model")
    target = tmp_path / "copy"
    checkpoint.copy(str(tmp_path / "model"), str(target))
    assert checkpoint.load(str(target)) == written.manifest
    with pytest.raises(FileExistsError, match="set overwrite"):
        checkpoint.copy(written.directory, str(target))
    newer = checkpoints.write(tmp_path / "model", step=11, rows=5)
    checkpoint.copy(newer.directory, str(target), overwrite=True)
    assert checkpoint.load(str(target)) == newer.manifest
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match="left alone"):
        checkpoint.copy(written.directory, str(tmp_path / "mine"), overwrite=True)


def test_uris_are_paths_too(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path)
    assert checkpoint.load(tmp_path.as_uri()) == written.manifest


def test_the_last_commit_counts_not_the_highest_step(tmp_path: Path) -> None:
    """Who goes back to an old checkpoint and trains on commits a lower step: it is neither deleted nor forgotten."""
    for step in (40, 50):
        checkpoints.write(tmp_path, step=step, rows=1)
    fresh = checkpoints.write(tmp_path, step=20, rows=1)
    assert checkpoint.steps(str(tmp_path)) == [40, 50, 20]
    assert checkpoint.latest(str(tmp_path)) == fresh.directory
    assert checkpoint.prune(str(tmp_path), 2) == [40]
    assert checkpoint.steps(str(tmp_path)) == [50, 20]
    assert checkpoint.load(str(tmp_path)).step == 20
