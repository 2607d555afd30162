"""Compaction and comparison of checkpoints, and the commands."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deeprec_spark import checkpoint
from deeprec_spark.checkpoint.tools import compact, difference
from deeprec_spark.cli import app
from deeprec_spark.embedding import table_chain
from deeprec_spark.embedding.table_files import GROUP_ROWS
from tests import checkpoints
from tests.test_checkpoint_chains import files_of, kind_of

runner = CliRunner()


def test_a_compacted_chain_is_a_full_checkpoint_of_the_same_state(tmp_path: Path) -> None:
    store, directories = checkpoints.write_chain(tmp_path)
    running = Path(tmp_path, "checkpoints", f"{99:012d}")
    running.mkdir()
    made = compact(str(tmp_path))
    assert running.exists()  # another process may be saving
    assert Path(made).name.startswith(f"{30:012d}-compact-")
    manifest = checkpoint.load(made)
    assert (manifest.kind, manifest.base, manifest.step) == ("full", None, 30)
    assert checkpoint.chain(str(tmp_path)) == [made]
    again = checkpoints.new_store()
    again.restore([made], manifest.save_id)
    assert checkpoints.content(again) == checkpoints.content(store)
    checkpoints.change(again, 7)
    last = checkpoints.save(again, tmp_path, 40, made)  # incremental saves go on from it
    third = checkpoints.new_store()
    third.restore(checkpoint.chain(last))
    assert checkpoints.content(third) == checkpoints.content(again)
    elsewhere = compact(directories[1], str(tmp_path / "elsewhere"))
    assert checkpoint.load(elsewhere).step == 20
    with pytest.raises(FileExistsError, match="elsewhere"):
        compact(directories[1], str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match="no model directory"):
        compact(elsewhere)


def test_a_compacted_checkpoint_takes_the_place_of_its_source(tmp_path: Path) -> None:
    store, directories = checkpoints.write_chain(tmp_path)
    older = compact(directories[1])
    assert checkpoint.latest(str(tmp_path)) == directories[2]
    found = [entry.directory for entry in checkpoint.entries(str(tmp_path))]
    assert found == [*directories[:2], older, directories[2]]
    assert checkpoint.prune(str(tmp_path), 1) == [20]
    assert checkpoint.chain(str(tmp_path)) == directories  # the newest stays, with all that it needs
    # A name without a number, though the source has one.
    second = checkpoints.save(store, tmp_path, 30)
    third = checkpoints.save(store, tmp_path, 30, second)
    assert compact(third) == checkpoint.latest(str(tmp_path))


def test_saves_leave_running_compactions_alone(tmp_path: Path) -> None:
    """A save that is begun and committed meanwhile neither deletes the compaction nor is passed by it."""
    store, _ = checkpoints.write_chain(tmp_path)
    before = checkpoints.content(store)
    saved: list[str] = []

    def save(table: str, rows: int) -> None:
        if not saved:
            checkpoints.change(store, 50)
            saved.append(checkpoints.save(store, tmp_path, 40, keep_max=2))
            listed = runner.invoke(app, ["checkpoint", "ls", str(tmp_path)])
            assert "being compacted" in listed.stderr

    made = compact(str(tmp_path), progress=save)
    assert checkpoint.latest(str(tmp_path)) == saved[0]
    again = checkpoints.new_store()
    again.restore(checkpoint.chain(made))
    assert checkpoints.content(again) == before


def test_compactions_that_broke_off_are_removed_after_a_day(tmp_path: Path) -> None:
    store, directories = checkpoints.write_chain(tmp_path)

    def fail(table: str, rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compact(str(tmp_path), progress=fail)
    [left] = Path(tmp_path, "checkpoints").glob("*-compact-*")
    last = checkpoints.save(store, tmp_path, 40, directories[-1])
    assert left.exists()
    day = time.time() - 25 * 3600
    for path in [*left.rglob("*"), left]:
        os.utime(path, (day, day))
    checkpoints.save(store, tmp_path, 50, last)
    assert not left.exists()


@pytest.mark.timeout(240)
def test_compaction_keeps_few_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups are small here; what is held at a time must not grow with the table."""
    monkeypatch.setattr("deeprec_spark.embedding.table_files.GROUP_ROWS", 64)
    monkeypatch.setattr(table_chain, "GROUP_ROWS", 64)
    store, _ = checkpoints.write_chain(tmp_path, rows=3000)
    rows = len(store.table("a/b c"))
    assert rows > 600
    seen = []
    compact(str(tmp_path), progress=lambda table, done: seen.append((table, done)))
    ours = [done for table, done in seen if table == "a/b c"]
    assert ours[-1] == rows
    assert max(np.diff([0, *ours])) < 400 < rows
    assert GROUP_ROWS > 64


