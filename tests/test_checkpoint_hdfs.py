"""Checkpoints on a real HDFS, through a client without a JVM."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from deeprec_spark import checkpoint
from deeprec_spark.data.file_cache import CacheOptions, FileCache
from deeprec_spark.embedding.filesystem import list_files, publish, resolve
from tests import checkpoints
from tests.conftest import ROOT, RunPython
from tests.cut_proxy import CutProxy, somewhere
from tests.servers.hdfs import HdfsServer

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsServer]:
    """One for all tests here; each works below a folder of its own."""
    with HdfsServer(tmp_path_factory.mktemp("hdfs")) as running:
        yield running


def test_a_chain_on_hdfs(hdfs: HdfsServer, tmp_path: Path) -> None:
    model = f"{hdfs.uri}/models/chain"
    assert checkpoint.latest(model) is None
    store, directories = checkpoints.write_chain(model)
    content = checkpoints.content(store)
    assert checkpoint.chain(model) == directories
    again = checkpoints.new_store()
    again.restore(checkpoint.chain(model), checkpoint.load(model).save_id)
    assert checkpoints.content(again) == content
    snapshot = checkpoint.SnapshotStore(model, str(tmp_path / "cache"))
    keys = store.table("bloom").keys()[0]
    np.testing.assert_array_equal(snapshot.lookup("bloom", keys), store.table("bloom").lookup(keys))
    checkpoint.copy(model, str(tmp_path / "local"))
    checkpoint.copy(str(tmp_path / "local"), f"{hdfs.uri}/copied")
    assert len(checkpoint.chain(f"{hdfs.uri}/copied")) == 3
    last = checkpoints.save(again, model, 40)
    assert checkpoint.prune(model, 1) == [10, 20, 30]
    assert checkpoint.chain(model) == [last]


def test_the_manifest_appears_by_a_rename(hdfs: HdfsServer) -> None:
    filesystem, path = resolve(f"{hdfs.uri}/published")
    filesystem.create_dir(path, recursive=True)
    publish(filesystem, f"{path}/manifest.json", b"whole")
    assert list_files(filesystem, path, "", "") == [f"{path}/manifest.json"]
    with filesystem.open_input_stream(f"{path}/manifest.json") as stream:
        assert stream.read() == b"whole"


def test_a_damaged_file_is_named(hdfs: HdfsServer) -> None:
    model = f"{hdfs.uri}/damaged"
    _, directories = checkpoints.write_chain(model, deltas=1)
    filesystem, path = resolve(f"{directories[1]}/dense/part-00000.parquet")
    with filesystem.open_input_stream(path) as stream:
        content = stream.read()
    with filesystem.open_output_stream(path) as stream:
        stream.write(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(checkpoint.CheckpointCorruptError, match=r"0020/dense/part-00000\.parquet"):
        checkpoint.chain(model)
    assert checkpoint.chain(model, fallback=True) == directories[:1]


def test_processes_that_use_hdfs_end_well(hdfs: HdfsServer, run_python: RunPython) -> None:
    """Arrow's threads call Python to read; one that is left reading at the end would abort the process."""
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from deeprec_spark import checkpoint
from deeprec_spark.embedding.table_chain import TableChain
from tests import checkpoints

store, directories = checkpoints.write_chain(sys.argv[1])
again = checkpoints.new_store()
again.restore(checkpoint.chain(sys.argv[1]))
assert checkpoints.content(again) == checkpoints.content(store)
rows = TableChain(directories, "a/b c").rows()
next(rows)  # and the rest is left unread
print("done")
"""
    for number in range(3):
        done = run_python(script, f"{hdfs.uri}/ends-{number}", timeout=120)
        assert done.stdout.strip() == "done"
        assert done.stderr == ""


def test_cut_connections_to_the_name_node_lose_nothing(hdfs: HdfsServer) -> None:
    """A save whose requests are cut succeeds or says so; what it leaves is no checkpoint, and the next one is whole."""
    proxy = CutProxy(f"127.0.0.1:{hdfs.port}")
    chance = random.Random(5)
    try:
        model = f"hdfs://{proxy.address}/cut"
        store, _ = checkpoints.write_chain(model, deltas=0)
        for step in range(20, 140, 10):
            proxy.arm(*somewhere(chance, 2000))
            with suppress(OSError):
                checkpoints.save(store, model, step)
            proxy.disarm()
            assert checkpoint.chain(model)
        assert proxy.cuts > 5
        last = checkpoints.save(store, model, 200)
        assert checkpoint.chain(f"{hdfs.uri}/cut") == [last.replace(proxy.address, f"127.0.0.1:{hdfs.port}")]
        again = checkpoints.new_store()
        again.restore(checkpoint.chain(model))
        assert checkpoints.content(again) == checkpoints.content(store)
    finally:
        proxy.close()


def test_a_save_outlives_an_hdfs_that_stands_still_for_a_while(hdfs: HdfsServer) -> None:
    model = f"{hdfs.uri}/slow"
    store, _ = checkpoints.write_chain(model, deltas=0)
    os.kill(hdfs.pid, signal.SIGSTOP)
    going_on = threading.Timer(3.0, os.kill, (hdfs.pid, signal.SIGCONT))
    going_on.start()
    try:
        saved = checkpoints.save(store, model, 20)
        assert not going_on.is_alive()
    finally:
        going_on.join()
    assert checkpoint.chain(model) == [saved]


_FORKS = """
import os, sys
import fsspec
from deeprec_spark.embedding.filesystem import resolve
filesystem, path = resolve(sys.argv[1])
filesystem.create_dir(path)
child = os.fork()
if child == 0:
    fsspec.filesystem("memory")
    del filesystem
    import gc
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_of_a_process_with_a_client_ends(hdfs: HdfsServer, run_python: RunPython) -> None:
    """fsspec drops its clients in a child, and this one cannot end without the threads that only its parent has."""
    done = run_python(_FORKS, f"{hdfs.uri}/forks", timeout=120)
    assert done.stdout.split() == ["0"], done.stderr


def test_a_copy_of_a_file_that_changed_is_not_read(hdfs: HdfsServer, tmp_path: Path) -> None:
    """pyarrow does not hand on the time at which a file on HDFS changed; an equal size does not make it the same."""
    uri = f"{hdfs.uri}/cached"
    filesystem, path = resolve(uri)
    cache = FileCache(CacheOptions(str(tmp_path)))
    for content in (b"first", b"other"):
        with filesystem.open_output_stream(path) as stream:
            stream.write(content)
        for _ in range(2):
            with cache.open(uri) as file:
                assert file.read() == content
    assert cache.counts() == {"misses": 2, "hits": 2, "fetched_bytes": 10}
