"""SnapshotStore gives what the live store gives, shared by processes, and notices damage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeprec_spark import checkpoint
from deeprec_spark.checkpoint import snapshot_files
from deeprec_spark.checkpoint.locking import file_lock
from deeprec_spark.embedding.hashing import bucket
from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.store import PullRequest, PushRequest, TableSpec
from tests import checkpoints
from tests.checkpoints import EDGES, LIMITS, seen

PLAIN, FILTERED = "a/b c", "filtered"


def opened(written: checkpoints.Written, tmp_path: Path) -> checkpoint.SnapshotStore:
    """The snapshot of a checkpoint, its files below tmp_path."""
    return checkpoint.SnapshotStore(written.directory, str(tmp_path / "cache"))


def test_rows_are_those_of_the_store(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path, rows=5000)
    snapshot = opened(written, tmp_path)
    keys = np.concatenate([written.store.table(PLAIN).keys()[0], EDGES])
    np.random.default_rng(0).shuffle(keys)
    np.testing.assert_array_equal(snapshot.lookup(PLAIN, keys), written.store.table(PLAIN).lookup(keys))
    # With a filter the live store has the same rule for ids without permission.
    np.testing.assert_array_equal(snapshot.lookup(FILTERED, keys), written.store.table(FILTERED).lookup(keys))
    assert (snapshot.lookup(FILTERED, keys) == 0.25).all(axis=1).sum() > 2000
    reply = snapshot.pull(PullRequest({}, train=False))
    np.testing.assert_array_equal(reply.dense, checkpoints.DENSE)
    np.testing.assert_array_equal(reply.state, checkpoints.STATE)
    assert reply.step == 10
    assert snapshot.statistics()[PLAIN]["rows"] == len(written.store.table(PLAIN))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.lists(st.integers(LIMITS.min, LIMITS.max) | st.sampled_from(EDGES.tolist()), max_size=30))
def test_any_key_may_be_asked_for(snapshot: checkpoint.SnapshotStore, keys: list[int]) -> None:
    rows = snapshot.tables[PLAIN].rows
    known = {int(key): value for key, value in zip(rows.keys, rows.values, strict=True)}
    expected = [known.get(key, np.zeros(3)) for key in keys]
    found = snapshot.lookup(PLAIN, np.array(keys, np.int64))
    np.testing.assert_array_equal(found, np.array(expected, np.float32).reshape(-1, 3))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> checkpoint.SnapshotStore:
    """A snapshot of 50 rows and the edges of int64."""
    folder = tmp_path_factory.mktemp("snapshot")
    return opened(checkpoints.write(folder, rows=50), folder)


def test_a_checkpoint_of_several_servers_reads_as_one(tmp_path: Path) -> None:
    one = opened(checkpoints.write(tmp_path / "one", rows=300), tmp_path)
    three = opened(checkpoints.write(tmp_path / "three", rows=300, num_shards=3), tmp_path)
    for table in (PLAIN,):
        np.testing.assert_array_equal(one.tables[table].rows.keys, three.tables[table].rows.keys)
        np.testing.assert_array_equal(one.tables[table].rows.values, three.tables[table].rows.values)
    np.testing.assert_array_equal(three.dense, checkpoints.DENSE)
    np.testing.assert_array_equal(three.state, checkpoints.STATE)
    assert len(set(bucket(three.tables[PLAIN].rows.keys) * 3 // 1024)) == 3


def test_an_empty_table_reads_its_default(tmp_path: Path) -> None:
    from deeprec_spark.embedding.local_store import LocalStore

    store = LocalStore()
    store.create_tables(checkpoints.table_specs())
    directory = checkpoint.directory_of(str(tmp_path), 0)
    manifest = checkpoint.Manifest(
        step=0,
        epoch=0,
        tables=tuple(checkpoint.TableRecord.of(spec) for spec in checkpoints.table_specs()),
        files=tuple(checkpoint.FileRecord.of(file) for file in store.save(directory)),
        model=checkpoint.ModelRecord(name="empty", weights=()),
    )
    checkpoint.commit(directory, manifest)
    snapshot = checkpoint.SnapshotStore(str(tmp_path), str(tmp_path / "cache"))
    assert snapshot.lookup(FILTERED, np.array([3, 3], np.int64)).tolist() == [[0.25, 0.25]] * 2
    assert snapshot.dense.shape == (0,)


def test_it_is_read_only_and_knows_its_model(snapshot: checkpoint.SnapshotStore) -> None:
    snapshot.create_tables(checkpoints.table_specs())
    snapshot.init_dense(np.zeros(7, np.float32), np.zeros(2, np.float32), SGD())
    with pytest.raises(checkpoint.CheckpointMismatchError, match="'other' is in the model only"):
        snapshot.create_tables([TableSpec("other", 3)])
    with pytest.raises(
        checkpoint.CheckpointMismatchError, match=r"8 dense parameters and 2 of state.*7 and 2"
    ):
        snapshot.init_dense(np.zeros(8, np.float32), np.zeros(2, np.float32), SGD())
    with pytest.raises(checkpoint.CheckpointMismatchError, match="table='other'"):
        snapshot.lookup("other", EDGES)
    for refused in (
        lambda: snapshot.pull(PullRequest({PLAIN: seen(EDGES)})),
        lambda: snapshot.push(PushRequest({}, None, None, 0)),
        snapshot.evict,
        lambda: snapshot.save("x"),
        lambda: snapshot.restore("x"),
    ):
        with pytest.raises(ValueError, match="read-only"):
            refused()


def test_damage_is_found_before_anything_is_served(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path)
    record = next(file for file in written.manifest.files if file.table == PLAIN)
    file = Path(written.directory, record.path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for _ in range(2):
        with pytest.raises(checkpoint.CheckpointCorruptError, match="xxh3-128"):
            opened(written, tmp_path)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_processes_share_one_copy(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path, rows=20_000)
    code = (
        "import sys, numpy as np; from deeprec_spark import checkpoint\n"
        "store = checkpoint.SnapshotStore(sys.argv[1], sys.argv[2])\n"
        "print(float(store.tables['a/b c'].rows.values.sum()), 'tensorflow' in sys.modules)"
    )
    command = [sys.executable, "-c", code, written.directory, str(tmp_path / "cache")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {child.communicate(timeout=120)[0] for child in children}
    assert len(outputs) == 1
    assert outputs.pop().endswith("False\n")  # a snapshot needs no TensorFlow
    folders = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    [folder] = folders
    assert folder.name.startswith(written.manifest.fingerprint)
    with (
        file_lock(tmp_path / "cache" / f"{folder.name}.lock", 5),
        pytest.raises(TimeoutError),
    ):
        checkpoint.SnapshotStore(written.directory, str(tmp_path / "cache"), lock_timeout=0.05)


def test_old_snapshots_and_ruins_are_deleted_while_mapped_ones_still_read(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = opened(checkpoints.write(tmp_path, step=1), tmp_path)
    expected = np.array(first.tables[PLAIN].rows.values)
    (cache / "0123.4567.building").mkdir()
    for step in range(2, 3 + snapshot_files.KEPT_SNAPSHOTS):
        opened(checkpoints.write(tmp_path, step=step), tmp_path)
    folders = sorted(path.name for path in cache.iterdir() if path.is_dir())
    assert len(folders) == snapshot_files.KEPT_SNAPSHOTS
    assert not any(name.startswith(first.manifest.fingerprint) for name in folders)
    np.testing.assert_array_equal(first.tables[PLAIN].rows.values, expected)


def test_a_full_disk_is_an_error_and_leaves_no_ruins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = checkpoints.write(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        opened(written, tmp_path)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
