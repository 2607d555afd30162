"""Paths and URIs."""

from pathlib import Path

import pytest

from deeprec_spark.embedding.filesystem import (
    is_local,
    join,
    open_output,
    parent,
    publish,
    redacted,
    resolve,
)


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


def test_paths_below_a_uri_keep_its_query() -> None:
    assert join("/a/b/", "c", "d") == "/a/b/c/d"
    assert join("/a?b", "c") == "/a?b/c"  # a question mark is a letter in a plain path
    assert join("s3://b/a/?region=x", "c") == "s3://b/a/c?region=x"
    assert parent("s3://b/a/c?region=x") == ("s3://b/a?region=x", "c")
    assert parent("/a/b/") == ("/a", "b")


def test_secrets_are_not_shown() -> None:
    assert redacted("s3://key:secret@b/a?secret_key=x") == "s3://b/a"
    with pytest.raises(ValueError, match="'token'") as caught:
        resolve("s3://key:hidden@bucket/a?token=hidden")
    assert "hidden" not in str(caught.value)
    with pytest.raises(ValueError, match="gopher://host/a") as caught:
        resolve("gopher://me:hidden@host/a?token=hidden")
    assert "hidden" not in str(caught.value)


def test_s3_takes_the_usual_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first")
    first, path = resolve("s3://bucket/a")
    assert path == "bucket/a"
    assert resolve("s3://bucket/b")[0] is first  # one client
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    assert resolve("s3://bucket/a")[0] is not first


def test_a_published_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    filesystem, path = resolve(str(tmp_path / "x"))
    publish(filesystem, path, b"one")
    publish(filesystem, path, b"two")
    assert Path(path).read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_large_files_are_flushed_as_they_grow(tmp_path: Path) -> None:
    filesystem, path = resolve(str(tmp_path / "x"))
    block = bytes(range(256)) * (1 << 14)
    with open_output(filesystem, path) as file:
        for _ in range(20):
            file.write(block)
    assert Path(path).read_bytes() == 20 * block


def test_fsspec_opens_what_pyarrow_does_not() -> None:
    filesystem, path = resolve("memory://folder/x")
    with filesystem.open_output_stream(path) as stream:
        stream.write(b"content")
    with filesystem.open_input_stream(resolve("memory://folder/x")[1]) as stream:
        assert stream.read() == b"content"
