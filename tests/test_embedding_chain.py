"""Full and incremental saves of LocalStores: on any number of shards, with evictions, filters and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deeprec_spark.embedding.dense import dense_range
from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import Adagrad, Adam
from deeprec_spark.embedding.options import (
    CBFFilter,
    CounterFilter,
    DynamicDimensionOption,
    EmbeddingVariableOption,
    GlobalStepEvict,
)
from deeprec_spark.embedding.storage import StorageOption, StorageType
from deeprec_spark.embedding.store import (
    PullRequest,
    PushRequest,
    SaveBaseError,
    SparseGradient,
    TableSpec,
    UniqueKeys,
)

LIMITS = np.iinfo(np.int64)
EDGES = np.array([0, -1, LIMITS.min, LIMITS.max], np.int64)
DENSE = np.linspace(-1, 1, 11).astype(np.float32)
STATE = np.arange(5, dtype=np.float32)
SERVERS = (1, 2, 3, 8)


def specs(folder: Path | None = None) -> list[TableSpec]:
    """A plain table, evicting and counting ones, one that grows, one whose rows spill to disk."""
    option = EmbeddingVariableOption
    spill = option()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        spill = option(
            storage_option=StorageOption(
                StorageType.DRAM_SSDHASH, storage_path=str(folder), storage_size=(1 << 14, 1 << 24)
            )
        )
    return [
        TableSpec("plain", 4, optimizer=Adam(0.1), seed=1),
        TableSpec("counted", 3, option(CounterFilter(2), GlobalStepEvict(2)), Adagrad(0.1)),
        TableSpec("bloom", 2, option(CBFFilter(3, max_element_size=4096)), Adagrad(0.1)),
        TableSpec("grows", 8, option(dynamic_dimension=DynamicDimensionOption(2, thresholds=(3,))), Adam()),
        TableSpec("spills", 16, spill, Adagrad(0.1)),
    ]


@dataclass
class Cluster:
    """So many LocalStores that train, save and restore together."""

    shards: int
    folder: Path | None = None
    stores: list[LocalStore] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        for shard in range(self.shards):
            store = LocalStore(shard, self.shards)
            store.create_tables(specs(None if self.folder is None else self.folder / str(shard)))
            store.init_dense(DENSE, STATE, Adam(0.01))
            self.stores.append(store)

    def train(self, steps: int, keys: int = 400, span: int = 1500) -> None:
        """Steps whose data depend on their number alone."""
        for _ in range(steps):
            rng = np.random.default_rng(self.steps)
            self.steps += 1
            dense, state = rng.normal(size=len(DENSE)), rng.normal(size=len(STATE)).astype(np.float32)
            wanted = np.unique(np.concatenate([EDGES, rng.integers(-span, span, keys)]))
            counts = rng.integers(1, 3, len(wanted))
            seed = int(rng.integers(1 << 30))
            for store in self.stores:
                mine = bucket(wanted).astype(np.int64) * self.shards // NUM_BUCKETS == store.shard_index
                unique = UniqueKeys(wanted[mine], counts[mine])
                store.pull(PullRequest({spec.name: unique for spec in specs()}))
                gradients = {}
                for spec in specs():
                    values = np.random.default_rng(seed).normal(size=(len(wanted), spec.embedding_dim))
                    gradients[spec.name] = SparseGradient(unique.keys, values[mine].astype(np.float32))
                start, stop = dense_range(len(DENSE), store.shard_index, self.shards)
                first, last = dense_range(len(STATE), store.shard_index, self.shards)
                store.push(
                    PushRequest(gradients, dense[start:stop].astype(np.float32), state[first:last], samples=1)
                )

    def erase(self, table: str, keys: Sequence[int]) -> None:
        """Take rows out of a table, wherever they are."""
        for store in self.stores:
            store.table(table).erase(np.array(keys))

    def save(self, directory: Path, save_id: str, base: str | None = None) -> Path:
        """One checkpoint of all shards."""
        for store in self.stores:
            store.snapshot(save_id, base)
        for store in self.stores:
            store.write_snapshot(save_id, str(directory))
        return directory

    def restore(self, chain: Sequence[Path], save_id: str | None = None) -> None:
        for store in self.stores:
            store.restore([str(directory) for directory in chain], save_id)

    def content(self) -> dict[str, dict[int, tuple[Any, ...]]]:
        """Every row with all that belongs to it and every count, by table and key; Bloom counters and clocks."""
        found: dict[str, dict[int, tuple[Any, ...]]] = {}
        for spec in specs():
            rows: dict[int, tuple[Any, ...]] = found.setdefault(spec.name, {})
            counters = np.zeros(0, np.uint8)
            for store in self.stores:
                table = store.table(spec.name)
                for block in table.export():
                    columns = [block.frequency, block.version]
                    columns += [] if block.blocks is None else [block.blocks]
                    numbers = np.stack(columns, 1).tolist()
                    floats = np.concatenate([block.value, *block.slots.values()], 1)
                    for key, row, values in zip(block.key.tolist(), numbers, floats, strict=True):
                        assert key not in rows
                        rows[key] = (*row, values.tobytes())
                _, keys, counts = table.keys()
                rows.update({k: (c,) for k, c in zip(keys.tolist(), counts.tolist(), strict=True)})
                if spec.name == "bloom":
                    part = table.core.export_bloom(0, NUM_BUCKETS)
                    counters = part.copy() if not len(counters) else counters + part
            found[f"{spec.name} counters"] = {0: (counters.tobytes(),)}
            clocks = {(store.table(spec.name).core.updates, store.step) for store in self.stores}
            assert len(clocks) == 1
            found[f"{spec.name} clock"] = {0: clocks.pop()}
        replies = [store.pull(PullRequest({})) for store in self.stores]
        dense = [reply.dense for reply in replies if reply.dense is not None]
        state = [reply.state for reply in replies if reply.state is not None]
        found["dense"] = {0: (np.concatenate(dense).tobytes(), np.concatenate(state).tobytes())}
        return found


@pytest.mark.parametrize("writers", SERVERS)
def test_full_and_deltas_restore_on_any_number_of_servers(tmp_path: Path, writers: int) -> None:
    """Rows, slots, counts, Bloom counters, sizes, clocks and dense state, 1, 2, 3, 8 servers to each other."""
    before = Cluster(writers, tmp_path / "tiers")
    before.train(4)
    chain = [before.save(tmp_path / "full", "full")]
    before.train(2, keys=60)
    before.erase("plain", [0, -1, *range(100, 160)])
    chain.append(before.save(tmp_path / "first", "first", base="full"))
    before.train(2, keys=60)
    before.erase("plain", [LIMITS.max])
    before.train(1, keys=5)
    chain.append(before.save(tmp_path / "second", "second", base="first"))
    content = before.content()
    assert len(content["spills"]) > 500  # more than the 16 KiB in front of its log hold
    assert LIMITS.max in content["plain"]  # came back
    for readers in SERVERS:
        after = Cluster(readers, tmp_path / f"tiers-{readers}")
        after.steps = 50
        after.train(1)  # what was there is replaced
        after.restore(chain, "second")
        assert after.content() == content
        # It goes on as if nothing had happened, and so do incremental saves.
        other, again = Cluster(1), Cluster(3)
        other.restore(chain, "second")
        for cluster in (after, other):
            cluster.steps = before.steps
            cluster.train(2, keys=30)
        third = after.save(tmp_path / f"third-{readers}", "third", base="second")
        assert sum(path.stat().st_size for path in third.rglob("part-*")) > 0
        other.save(tmp_path / f"other-{readers}", "other")  # a save evicts first
        again.restore([*chain, third])
        assert again.content() == other.content() == after.content()


def test_a_delta_holds_what_changed_and_no_more(tmp_path: Path) -> None:
    cluster = Cluster(1)
    cluster.train(4)
    cluster.save(tmp_path / "full", "full")
    store = cluster.stores[0]
    keys = np.array([5, 6, 7])
    store.pull(PullRequest({"plain": UniqueKeys(keys, np.ones(3, np.int64))}))
    store.table("plain").erase([1, 2])
    store.snapshot("delta", "full")
    # What training changes now belongs to the next one.
    store.pull(PullRequest({"plain": UniqueKeys(np.array([8, 1]), np.ones(2, np.int64))}))
    files = store.write_snapshot("delta", str(tmp_path / "delta"))
    rows = {file.path.split("/")[1]: file.rows for file in files if "/part-" in file.path and file.table}
    assert rows == {"plain": 3, "counted": 0, "bloom": 0, "grows": 0, "spills": 0}
    assert [file.rows for file in files if "tombstones" in file.path] == [2]
    files = []
    store.snapshot("next", "delta")
    files = store.write_snapshot("next", str(tmp_path / "next"))
    assert [file.rows for file in files if file.table == "plain"] == [2]
    nothing = Cluster(1)
    nothing.restore([tmp_path / "full", tmp_path / "delta"])
    assert not nothing.stores[0].table("plain").contains([1, 2]).any()
    nothing.restore([tmp_path / "full", tmp_path / "delta", tmp_path / "next"])
    assert nothing.stores[0].table("plain").contains([1, 2]).tolist() == [True, False]
    assert nothing.content() == cluster.content()


def test_a_delta_needs_the_last_snapshot(tmp_path: Path) -> None:
    cluster = Cluster(1)
    cluster.train(1)
    [store] = cluster.stores
    with pytest.raises(SaveBaseError, match="base='full', last snapshot written or restored=None"):
        store.snapshot("delta", "full")
    cluster.save(tmp_path / "full", "full")
    with pytest.raises(SaveBaseError, match="base='other'"):
        store.snapshot("delta", "other")
    store.snapshot("dropped", "full")
    with pytest.raises(ValueError, match="save_id='dropped'"):
        store.snapshot("dropped")
    store.drop_snapshot("dropped")
    store.drop_snapshot("dropped")
    with pytest.raises(ValueError, match="no such snapshot"):
        store.write_snapshot("dropped", str(tmp_path / "dropped"))
    # Nobody knows whether it was committed, so the next one is full.
    with pytest.raises(SaveBaseError, match="full one"):
        store.snapshot("delta", "full")
    # A write that fails leaves no base either, and loses no change.
    (tmp_path / "file").write_text("in the way")
    store.snapshot("failing")
    with pytest.raises(OSError, match="file"):
        store.write_snapshot("failing", str(tmp_path / "file" / "x"))
    with pytest.raises(SaveBaseError):
        store.snapshot("delta", "failing")
    cluster.save(tmp_path / "again", "again")
    cluster.train(1)
    cluster.save(tmp_path / "delta", "delta", "again")
    after = Cluster(1)
    after.restore([tmp_path / "again", tmp_path / "delta"])
    assert after.content() == cluster.content()


def test_links_of_a_chain_are_checked(tmp_path: Path) -> None:
    cluster = Cluster(2)
    cluster.train(1)
    full = cluster.save(tmp_path / "full", "full")
    first = cluster.save(tmp_path / "first", "first", "full")
    second = cluster.save(tmp_path / "second", "second", "first")
    after = Cluster(1)
    with pytest.raises(ValueError, match=r"starts with a full checkpoint.*first"):
        after.restore([first])
    with pytest.raises(ValueError, match=r"needs 'first'.*second after .*full \('full'\)"):
        after.restore([full, second])
    with pytest.raises(ValueError, match="chain=\\[\\]"):
        after.restore([])
    after.restore([full, first, second], "other")
    with pytest.raises(SaveBaseError):  # what the files call themselves counts
        after.stores[0].snapshot("delta", "other")
    (second / "store-00001.json").unlink()
    with pytest.raises(ValueError, match=r"needs 2 store-\*\.json files\. Received: 1 in .*second"):
        after.restore([full, first, second])


def test_other_options_after_a_restore_make_the_next_save_a_full_one(tmp_path: Path) -> None:
    cluster = Cluster(1)
    cluster.train(1)
    full = cluster.save(tmp_path / "full", "full")
    store = LocalStore()
    changed = [
        TableSpec("counted", 3, EmbeddingVariableOption(CounterFilter(4)), Adagrad(0.1))
        if spec.name == "counted"
        else spec
        for spec in specs()
    ]
    store.create_tables(changed)
    store.init_dense(DENSE, STATE, Adam(0.01))
    store.restore([str(full)], "full")
    with pytest.raises(SaveBaseError):
        store.snapshot("delta", "full")
