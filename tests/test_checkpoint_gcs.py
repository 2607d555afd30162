"""Checkpoints on gs://, through pyarrow against a server that speaks Google Cloud Storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deeprec_spark import checkpoint
from deeprec_spark.checkpoint.tools import compact
from tests import checkpoints
from tests.servers.gcs import GcsServer

pytestmark = pytest.mark.timeout(700)  # the server is built at first use


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """A server for all tests here; each works below a folder of its own."""
    with GcsServer(tmp_path_factory.mktemp("gcs")) as running:
        yield running


def restored(path: str) -> dict[str, object]:
    """What a new store holds after a restore."""
    store = checkpoints.new_store()
    store.restore(checkpoint.chain(path))
    return checkpoints.content(store)


def test_a_chain_on_google_cloud_storage(server: GcsServer, tmp_path: Path) -> None:
    """Save, restore, copy, compact and prune. pyarrow lists no folder there that nobody made as such."""
    model = server.uri("chain")
    store, directories = checkpoints.write_chain(model)
    content = checkpoints.content(store)
    assert checkpoint.steps(model) == [10, 20, 30]
    assert checkpoint.chain(model) == directories
    assert restored(model) == content
    checkpoint.copy(model, str(tmp_path / "local"))
    assert restored(str(tmp_path / "local")) == content
    checkpoint.copy(str(tmp_path / "local"), server.uri("copied"))
    assert restored(server.uri("copied")) == content
    made = compact(model)
    assert restored(model) == content
    assert checkpoint.prune(model, 1) == [10, 20, 30]
    assert checkpoint.entries(model)[0].directory == made == checkpoint.latest(model)
    assert len(checkpoint.entries(model)) == 1
