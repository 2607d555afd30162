"""Copies of remote files, from a real S3 server: bounded, shared, checked, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deeprec_spark.data import BatchReader, ParquetDataset, ReaderOptions
from deeprec_spark.data.file_cache import CacheOptions, FileCache
from deeprec_spark.embedding.filesystem import resolve
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from tests.servers.faults import Fault, FaultyProxy, Request
from tests.servers.s3 import BUCKET, S3Server, client_environment

pytestmark = pytest.mark.timeout(240)

SIZE = 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The server behind a proxy that sees each request; the environment names it."""
    with FaultyProxy(server.port) as running:
        for name, value in client_environment(running.port).items():
            monkeypatch.setenv(name, value)
        yield running


def put(server: S3Server, folder: str, count: int = 1, size: int = SIZE) -> list[str]:
    """Files of random bytes in the bucket; their URIs."""
    place = server.place(folder)
    place.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (place / f"{number}").write_bytes(os.urandom(size))
    return [f"s3://{BUCKET}/{folder}/{number}" for number in range(count)]


def content(server: S3Server, uri: str) -> bytes:
    return server.place(*uri.removeprefix(f"s3://{BUCKET}/").split("/")).read_bytes()


def read(cache: FileCache, uri: str) -> bytes:
    with cache.open(uri) as file:
        return bytes(file.read())


def copies(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix not in (".lock", ".part")]


