"""Paths and URIs."""

from pathlib import Path

import pytest

from deeprec_spark.data.filesystem import is_local, resolve


@pytest.mark.parametrize(
    ("location", "kind", "path"),
    [
        ("/data/a b", "local", "/data/a b"),
        ("file:///data/a", "local", "/data/a"),
        ("file:/data/a", "local", "/data/a"),
        ("dbfs:/mnt/a", "local", "/dbfs/mnt/a"),
        # Without a region pyarrow would ask the network for it.
        ("s3://bucket/a?region=eu-west-1", "s3", "bucket/a"),
        ("s3a://bucket/a?region=eu-west-1", "s3", "bucket/a"),
    ],
)
def test_each_form(location: str, kind: str, path: str) -> None:
    filesystem, found = resolve(location)
    assert (filesystem.type_name, found) == (kind, path)
    assert is_local(location) == (kind == "local")


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("a/b")[1] == str(tmp_path / "a" / "b")


def test_unknown_schemes_are_named() -> None:
    with pytest.raises(ValueError, match="Received: 'ftp://host/a'"):
        resolve("ftp://host/a")
