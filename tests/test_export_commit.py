"""A folder appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import fs

from deeprec_spark.export import commit
from deeprec_spark.export.commit import committed_directory


def export(location: Path | str, content: str, *, overwrite: bool = False, fail: bool = False) -> None:
    """Write a folder that looks like a SavedModel."""
    with committed_directory(str(location), overwrite=overwrite) as folder:
        (folder / "variables").mkdir()
        (folder / "variables" / "data").write_text(content)
        (folder / "saved_model.pb").write_text(content)
        if fail:
            raise OSError("disk full")


def test_it_appears_when_all_is_written(tmp_path: Path) -> None:
    place = tmp_path / "models" / "1"
    with committed_directory(str(place), overwrite=False) as folder:
        assert not place.exists()
        (folder / "saved_model.pb").touch()
    assert place.is_dir()
    assert [path.name for path in place.parent.iterdir()] == ["1"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        export(tmp_path / "m", "new", fail=True)
    assert list(tmp_path.iterdir()) == []
    export(tmp_path / "m", "old")
    with pytest.raises(OSError, match="disk full"):
        export(tmp_path / "m", "new", overwrite=True, fail=True)
    assert (tmp_path / "m" / "saved_model.pb").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_overwriting_is_asked_for_and_spares_strangers(tmp_path: Path) -> None:
    export(tmp_path / "m", "old")
    with pytest.raises(FileExistsError, match="set overwrite"):
        export(tmp_path / "m", "new")
    export((tmp_path / "m").as_uri(), "new", overwrite=True)
    assert (tmp_path / "m" / "variables" / "data").read_text() == "new"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match=r"left alone.*thesis\.txt"):
        export(tmp_path / "mine", "new", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_an_object_store_gets_the_model_file_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is no local disk is uploaded: a subtree stands for the bucket.
    bucket = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    monkeypatch.setattr(commit, "resolve", lambda location: (bucket, location))
    uploaded: list[str] = []
    copy_files = fs.copy_files

    def recorded(source: str, target: str, **options: object) -> None:
        uploaded.append(target)
        copy_files(source, target, **options)

    monkeypatch.setattr(fs, "copy_files", recorded)
    export("models/1", "old")
    export("models/1", "new", overwrite=True)
    assert uploaded == ["models/1/variables/data", "models/1/saved_model.pb"] * 2
    assert (tmp_path / "models" / "1" / "variables" / "data").read_text() == "new"
    with pytest.raises(FileExistsError, match="set overwrite"):
        export("models/1", "other")
