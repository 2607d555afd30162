"""Chains of checkpoints: restored, damaged, pruned, copied."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deeprec_spark import checkpoint
from deeprec_spark.checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from tests import checkpoints

KINDS = {"part", "filtered", "bloom", "tombstones", "dense", "state", "store", "manifest"}


def kind_of(path: Path) -> str:
    """Which kind of file this is."""
    name = path.name.partition("-")[0].partition(".")[0]
    return "dense" if path.parent.name == "dense" and name == "part" else name


def files_of(directory: str) -> list[Path]:
    """Every file of one checkpoint."""
    return sorted(path for path in Path(directory).rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A full checkpoint and two incremental ones."""
    model_dir = tmp_path_factory.mktemp("chain")
    _, directories = checkpoints.write_chain(model_dir)
    return str(model_dir), directories


def test_a_chain_leads_from_the_full_checkpoint_to_the_newest(tmp_path: Path) -> None:
    store, directories = checkpoints.write_chain(tmp_path)
    assert checkpoint.chain(str(tmp_path)) == directories
    assert checkpoint.chain(directories[1]) == directories[:2]
    assert checkpoint.chain(directories[0]) == directories[:1]
    newest = checkpoint.load(str(tmp_path))
    assert (newest.kind, newest.base) == ("incremental", f"{20:012d}")
    assert newest.base_id == checkpoint.load(directories[1]).save_id
    again = checkpoints.new_store()
    again.restore(checkpoint.chain(str(tmp_path)), newest.save_id)
    assert checkpoints.content(again) == checkpoints.content(store)
    # The restored store goes on with incremental saves.
    checkpoints.change(again, 9)
    last = checkpoints.save(again, tmp_path, 40, directories[-1])
    third = checkpoints.new_store(0, 1)
    third.restore(checkpoint.chain(last))
    assert checkpoints.content(third) == checkpoints.content(again)


def test_a_snapshot_store_reads_a_chain(tmp_path: Path) -> None:
    store, _ = checkpoints.write_chain(tmp_path)
    snapshot = checkpoint.SnapshotStore(str(tmp_path), str(tmp_path / "cache"))
    for name in ("a/b c", "bloom"):
        keys = store.table(name).keys()[0]
        np.testing.assert_array_equal(snapshot.lookup(name, keys), store.table(name).lookup(keys))
        assert snapshot.statistics()[name]["rows"] == len(keys)
    reply = store.pull(checkpoints.PullRequest({}, train=False))
    np.testing.assert_array_equal(snapshot.dense, reply.dense)


