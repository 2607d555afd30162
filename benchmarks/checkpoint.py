"""Saving and restoring beside plain sequential writing and reading on the same disk, in turns.

    python -m benchmarks.checkpoint

One store in this process holds two tables with Adagrad. Each round writes and reads as many bytes as its checkpoint
has, flushed to the disk and (for reading) dropped from the page cache first; saves a full checkpoint; changes 1 % of
the rows and saves an incremental one; saves while two threads go on training; and restores. Before that, jobs with real
nodes save while they train (`benchmarks.checkpoint_nodes`). The last line printed is `RESULT {json}`; a table and a
plot go to docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.checkpoint_nodes import MODES, SHAPES, NodesSettings, measure
from benchmarks.peer_process import ROOT, bar_chart
from deeprec_spark import checkpoint
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import Adagrad, Adam
from deeprec_spark.embedding.store import (
    CheckpointFile,
    PullRequest,
    PushRequest,
    SparseGradient,
    TableSpec,
    UniqueKeys,
)

TABLES = ("user", "item")
DENSE = 1_000_000
BLOCK = 8 << 20
BATCH = 2048
TRAINERS = 2

Measures = dict[str, list[float]]


def new_store(dim: int) -> LocalStore:
    """An empty store."""
    store = LocalStore()
    store.create_tables([TableSpec(name, dim, optimizer=Adagrad()) for name in TABLES])
    store.init_dense(np.zeros(DENSE, np.float32), np.zeros(0, np.float32), Adam())
    return store


def train(store: LocalStore, keys: np.ndarray[Any, np.dtype[np.int64]], dim: int) -> None:
    """One step on these distinct keys of each table."""
    unique = UniqueKeys(keys, np.ones(len(keys), np.int64))
    store.pull(PullRequest(dict.fromkeys(TABLES, unique), dense=False))
    gradient = np.ones((len(keys), dim), np.float32)
    store.push(
        PushRequest({name: SparseGradient(keys, gradient) for name in TABLES}, None, None, samples=BATCH)
    )


def fill(store: LocalStore, rows: int, dim: int) -> None:
    """Rows of keys 0 to `rows` in each table, all of them updated once."""
    for start in range(0, rows, 100_000):
        train(store, np.arange(start, min(start + 100_000, rows)), dim)


def save(store: LocalStore, model_dir: Path, step: int, base: str | None = None) -> tuple[str, float, float]:
    """Commit a checkpoint: its directory, the seconds of the snapshot and of all that came after it."""
    save_id = uuid.uuid4().hex
    begun = time.perf_counter()
    store.snapshot(save_id, None if base is None else checkpoint.read_manifest(base).save_id)
    fixed = time.perf_counter()

    def writer(directory: str) -> list[CheckpointFile]:
        return store.write_snapshot(save_id, directory)

    directory = checkpoint.save_checkpoint(
        writer,
        str(model_dir),
        model=checkpoint.ModelRecord(name="benchmark", weights=()),
        tables=list(store.specs.values()),
        step=step,
        base=base,
        save_id=save_id,
    )
    return directory, fixed - begun, time.perf_counter() - fixed


def size_of(directory: str) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


def plain_write(path: Path, size: int) -> float:
    """Seconds to write so many bytes into one file, in order, and flush it."""
    block = np.random.default_rng(0).bytes(BLOCK)
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, BLOCK):
            file.write(memoryview(block)[: min(BLOCK, size - start)])
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def plain_read(path: Path) -> float:
    """Seconds to read a file in order from the disk."""
    forget(path)
    buffer = bytearray(BLOCK)
    begun = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begun


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def seconds_of(work: Callable[[], Any]) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@contextmanager
def training(store: LocalStore, rows: int, dim: int) -> Iterator[list[int]]:
    """Threads that go on training on random rows inside the block; how many steps each has taken."""
    done = threading.Event()
    steps = [0] * TRAINERS
    errors: list[BaseException] = []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        try:
            while not done.is_set():
                train(store, np.unique(random.integers(0, rows, BATCH)), dim)
                steps[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(TRAINERS)]
    for thread in threads:
        thread.start()
    try:
        yield steps
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    if errors:
        raise errors[0]


def one_round(
    store: LocalStore, folder: Path, number: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """All measures once."""
    rows, dim = arguments.rows, arguments.dim
    model_dir = folder / "model"
    random = np.random.default_rng(100 + number)
    found: dict[str, float] = {}
    full, _, found["full_seconds"] = save(store, model_dir, 10 * number)
    size = size_of(full)
    found["full_bytes"] = size
    write_before = plain_write(folder / "plain", size)

    changed = random.choice(rows, rows // 100, replace=False).astype(np.int64)
    train(store, np.sort(changed), dim)
    delta, _, found["incremental_seconds"] = save(store, model_dir, 10 * number + 1, full)
    found["incremental_bytes"] = size_of(delta)
    full, _, seconds = save(store, model_dir, 10 * number + 2)
    found["full_seconds"] = (found["full_seconds"] + seconds) / 2
    found["write_seconds"] = (write_before + plain_write(folder / "plain", size)) / 2
    found["read_seconds"] = plain_read(folder / "plain")

    for path in Path(full).rglob("*.parquet"):
        forget(path)
    other = new_store(dim)
    found["restore_seconds"] = seconds_of(lambda: other.restore(checkpoint.chain(full, verify=False)))
    other.close()

    with training(store, rows, dim) as steps:
        before = sum(steps)
        delta, found["pause_incremental"], found["busy_incremental_seconds"] = save(
            store, model_dir, 10 * number + 3, full
        )
        _, found["pause_full"], found["busy_full_seconds"] = save(store, model_dir, 10 * number + 4)
        found["steps_meanwhile"] = sum(steps) - before
    shutil.rmtree(model_dir)
    return found


def pauses_of_jobs(store: LocalStore, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """How long saves hold the workers of jobs that begin with the store's tables."""
    tables, _, _ = save(store, folder / "tables", 0)
    shapes = [tuple(int(part) for part in shape.split("+")) for shape in arguments.nodes]
    found = measure(
        NodesSettings(
            tables,
            TABLES,
            arguments.rows,
            arguments.dim,
            str(folder),
            shapes=tuple((servers, workers) for servers, workers in shapes),
            modes=tuple(arguments.modes),
            saves=arguments.node_saves,
        )
    )
    shutil.rmtree(folder / "tables")
    return found


