"""Checkpoints on a real S3 server, with slow and failing requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deeprec_spark import checkpoint
from deeprec_spark.checkpoint.tools import compact
from deeprec_spark.cli import app
from tests import checkpoints
from tests.servers.faults import Fault, FaultyProxy, Request
from tests.servers.s3 import ACCESS, BUCKET, SECRET, S3Server, client_environment

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server for all tests here; each works below a folder of its own."""
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The server behind a proxy, which the environment names."""
    with FaultyProxy(server.port) as running:
        for name, value in client_environment(running.port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("DEEPREC_S3_ATTEMPTS", "3")  # later ones wait for many seconds
        yield running


def restored(path: str) -> dict[str, object]:
    """What a new store holds after a restore."""
    store = checkpoints.new_store()
    store.restore(checkpoint.chain(path))
    return checkpoints.content(store)


def test_a_chain_on_s3(server: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    """Save, restore, read, copy, compact, list and prune."""
    model = f"s3://{BUCKET}/chain"
    store, directories = checkpoints.write_chain(model)
    content = checkpoints.content(store)
    assert directories[0] == f"{model}/checkpoints/{10:012d}"
    assert checkpoint.chain(model) == directories
    assert restored(model) == content
    snapshot = checkpoint.SnapshotStore(model, str(tmp_path / "cache"))
    keys = store.table("bloom").keys()[0]
    np.testing.assert_array_equal(snapshot.lookup("bloom", keys), store.table("bloom").lookup(keys))
    checkpoint.copy(model, str(tmp_path / "local"))
    assert restored(str(tmp_path / "local")) == content
    checkpoint.copy(str(tmp_path / "local"), f"s3://{BUCKET}/copied")
    assert restored(f"s3a://{BUCKET}/copied") == content
    made = compact(model)
    assert checkpoint.load(made).kind == "full"
    assert restored(model) == content
    listed = CliRunner().invoke(app, ["checkpoint", "ls", model])
    assert (listed.exit_code, len(listed.stdout.splitlines())) == (0, 5), listed.output
    assert checkpoint.prune(model, 1) == [10, 20, 30]
    assert checkpoint.latest(model) == made
    assert [path.name for path in server.place("chain", "checkpoints").iterdir()] == [made.rpartition("/")[2]]


def test_one_put_commits_a_checkpoint(proxy: FaultyProxy) -> None:
    """It is the last request that writes; there is no copy, no rename and no multipart upload of the manifest."""
    checkpoints.write_chain(f"s3://{BUCKET}/one-put", deltas=0)
    writes = [request for request in proxy.requests if request.method in ("PUT", "POST", "DELETE")]
    manifests = [request for request in writes if "manifest" in request.path]
    assert [(request.method, request.path) for request in manifests] == [
        ("PUT", f"/{BUCKET}/one-put/checkpoints/{10:012d}/manifest.json")
    ]
    assert writes[-1] == manifests[0]


def test_endpoint_and_credentials_in_the_uri(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in client_environment(server.port):
        monkeypatch.delenv(name, raising=False)
    query = f"?endpoint_override=127.0.0.1:{server.port}&scheme=http&access_key={ACCESS}&secret_key={SECRET}"
    store, directories = checkpoints.write_chain(f"s3://{BUCKET}/by-uri{query}", deltas=1)
    assert directories[1] == f"s3://{BUCKET}/by-uri/checkpoints/{20:012d}{query}"
    assert restored(f"s3://{BUCKET}/by-uri{query}") == checkpoints.content(store)
    assert server.place("by-uri", "checkpoints", f"{20:012d}", "manifest.json").exists()


def test_damage_on_s3_is_named(server: S3Server, proxy: FaultyProxy) -> None:
    _, directories = checkpoints.write_chain(f"s3://{BUCKET}/damaged", deltas=1)
    [path] = server.place("damaged", "checkpoints", f"{20:012d}", "dense").glob("part-*")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(checkpoint.CheckpointCorruptError, match=rf"{20:012d}/dense/part-00000\.parquet"):
        checkpoint.chain(directories[1])
    path.unlink()
    with pytest.raises(checkpoint.CheckpointCorruptError, match=r"missing.*dense/part-00000\.parquet"):
        checkpoint.chain(directories[1])
    assert checkpoint.chain(directories[1], fallback=True) == directories[:1]


def test_slow_and_failing_requests_are_tried_again(proxy: FaultyProxy) -> None:
    """The first tries of most requests are refused, cut or late; nothing is lost and nothing is half there."""
    model = f"s3://{BUCKET}/shaky"
    faults: tuple[Fault, ...] = ("503", "cut", "slow", "pass", "cut answer")

    def rule(request: Request) -> Fault:
        if request.attempt >= 1:
            return "pass"
        fault = faults[request.number % len(faults)]
        # Half an answer to a write is a write that happened: the client tells by trying again.
        return "cut" if fault == "cut answer" and request.method != "GET" else fault

    proxy.rule = rule
    store, directories = checkpoints.write_chain(model, deltas=1)
    assert checkpoint.chain(model) == directories
    assert restored(model) == checkpoints.content(store)
    assert proxy.faults > 30


@pytest.mark.parametrize("victim", ["part-00000-00000.parquet", "store-00000.json", "manifest.json"])
def test_a_write_that_cannot_be_done_leaves_no_half_checkpoint(
    server: S3Server, proxy: FaultyProxy, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"broken-{victim[0]}"
    model = f"s3://{BUCKET}/{name}"
    store, [full] = checkpoints.write_chain(model, deltas=0)
    content = checkpoints.content(store)
    checkpoints.change(store, 3)
    proxy.rule = lambda request: "503" if request.method == "PUT" and victim in request.path else "pass"
    with pytest.raises(OSError, match=victim):
        checkpoints.save(store, model, 20, full)
    assert checkpoint.latest(model) == full
    assert restored(model) == content
    proxy.rule = lambda request: "pass"
    # A base that may not have been committed cannot be built on; a full save can be made, and cleans up.
    with caplog.at_level(logging.WARNING):
        last = checkpoints.save(store, model, 30)
    assert f"{20:012d}" in caplog.text
    assert not server.place(name, "checkpoints", f"{20:012d}").exists()
    assert checkpoint.chain(model) == [last]
    assert restored(model) == checkpoints.content(store)


def test_wrong_credentials_are_refused_without_showing_them(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(OSError, match=f"{BUCKET}/x") as caught:
        checkpoint.chain(f"s3://{BUCKET}/x?access_key=somebody&secret_key=not-to-be-seen")
    assert "not-to-be-seen" not in str(caught.value) + caplog.text
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-secret")
    with caplog.at_level(logging.DEBUG), pytest.raises(OSError, match=BUCKET) as caught:
        checkpoints.write_chain(f"s3://{BUCKET}/x")
    assert "wrong-and-secret" not in str(caught.value) + caplog.text