def test_differences_are_counted_row_by_row(tmp_path: Path) -> None:
    store, directories = checkpoints.write_chain(tmp_path, deltas=1)
    found = {table.name: table for table in difference(directories[0], directories[1])}
    stores = [checkpoints.new_store() for _ in range(2)]
    for number, other in enumerate(stores):
        other.restore(checkpoint.chain(directories[number]))
    for name, table in found.items():
        before, after = ({k: v[2] for k, v in checkpoints.content(s)[name][0].items()} for s in stores)
        full = [checkpoints.content(s)[name][0] for s in stores]
        assert (table.rows_before, table.rows_after) == (len(before), len(after))
        assert table.added == len(set(after) - set(before))
        assert table.removed == len(set(before) - set(after))
        both = set(before) & set(after)
        assert table.changed == sum(full[0][key] != full[1][key] for key in both)
        keys = np.array(sorted(both))
        values = [other.table(name).lookup(keys).astype(np.float64) for other in stores]
        assert table.change_norm == pytest.approx(np.linalg.norm(values[1] - values[0]))
        everything = store.table(name).lookup(np.array(sorted(after))).astype(np.float64)
        assert table.norm_after == pytest.approx(np.linalg.norm(everything))
    assert sum(table.changed + table.added for table in found.values()) > 10
    assert not any(t.added + t.removed + t.changed for t in difference(directories[1], directories[1]))


def test_the_commands(tmp_path: Path) -> None:
    _, directories = checkpoints.write_chain(tmp_path)
    (tmp_path / "checkpoints" / f"{99:012d}").mkdir()
    listed = runner.invoke(app, ["checkpoint", "ls", str(tmp_path)])
    assert listed.exit_code == 0, listed.output
    lines = [line.split("\t") for line in listed.stdout.splitlines()]
    assert [line[:4] for line in lines[1:]] == [
        [f"{10:012d}", "full", "-", "10"],
        [f"{20:012d}", "incremental", f"{10:012d}", "20"],
        [f"{30:012d}", "incremental", f"{20:012d}", "30"],
    ]
    assert f"{99:012d}\tnot committed" in listed.stderr
    one = runner.invoke(app, ["checkpoint", "ls", directories[1]])
    assert (one.exit_code, len(one.stdout.splitlines())) == (0, 2)

    good = runner.invoke(app, ["checkpoint", "verify", str(tmp_path)])
    assert good.exit_code == 0, good.output
    assert [line.split("\t")[-1] for line in good.stdout.splitlines()] == ["ok"] * 3

    compared = runner.invoke(app, ["checkpoint", "diff", directories[0], str(tmp_path)])
    assert compared.exit_code == 0, compared.output
    assert compared.stdout.splitlines()[0].startswith("table\tbefore\tafter\tadded\tremoved\tchanged")
    assert len(compared.stdout.splitlines()) == 4

    packed = runner.invoke(app, ["checkpoint", "compact", str(tmp_path), "--target", str(tmp_path / "full")])
    assert (packed.exit_code, packed.stdout.strip()) == (0, str(tmp_path / "full")), packed.output
    assert checkpoint.load(str(tmp_path / "full")).kind == "full"

    damaged = [path for path in files_of(directories[1]) if kind_of(path) in ("part", "bloom")]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    bad = runner.invoke(app, ["checkpoint", "verify", str(tmp_path), "--fallback"])
    assert bad.exit_code == 1
    assert f"last good: {directories[0]}" in bad.stdout
    for path in damaged:
        assert str(path) in bad.stderr
    assert runner.invoke(app, ["checkpoint", "compact", str(tmp_path)]).exit_code == 1
    for command in ("ls", "verify", "compact"):
        missing = runner.invoke(app, ["checkpoint", command, str(tmp_path / "nowhere")])
        assert (missing.exit_code, "No checkpoint here" in missing.stderr) == (2, True), missing.output
    Path(directories[2], "manifest.json").write_text("{")
    assert runner.invoke(app, ["checkpoint", "ls", str(tmp_path)]).exit_code == 1


def test_the_command_line_shows_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deeprec_spark.cli", "checkpoint", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for command in ("ls", "verify", "diff", "compact"):
        assert command in done.stdout