def report(measures: Measures, nodes: Mapping[str, float], arguments: argparse.Namespace) -> dict[str, Any]:
    """Print and write the table; the content of the result line."""
    median = {name: statistics.median(values) for name, values in measures.items()}
    size = median["full_bytes"] / 1e6
    speeds = {
        "plain sequential write": size / median["write_seconds"],
        "full save": size / median["full_seconds"],
        "plain sequential read": size / median["read_seconds"],
        "restore": size / median["restore_seconds"],
    }

    def ratio(one: str, other: str) -> float:
        pairs = zip(measures[one], measures[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 4)

    result = {
        "benchmark": "checkpoint",
        "incremental_bytes_ratio": ratio("incremental_bytes", "full_bytes"),
        "incremental_time_ratio": ratio("incremental_seconds", "full_seconds"),
        "pause_ratio": ratio("pause_full", "busy_full_seconds"),
        "pause_ms": round(median["pause_full"] * 1e3, 1),
        "save_MBps": round(speeds["full save"], 1),
        "save_MBps_vs_disk": ratio("write_seconds", "full_seconds"),
        "restore_MBps": round(speeds["restore"], 1),
        "restore_MBps_vs_disk": ratio("read_seconds", "restore_seconds"),
        "steps_while_saving": median["steps_meanwhile"],
        **nodes,
        "rows": arguments.rows * len(TABLES),
        "dim": arguments.dim,
        "MB": round(size, 1),
        "cores": os.cpu_count(),
        "load": arguments.load,
        "versions": {"python": platform.python_version(), "pyarrow": pa.__version__, "numpy": np.__version__},
    }
    lines = ["| what | MB | seconds | MB/s |", "|---|---|---|---|"]
    for name, part in (
        ("plain sequential write", "write_seconds"),
        ("full save", "full_seconds"),
        ("full save while training", "busy_full_seconds"),
        ("plain sequential read", "read_seconds"),
        ("restore", "restore_seconds"),
    ):
        lines.append(f"| {name} | {size:.0f} | {median[part]:.2f} | {size / median[part]:.0f} |")
    small = median["incremental_bytes"] / 1e6
    lines.append(
        f"| incremental save, 1 % of the rows changed | {small:.1f} | {median['incremental_seconds']:.2f} | "
        f"{small / median['incremental_seconds']:.0f} |"
    )
    lines += ["", "| ratio | |", "|---|---|"]
    lines += [
        f"| {name} | {result[name]} |"
        for name in (
            "incremental_bytes_ratio",
            "incremental_time_ratio",
            "pause_ratio",
            "save_MBps_vs_disk",
            "restore_MBps_vs_disk",
            *(name for name in nodes if name.startswith("pause_ratio")),
        )
    ]
    table = "\n".join(lines)
    print(table)
    if not arguments.no_docs:
        write_docs(table, speeds, result, arguments)
    return result


def write_docs(
    table: str, speeds: Mapping[str, float], result: Mapping[str, Any], arguments: argparse.Namespace
) -> None:
    """docs/benchmarks/checkpoint.md and its plot."""
    folder = ROOT / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    page = (
        f"# Checkpoints\n\n`python -m benchmarks.checkpoint` on {os.cpu_count()} cores: {len(TABLES)} tables of "
        f"{arguments.rows:,} rows, {arguments.dim} floats and as many of Adagrad's, {DENSE:,} dense weights with Adam; "
        f"medians of {arguments.rounds} rounds on one disk; the load average was {arguments.load} before "
        f"they began, and saves need the cores more than plain writes do. Everything is flushed to the disk, and read "
        f"from it. The pause is how long training stands still for a full save, {result['pause_ms']} ms, against the "
        f"time of writing while {TRAINERS} threads go on training. pause_ratio_2_2_sync is that of a job with two "
        f"servers and two workers in sync mode, without an ending it is of async mode: medians of "
        f"{arguments.node_saves} full saves while it trains. {versions}.\n\n![](checkpoint.svg)\n\n{table}\n"
    )
    (folder / "checkpoint.md").write_text(page)
    chart = bar_chart(
        speeds, f"A checkpoint of {result['MB']:.0f} MB", unit="MB/s", ours=["full save", "restore"]
    )
    (folder / "checkpoint.svg").write_text(chart)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_500_000, help="of each of two tables")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--nodes",
        nargs="*",
        default=[f"{servers}+{workers}" for servers, workers in SHAPES],
        help="servers + workers of the jobs whose pauses are measured; none are, where none are given",
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--node-saves", type=int, default=5, help="of each job")
    parser.add_argument("--folder", help="on the disk to measure; default: the temporary directory's")
    parser.add_argument("--no-docs", action="store_true", help="do not write docs/benchmarks/")
    arguments = parser.parse_args()
    # Saving needs the cores more than plain writing does, so what else ran counts.
    arguments.load = round(os.getloadavg()[0], 1)
    store = new_store(arguments.dim)
    fill(store, arguments.rows, arguments.dim)
    print(f"filled {len(TABLES)} tables of {arguments.rows} rows", flush=True)
    measures: Measures = {}
    nodes: Mapping[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=arguments.folder) as name:
        if arguments.nodes:
            nodes = pauses_of_jobs(store, Path(name), arguments)
            print(f"{len(arguments.nodes)} kinds of jobs done", flush=True)
        for number in range(arguments.rounds):
            for key, value in one_round(store, Path(name), number, arguments).items():
                measures.setdefault(key, []).append(value)
            print(f"round {number + 1}/{arguments.rounds} done", flush=True)
    print("RESULT " + json.dumps(report(measures, nodes, arguments)))


if __name__ == "__main__":
    main()