@pytest.mark.parametrize("damage", ["flip", "gone"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_damaged_file_of_a_chain_is_named(
    written: tuple[str, list[str]], damage: str, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that names the file, or with fallback the last good state, said aloud."""
    model_dir, directories = written
    kinds = set()
    for file in files_of(directories[place]):
        content = file.read_bytes()
        kinds.add(kind_of(file))
        if damage == "flip":
            middle = len(content) // 2
            file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        else:
            file.unlink()
        try:
            if file.name == "manifest.json" and damage == "gone" and place == 2:
                # Without its manifest a checkpoint was never committed: the one before it is the newest.
                assert checkpoint.chain(model_dir) == directories[:2]
                with pytest.raises(CheckpointNotFoundError, match=Path(directories[2]).name):
                    checkpoint.chain(directories[2])
                continue
            for path in (model_dir, directories[2]):
                with pytest.raises(CheckpointCorruptError) as caught:
                    checkpoint.chain(path)
                assert str(file) in str(caught.value)
                caplog.clear()
                with caplog.at_level(logging.WARNING):
                    if place == 0:
                        with pytest.raises(CheckpointCorruptError, match=file.name):
                            checkpoint.chain(path, fallback=True)
                    else:
                        assert checkpoint.chain(path, fallback=True) == directories[:place]
                        assert f"going back to {directories[place - 1]}" in caplog.text
                        assert str(file) in caplog.text
        finally:
            file.write_bytes(content)
    expected = KINDS - ({"tombstones"} if place == 0 else set())
    assert kinds == expected
    assert checkpoint.chain(model_dir) == directories


def test_fallback_goes_to_an_older_full_checkpoint(tmp_path: Path) -> None:
    store, directories = checkpoints.write_chain(tmp_path, deltas=1)
    full = checkpoints.save(store, tmp_path, 30)
    delta = checkpoints.save(store, tmp_path, 40, full)
    Path(full, "store-00000.json").unlink()
    with pytest.raises(CheckpointCorruptError, match=full):
        checkpoint.chain(delta)
    assert checkpoint.chain(delta, fallback=True) == directories


def test_a_base_that_was_replaced_is_not_taken(tmp_path: Path) -> None:
    store, [full, delta] = checkpoints.write_chain(tmp_path, deltas=1)
    files = {path.relative_to(full): path.read_bytes() for path in files_of(full)}
    checkpoint.begin(full)
    store.snapshot("other")
    manifest = checkpoint.load(delta).model_copy(
        update={
            "kind": "full",
            "base": None,
            "base_id": None,
            "save_id": "other",
            "files": tuple(checkpoint.FileRecord.of(file) for file in store.write_snapshot("other", full)),
        }
    )
    checkpoint.commit(full, manifest)
    with pytest.raises(CheckpointCorruptError, match=r"another has replaced.*'other'"):
        checkpoint.chain(delta)
    for path, content in files.items():
        Path(full, path).parent.mkdir(parents=True, exist_ok=True)
        Path(full, path).write_bytes(content)
    assert checkpoint.chain(delta) == [full, delta]


def test_prune_keeps_what_kept_deltas_need(tmp_path: Path) -> None:
    store, first = checkpoints.write_chain(tmp_path, deltas=2)
    assert checkpoint.prune(str(tmp_path), 1) == []  # both deltas need the full one
    second = [checkpoints.save(store, tmp_path, 40)]
    second.append(checkpoints.save(store, tmp_path, 50, second[0], keep_max=2))
    assert checkpoint.steps(str(tmp_path)) == [10, 20, 30, 40, 50]
    assert checkpoint.prune(str(tmp_path), 1) == [10, 20, 30]
    assert checkpoint.chain(str(tmp_path)) == second
    assert not any(Path(directory).exists() for directory in first)


def test_a_second_checkpoint_of_a_step_lies_beside_the_first(tmp_path: Path) -> None:
    """What is committed is never written over: a save that is cut short would lose it, and deltas may need it."""
    store, directories = checkpoints.write_chain(tmp_path, deltas=0)
    for number in (1, 2):
        directories.append(checkpoints.save(store, tmp_path, 10, directories[-1]))
        assert Path(directories[-1]).name == f"{10:012d}-{number}"
    assert checkpoint.steps(str(tmp_path)) == [10, 10, 10]
    assert checkpoint.chain(str(tmp_path)) == directories


def test_a_new_save_removes_those_that_were_cut_short(tmp_path: Path) -> None:
    store, directories = checkpoints.write_chain(tmp_path, deltas=1)
    left = Path(tmp_path, "checkpoints", f"{25:012d}", "tables", "x")
    left.mkdir(parents=True)
    (left / "part-00000-00000.parquet").write_bytes(b"half")
    (tmp_path / "checkpoints" / "notes").mkdir()
    checkpoints.save(store, tmp_path, 30, directories[-1])
    names = sorted(path.name for path in Path(tmp_path, "checkpoints").iterdir())
    assert names == [*(f"{step:012d}" for step in (10, 20, 30)), "notes"]


def test_nothing_is_committed_before_its_files_are_there(tmp_path: Path) -> None:
    """A driver that lost its servers' files to another one's clean-up must not commit."""
    _, [full] = checkpoints.write_chain(tmp_path, deltas=0)
    manifest = checkpoint.load(full)
    Path(full, "manifest.json").unlink()
    part = next(path for path in files_of(full) if kind_of(path) == "part")
    part.write_bytes(b"short")
    with pytest.raises(CheckpointCorruptError, match=part.name):
        checkpoint.commit(full, manifest)
    assert checkpoint.latest(str(tmp_path)) is None


def test_files_that_came_too_late_are_not_read(tmp_path: Path) -> None:
    """A server of an earlier try, cut off from its driver, may still write where another save has committed."""
    store, directories = checkpoints.write_chain(tmp_path / "model")
    checkpoints.change(store, 77)
    late = Path(checkpoints.save(store, tmp_path / "other", 1))
    for source in [
        *late.rglob("part-*"),
        *late.rglob("filtered-*"),
        *late.rglob("bloom-*"),
        *late.rglob("state-*"),
    ]:
        name = source.name.replace("-00000", "-00007", 1)
        Path(directories[-1], source.parent.relative_to(late), name).write_bytes(source.read_bytes())
    clean, _ = checkpoints.write_chain(tmp_path / "clean")
    again = checkpoints.new_store()
    again.restore(checkpoint.chain(str(tmp_path / "model")))
    assert checkpoints.content(again) == checkpoints.content(clean)
    snapshot = checkpoint.SnapshotStore(str(tmp_path / "model"), str(tmp_path / "cache"))
    assert snapshot.statistics()["bloom"]["rows"] == len(clean.table("bloom"))


def test_copies_bring_what_they_build_on(tmp_path: Path) -> None:
    store, directories = checkpoints.write_chain(tmp_path / "model")
    target = str(tmp_path / "copy")
    checkpoint.copy(str(tmp_path / "model"), target)
    for directory in directories:
        Path(directory, "manifest.json").unlink()
    found = checkpoint.chain(target)
    assert len(found) == 3
    assert found[-1] == target
    again = checkpoints.new_store()
    again.restore(found)
    assert checkpoints.content(again) == checkpoints.content(store)
    checkpoint.copy(target, str(tmp_path / "copy of copy"))
    assert len(checkpoint.chain(str(tmp_path / "copy of copy"))) == 3


def canonical(data: dict[str, Any]) -> bytes:
    """A manifest's bytes."""
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


@pytest.mark.parametrize("version", [1, 2])
def test_manifests_of_older_versions_are_read_and_their_files_checked(tmp_path: Path, version: int) -> None:
    written = checkpoints.write(tmp_path)
    file = Path(written.directory, "manifest.json")
    assert canonical(json.loads(file.read_text())) == file.read_bytes()
    fields = {"checksum"} | (
        {"kind", "base", "base_id", "save_id", "position", "training"} if version == 1 else set()
    )
    data = {key: value for key, value in json.loads(file.read_text()).items() if key not in fields}
    for entry in data["files"]:
        del entry["checksum"]
        entry["sha256"] = hashlib.sha256(Path(written.directory, entry["path"]).read_bytes()).hexdigest()
    data["format_version"] = version
    if version == 2:
        data["checksum"] = hashlib.sha256(canonical(data)).hexdigest()
    file.write_bytes(canonical(data))
    manifest = checkpoint.load(str(tmp_path))
    assert (manifest.format_version, manifest.kind) == (3, "full")
    assert checkpoint.chain(str(tmp_path), verify=True) == [written.directory]
    part = next(Path(written.directory).rglob("part-*.parquet"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointCorruptError, match=r"damaged: sha256:\w+ instead of sha256:"):
        checkpoint.chain(str(tmp_path), verify=True)


def test_an_incremental_manifest_names_its_base(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path)
    data = json.loads(Path(written.directory, "manifest.json").read_text())
    del data["checksum"]
    with pytest.raises(ValueError, match="kind='incremental', base=None"):
        checkpoint.Manifest.model_validate({**data, "kind": "incremental"})
