"""Manifests that were damaged decide nothing, and copies that break off lose nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deeprec_spark import checkpoint
from deeprec_spark.checkpoint import chains
from deeprec_spark.checkpoint.errors import CheckpointCorruptError
from deeprec_spark.cli import app
from tests import checkpoints
from tests.servers.faults import FaultyProxy
from tests.servers.s3 import BUCKET, S3Server, client_environment


def age(directory: str) -> Path:
    """Make the manifest say that it is a thousand years older: one byte."""
    file = Path(directory, "manifest.json")
    content = file.read_bytes()
    assert content.count(b'"created": "2') == 1
    file.write_bytes(content.replace(b'"created": "2', b'"created": "1'))
    return file


def fulls(model_dir: Path, number: int = 3) -> list[str]:
    """Full checkpoints."""
    return [checkpoints.write(model_dir, step=step + 1, rows=1).directory for step in range(number)]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_damaged_manifest_does_not_decide_which_is_newest(
    tmp_path: Path, victim: int, caplog: pytest.LogCaptureFixture
) -> None:
    directories = fulls(tmp_path)
    file = age(directories[victim])
    for ask in (checkpoint.latest, checkpoint.entries, checkpoint.chain, checkpoint.load, checkpoint.find):
        with pytest.raises(CheckpointCorruptError, match=str(file)):
            ask(str(tmp_path))
    assert checkpoint.chain(directories[1]) == [directories[1]]
    good = directories[1 if victim == 2 else 2]
    with caplog.at_level(logging.WARNING):
        assert checkpoint.chain(str(tmp_path), fallback=True) == [good]
    assert f"going back to {good}" in caplog.text
    assert str(file) in caplog.text


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    directories = fulls(tmp_path, 2)
    file = Path(directories[1], "manifest.json")
    content = file.read_bytes()
    for index in range(0, len(content), 5):
        file.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        with pytest.raises(CheckpointCorruptError, match=str(file)):
            checkpoint.latest(str(tmp_path))


def test_prune_deletes_nothing_because_of_a_damaged_manifest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directories = fulls(tmp_path, 4)
    file = age(directories[3])
    with caplog.at_level(logging.WARNING):
        assert checkpoint.prune(str(tmp_path), 2) == [1]
    assert f"{file}" in caplog.text
    assert "not deleted" in caplog.text
    assert [Path(directory).exists() for directory in directories] == [False, True, True, True]


def test_prune_keeps_what_builds_on_a_damaged_manifest(tmp_path: Path) -> None:
    store, directories = checkpoints.write_chain(tmp_path, deltas=1)
    age(directories[0])
    checkpoints.save(store, tmp_path, 40)
    checkpoints.save(store, tmp_path, 50)
    assert checkpoint.prune(str(tmp_path), 1) == [40]
    assert all(Path(directory).exists() for directory in directories)


def test_prune_keeps_an_older_chain_that_was_gone_on_with(tmp_path: Path) -> None:
    """The newest checkpoint is never deleted, though the full one below it is the oldest."""
    store, [full] = checkpoints.write_chain(tmp_path, deltas=0)
    other = checkpoints.new_store()
    checkpoints.save(other, tmp_path, 15)
    delta = checkpoints.save(store, tmp_path, 20, full)
    assert checkpoint.prune(str(tmp_path), 1) == [15]
    assert checkpoint.chain(str(tmp_path)) == [full, delta]


def test_the_commands_look_at_every_manifest(tmp_path: Path) -> None:
    directories = fulls(tmp_path)
    file = age(directories[0])
    for flags, good in (([], None), (["--fallback"], directories[2])):
        done = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path), *flags])
        assert done.exit_code == 1, done.output
        assert str(file) in done.stderr
        assert good is None or f"last good: {good}" in done.stdout
    listed = CliRunner().invoke(app, ["checkpoint", "ls", str(tmp_path)])
    assert listed.exit_code == 1
    assert [line.split("\t")[1] for line in listed.stdout.splitlines()[1:]] == ["full", "full", "damaged"]


def content(path: str) -> dict[str, Any]:
    """What a store restored from here holds."""
    store = checkpoints.new_store()
    store.restore(checkpoint.chain(path))
    return checkpoints.content(store)


@pytest.fixture(params=["local", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Path]]:
    """A folder to copy to, as a location and as a local path."""
    if request.param == "local":
        yield str(tmp_path / "copies"), tmp_path / "copies"
        return
    with S3Server(tmp_path / "s3") as server, FaultyProxy(server.port) as proxy:
        for name, value in client_environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/copies", server.place("copies")


def test_a_copy_onto_itself_does_nothing(place: tuple[str, Path], tmp_path: Path) -> None:
    target = f"{place[0]}/saved"
    _, directories = checkpoints.write_chain(tmp_path / "model")
    checkpoint.copy(directories[-1], target)
    before = content(target)
    for same in (target, f"{target}/"):
        checkpoint.copy(same, target, overwrite=True)
        assert content(target) == before
    with pytest.raises(FileExistsError, match="set overwrite"):
        checkpoint.copy(target, target)
    with pytest.raises(ValueError, match="replace what it is a copy of"):
        checkpoint.copy(f"{target}/bases/{10:012d}", target, overwrite=True)
    with pytest.raises(ValueError, match="replace what it is a copy of"):
        checkpoint.copy(directories[-1], directories[0], overwrite=True)
    assert content(target) == before == content(str(tmp_path / "model"))


def test_links_are_followed(tmp_path: Path) -> None:
    _, directories = checkpoints.write_chain(tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    link = str(tmp_path / "link" / "checkpoints" / Path(directories[-1]).name)
    before = content(directories[-1])
    checkpoint.copy(directories[-1], link, overwrite=True)
    assert content(directories[-1]) == before


def test_an_overwriting_copy_that_breaks_off_has_not_lost_the_old_one(
    place: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{place[0]}/saved"
    store, directories = checkpoints.write_chain(tmp_path / "model")
    checkpoint.copy(directories[0], target)
    old, new = content(target), checkpoints.content(store)
    copy_one = chains._copy_one

    def broken(source: str, target: str) -> None:
        if source == directories[-1]:
            raise OSError("the disk is full")
        copy_one(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(chains, "_copy_one", broken)
        with pytest.raises(OSError, match="disk is full"):
            checkpoint.copy(directories[-1], target, overwrite=True)
    assert content(target) == old
    assert [path.name for path in place[1].iterdir()] == ["saved"]
    checkpoint.copy(directories[-1], target, overwrite=True)
    assert content(target) == new != old
    assert [path.name for path in place[1].iterdir()] == ["saved"]
