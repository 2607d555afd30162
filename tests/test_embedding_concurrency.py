"""Many threads on one table: no update is lost, no row is torn. `make sanitize` says the same of the C++ core."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.options import (
    Constant,
    EmbeddingVariableOption,
    GlobalStepEvict,
    InitializerOption,
    StorageOption,
    StorageType,
)
from deeprec_spark.embedding.snapshot import RowBlock
from deeprec_spark.embedding.variable import EmbeddingVariable

DIM, HOT = 8, 500
ROUNDS = 60


def _run(*works: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


@pytest.mark.parametrize("kind", [StorageType.DRAM, StorageType.DRAM_PMEM_SSDHASH])
def test_no_update_is_lost_beside_lookups_evictions_and_snapshots(kind: StorageType, tmp_path: Path) -> None:
    """DeepRec #808, FBGEMM #5807: evictions raced with updates."""
    tiered = kind is not StorageType.DRAM
    storage = StorageOption(
        kind, str(tmp_path) if tiered else None, (64 * 3 * 120, 8 << 20) if tiered else ()
    )
    option = EmbeddingVariableOption(
        evict_option=GlobalStepEvict(50),
        storage_option=storage,
        init_option=InitializerOption(Constant(0.0)),
    )
    table = EmbeddingVariable("t", DIM, option=option, optimizer=SGD(1.0))
    sums = np.zeros((3, HOT))
    lock = threading.Lock()
    step_now = 0
    done = threading.Event()

    def worker(number: int) -> None:
        nonlocal step_now
        rng = np.random.default_rng(number)
        for _ in range(ROUNDS):
            hot = rng.integers(0, HOT, 2000)
            cold = rng.integers(10_000, 40_000, 500)
            gradient = rng.integers(-3, 4, 2500).astype(np.float32)
            keys = np.concatenate([hot, cold])
            rows = table.lookup(keys, train=True)
            assert (rows == rows[:, :1]).all()
            with lock:
                step_now += 1
                step = step_now
            table.apply_gradients(keys, np.repeat(gradient[:, None], DIM, 1), step=step)
            np.add.at(sums[number], hot, gradient[:2000])

    def others() -> None:
        while not done.is_set():
            with lock:
                step = step_now
            # Every step touches nearly all hot keys, so none gets 50 steps old.
            assert (table.evict(step) >= HOT).all()
            for block in table.export(1000):
                assert (block.value == block.value[:, :1]).all()
            table.stats()

    def workers() -> None:
        try:
            _run(*(lambda number=number: worker(number) for number in range(3)))
        finally:
            done.set()

    _run(workers, others)
    np.testing.assert_array_equal(table.lookup(np.arange(HOT))[:, 0], -sums.sum(0))


@pytest.mark.parametrize("kind", [StorageType.DRAM, StorageType.DRAM_PMEM_SSDHASH])
def test_a_snapshot_has_no_half_of_an_update_and_deltas_in_order_are_the_table(
    kind: StorageType, tmp_path: Path
) -> None:
    """DeepRec #1023, Paddle #32958: weights and slots saved apart.

    With a momentum of a half and gradients of 1, a row has the slot 2^(1 - u) - 2 and the value 2 - 2^(1 - u) - 2u
    after u updates (exact up to 19), its version is u, and its frequency u, or u + 1 between lookup and update.
    """
    tiered = kind is not StorageType.DRAM
    storage = StorageOption(
        kind, str(tmp_path) if tiered else None, (64 * 90 * 10, 8 << 20) if tiered else ()
    )
    option = EmbeddingVariableOption(storage_option=storage, init_option=InitializerOption(Constant(0.0)))
    optimizer = SGD(1.0, momentum=0.5)
    table = EmbeddingVariable("t", DIM, option=option, optimizer=optimizer)
    copy = EmbeddingVariable("t", DIM, optimizer=optimizer)
    done = threading.Event()

    def worker(number: int) -> None:
        keys = np.arange(number, 3000, 3)
        gradients = np.ones((len(keys), DIM), np.float32)
        for turn in range(200):
            if turn and turn % 16 == 0:
                assert table.erase(keys) == len(keys)
            table.lookup(keys, train=True)
            table.apply_gradients(keys, gradients, step=turn % 16 + 1)

    def check(block: RowBlock) -> None:
        updates = np.maximum(block.version, 0)
        momentum = 2.0 ** (1 - updates[:, None]) - 2
        assert (block.slots["momentum"] == momentum).all()
        assert (block.value == -momentum - 2 * updates[:, None]).all()
        assert ((block.frequency == updates) | (block.frequency == updates + 1)).all()

    def take(changed_only: bool) -> None:
        with table.snapshot(changed_only) as snapshot:
            if not changed_only:
                copy.clear()
            copy.erase(snapshot.tombstones)
            for block in snapshot.blocks(500):
                check(block)
                copy.import_rows(block)
            list(snapshot.filtered())

    def saves() -> None:
        take(False)
        turn = 0
        while not done.is_set() or turn < 10:
            turn += 1
            take(changed_only=turn % 7 != 0)
            with table.snapshot(True) as given_up:
                for block in itertools.islice(given_up.blocks(300), 2 if given_up.num_rows > 600 else 0):
                    check(block)

    def workers() -> None:
        try:
            _run(*(lambda number=number: worker(number) for number in range(3)))
        finally:
            done.set()

    _run(workers, saves)
    take(True)
    for ours, theirs in zip(copy.export(), table.export(), strict=True):
        for name in ("key", "frequency", "version", "value"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


_FORKED = """
import os, numpy as np
from deeprec_spark.embedding.variable import EmbeddingVariable
table = EmbeddingVariable("t", 4)
keys = np.arange(100_000)
before = table.lookup(keys, train=True)
child = os.fork()
if child == 0:
    same = (table.lookup(keys) == before).all()
    os._exit(0 if same else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKED], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "0", done.stderr


_EXIT = """
import threading
import numpy as np
from deeprec_spark.embedding.variable import EmbeddingVariable
table = EmbeddingVariable("t", 16)
keys = np.arange(100_000)
table.lookup(keys, train=True)
ready = threading.Barrier(5)
def work():
    ready.wait()
    while True:
        table.lookup(keys, train=True)
        table.evict(1)
        table.contains(keys)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
ready.wait()
print("end")
"""


def test_a_process_ends_in_peace_while_daemon_threads_are_in_the_engine() -> None:
    """CPython ends such threads by unwinding their stacks, and the process aborted."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", _EXIT], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