def test_the_second_read_is_local(server: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    [uri] = put(server, "second")
    cache = FileCache(CacheOptions(str(tmp_path)))
    assert read(cache, uri) == content(server, uri)
    assert read(cache, uri) == content(server, uri)
    again = FileCache(CacheOptions(str(tmp_path)))  # as another process of the host
    assert read(again, uri) == content(server, uri)
    assert cache.counts() == {"misses": 1, "hits": 1, "fetched_bytes": SIZE}
    assert again.counts() == {"hits": 1}
    assert not list(tmp_path.glob("*.part"))


def test_a_changed_file_is_fetched_anew(server: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    [uri] = put(server, "changed")
    cache = FileCache(CacheOptions(str(tmp_path)))
    before = read(cache, uri)
    # Of the same size: the time of change alone says that it is another one.
    put(server, "changed")
    place = server.place("changed", "0")
    status = place.stat()
    os.utime(place, (status.st_atime, status.st_mtime + 5))
    assert read(cache, uri) == content(server, uri) != before


def test_files_without_a_version_are_not_cached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A filesystem may tell nothing by which an overwritten file of the same size could be known."""
    uris = [f"memory://unversioned/{number}" for number in range(2)]
    cache = FileCache(CacheOptions(str(tmp_path)))
    for content in (b"first", b"other"):
        for uri in uris:
            filesystem, path = resolve(uri)
            with filesystem.open_output_stream(path) as stream:
                stream.write(content)
            assert read(cache, uri) == content
    assert cache.counts() == {"bypassed": 4}
    assert len([record for record in caplog.records if "memory://unversioned/0" in record.message]) == 1
    assert len(caplog.records) == 1


def test_what_was_unused_for_longest_makes_room(server: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    first, second, third, fourth = put(server, "room", 4)
    cache = FileCache(CacheOptions(str(tmp_path), max_bytes=3 * SIZE))
    for number, uri in enumerate((first, second, third)):
        read(cache, uri)
        for copy in copies(tmp_path):  # the clock of a file system may be coarse
            status = copy.stat()
            os.utime(copy, (status.st_atime, status.st_mtime - 10 * (3 - number)))
    read(cache, first)  # now the second is the oldest
    read(cache, fourth)
    assert sum(copy.stat().st_size for copy in copies(tmp_path)) == 3 * SIZE
    hits = cache.counts()["hits"]
    for uri in (first, third, fourth):
        read(cache, uri)
    assert cache.counts()["hits"] == hits + 3
    read(cache, second)
    assert cache.counts() == {"misses": 5, "hits": hits + 3, "fetched_bytes": 5 * SIZE, "evicted": 2}


def test_a_file_that_does_not_fit_is_read_remotely(
    server: S3Server, proxy: FaultyProxy, tmp_path: Path
) -> None:
    [uri] = put(server, "large")
    cache = FileCache(CacheOptions(str(tmp_path), max_bytes=SIZE - 1))
    assert read(cache, uri) == content(server, uri)
    assert cache.counts() == {"bypassed": 1}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
def test_a_damaged_or_vanished_copy_is_fetched_again(
    server: S3Server, proxy: FaultyProxy, tmp_path: Path, damage: str
) -> None:
    [uri] = put(server, f"damage-{damage}")
    read(FileCache(CacheOptions(str(tmp_path))), uri)
    [copy] = copies(tmp_path)
    data = bytearray(copy.read_bytes())
    if damage == "remove":
        copy.unlink()
    else:
        data[SIZE // 2] ^= 1
        copy.write_bytes({"flip": bytes(data), "cut": bytes(data[:-1]), "empty": b""}[damage])
    cache = FileCache(CacheOptions(str(tmp_path)))
    assert read(cache, uri) == content(server, uri)
    assert cache.counts().get("damaged", 0) == (0 if damage == "remove" else 1)
    assert cache.counts()["misses"] == 1
    assert read(cache, uri) == content(server, uri)
    assert cache.counts()["hits"] == 1


def test_a_copy_may_vanish_while_it_is_read(server: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    [uri] = put(server, "vanish")
    cache = FileCache(CacheOptions(str(tmp_path)))
    with cache.open(uri) as file:
        [copy] = copies(tmp_path)
        copy.unlink()
        assert bytes(file.read()) == content(server, uri)


def test_a_broken_cache_is_only_slower(server: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    [uri] = put(server, "broken")
    (tmp_path / "file").write_bytes(b"")
    cache = FileCache(CacheOptions(str(tmp_path / "file")))
    assert read(cache, uri) == content(server, uri)
    assert cache.counts() == {"bypassed": 1}


def test_a_lost_connection_leaves_nothing_and_is_the_readers_error(
    server: S3Server, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPREC_S3_ATTEMPTS", "1")
    cache = FileCache(CacheOptions(str(tmp_path)))
    with pytest.raises(OSError, match="nothing"):
        read(cache, f"s3://{BUCKET}/nothing/0")
    assert not copies(tmp_path)


def test_what_dead_processes_left_is_cleared_away(
    server: S3Server, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """A process is killed in the middle of writing; another one holds its part open, which stays."""
    import fcntl

    [uri] = put(server, "dead")
    left = tmp_path / "aa.part"
    code = f"""
import fcntl, os, signal
file = open({str(left)!r}, "xb")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(b"x" * 1000); file.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9
    assert left.exists()
    held = tmp_path / "bb.part"
    with held.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        read(FileCache(CacheOptions(str(tmp_path))), uri)
        assert held.exists()
    assert not left.exists()


def test_a_part_is_not_taken_for_abandoned_before_it_is_locked(
    server: S3Server, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one process makes a part, another one looks for what the dead left."""
    import fcntl

    uri, *others = put(server, "unlocked", 4)
    one = FileCache(CacheOptions(str(tmp_path)))
    other = FileCache(CacheOptions(str(tmp_path), wait_seconds=0))
    flock = fcntl.flock
    looked = False

    def before_the_part_is_locked(file: Any, operation: int) -> None:
        nonlocal looked
        if not looked and str(getattr(file, "name", "")).endswith(".part") and operation == fcntl.LOCK_EX:
            looked = True
            for other_uri in others:
                assert read(other, other_uri) == content(server, other_uri)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", before_the_part_is_locked)
    assert read(one, uri) == content(server, uri)
    assert looked
    assert one.counts() == {"misses": 1, "fetched_bytes": SIZE}
    assert not list(tmp_path.glob("*.part"))


CHILD = """
import sys
from deeprec_spark.data.file_cache import CacheOptions, FileCache
cache = FileCache(CacheOptions(sys.argv[1], max_bytes=int(sys.argv[2])))
for _ in range(3):
    for uri in sys.argv[3:]:
        with cache.open(uri) as file:
            print(hash(bytes(file.read())) , end=" ")
print()
print(cache.counts().get("misses", 0))
"""


@pytest.mark.parametrize("room", [100, 3])
def test_processes_of_a_host_share_the_copies(
    server: S3Server, proxy: FaultyProxy, tmp_path: Path, room: int
) -> None:
    """Four at once: each file is fetched once where there is room; with little room they read right all the same."""
    uris = put(server, f"shared-{room}", 6)
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(room * SIZE), *uris]
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    children = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = []
    for child in children:
        out, error = child.communicate(timeout=120)
        assert child.returncode == 0, error[-2000:]
        outputs.append(out.splitlines())
    expected = subprocess.run(
        [sys.executable, "-c", "import sys\nfor p in sys.argv[1:]: print(hash(open(p,'rb').read()), end=' ')",
         *[str(server.place(f"shared-{room}", str(number))) for number in range(6)]],
        env=env, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.split()  # fmt: skip
    for hashes, _ in outputs:
        assert hashes.split() == 3 * expected
    misses = sum(int(count) for _, count in outputs)
    if room == 100:
        assert misses == 6
    assert sum(copy.stat().st_size for copy in copies(tmp_path)) <= room * SIZE
    assert not list(tmp_path.glob("*.part"))


def test_threads_share_them_too(server: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    uris = put(server, "threads", 4)
    cache = FileCache(CacheOptions(str(tmp_path), max_bytes=3 * SIZE))
    start = threading.Barrier(8)

    def work(number: int) -> bool:
        start.wait(30)
        order = uris[number % 4 :] + uris[: number % 4]
        return all(read(cache, uri) == content(server, uri) for uri in order * 3)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert sum(copy.stat().st_size for copy in copies(tmp_path)) <= 3 * SIZE


def test_local_files_are_opened_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(b"here")
    cache = FileCache(CacheOptions(str(tmp_path / "cache")))
    assert read(cache, str(tmp_path / "local")) == b"here"
    assert cache.counts() == {}
    assert not (tmp_path / "cache").exists()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="local folder"):
        CacheOptions("s3://bucket/cache")
    with pytest.raises(ValueError, match="max_bytes=0"):
        CacheOptions("/tmp/x", max_bytes=0)


def test_the_reader_reads_through_it(server: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    """Two epochs of the same rows: the second asks the server for no byte of them."""
    spec = FeatureSpec(
        features=(Feature(name="id", kind=FeatureKind.CATEGORICAL, raw_type="int64"),),
        labels=(Label(name="label"),),
    )
    ids = np.arange(3000)
    server.place("rows").mkdir()
    pq.write_table(
        pa.table({"id": ids, "label": ids % 2}), server.place("rows", "a.parquet"), row_group_size=500
    )
    ranges = ParquetDataset.scan(f"s3://{BUCKET}/rows").chunked(200).ranges
    cache = FileCache(CacheOptions(str(tmp_path)))
    for epoch in range(2):
        reader = BatchReader(spec, ReaderOptions(64, shuffle_seed=1, epoch=epoch), cache)
        seen = [i for batch, _ in reader.batches(iter(ranges)) for i in batch.features["id"].tolist()]
        assert sorted(seen) == ids.tolist()
        if epoch == 0:
            fetched = sum(request.method == "GET" for request in proxy.requests)
    assert fetched == sum(request.method == "GET" for request in proxy.requests)
    assert cache.counts()["misses"] == 1


def test_the_next_row_group_is_fetched_while_this_one_is_used(server: S3Server, proxy: FaultyProxy) -> None:
    spec = FeatureSpec(features=(Feature(name="id", kind=FeatureKind.CATEGORICAL, raw_type="int64"),))
    server.place("ahead").mkdir()
    for number in range(2):
        pq.write_table(pa.table({"id": np.arange(100)}), server.place("ahead", f"{number}.parquet"))
    ranges = ParquetDataset.scan(f"s3://{BUCKET}/ahead").ranges
    asked = threading.Event()

    def rule(request: Request) -> Fault:
        if "ahead/1.parquet" in request.path and request.method == "GET":
            asked.set()
        return "pass"

    proxy.rule = rule
    steps = BatchReader(spec, ReaderOptions(10, labels=False)).batches(iter(ranges))
    batch, _ = next(steps)
    assert batch.features["id"].tolist() == list(range(10))
    assert asked.wait(60), "nobody asked for the second file while batches of the first were left"
    assert sum(batch.size for batch, _ in steps) == 190
