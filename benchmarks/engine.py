"""Speed and memory of the embedding engine beside other tables and beside the machine's limit, alternating.

    python -m benchmarks.engine

Contestants: this engine; TensorFlow Recommenders Addons (in an environment that the benchmark makes); TensorFlow's
MutableHashTable and DenseHashTable; and the limit, a bare C++ loop that probes an array and copies (or updates) rows,
without prefetching and with it. All use the same threads, keys and batches, each in a process of its own, timed in
turns. The last line printed is `RESULT {json}`; a table and a plot go to docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.peer_process import ANSWER_SECONDS, ROOT, PeerProcess, bar_chart, environment_python, say

TFRA = (
    "tensorflow-cpu==2.16.2",
    "tf-keras==2.16.0",
    "tensorflow-recommenders-addons==0.8.1",
    "setuptools<80",
    "numpy<2",
)
OPERATIONS = ("lookup", "dedup", "update", "insert", "insert with slots")
WITH_SLOTS = ("engine", "tfra")
ROW_SHARE_IN_DRAM = 0.1

Rates = dict[tuple[str, str, str], list[float]]


def write_ids(folder: Path, keys: int, batch: int, batches: int) -> tuple[Path, dict[str, Path]]:
    """The table's keys in random order, and batches of ids, uniform and by Zipf's law with exponent 1.05."""
    random = np.random.default_rng(1)
    order = random.permutation(keys)
    np.save(folder / "keys.npy", order)
    weights = np.arange(1, keys + 1, dtype=np.float64) ** -1.05
    cumulative = np.cumsum(weights) / weights.sum()
    ranks = np.minimum(np.searchsorted(cumulative, random.random(batch * batches)), keys - 1)
    ids = {"uniform": random.integers(0, keys, batch * batches), "zipf": order[ranks]}
    paths = {name: folder / f"{name}.npy" for name in ids}
    for name, values in ids.items():
        np.save(paths[name], values)
        values.tofile(folder / f"{name}.bin")
    return folder / "keys.npy", paths


def start(name: str, settings: Mapping[str, Any], log: IO[str]) -> PeerProcess:
    """A contestant's process."""
    peer = settings.get("peer", name)
    python, environment = sys.executable, {}
    if peer == "tfra":
        python = environment_python("tfra", TFRA, "import tf_keras, tensorflow_recommenders_addons")
        environment = {"TF_USE_LEGACY_KERAS": "1"}  # it was made for Keras 2's TensorFlow
    command = [python, "-m", "benchmarks.peers.tables", json.dumps({"peer": peer, **settings})]
    return PeerProcess(name, command, log, environment=environment)


def rate(process: PeerProcess, op: str, ids: str, seconds: float) -> float:
    """Keys a second."""
    return float(process.ask({"op": op, "ids": ids, "seconds": seconds})["rate"])


def insert_rate(name: str, settings: Mapping[str, Any], slots: bool, log: IO[str]) -> float:
    """Rows a second into an empty table, in a process of its own: some contestants keep the memory of old tables."""
    with start(name, {**settings, "inserts": "rows and slots" if slots else "rows"}, log) as process:
        return float(process.ready["rate"])


class Limit:
    """The bare loop, compiled for this very machine."""

    def __init__(self, folder: Path, keys: int, dim: int, threads: int, batch: int) -> None:
        self.binary = folder / "limit"
        if not self.binary.exists():
            source = ROOT / "benchmarks" / "native" / "limit.cc"
            flags = ["-O3", "-march=native", "-fno-math-errno", "-pthread"]
            subprocess.run(["g++", *flags, str(source), "-o", str(self.binary)], check=True)
        self._folder = folder
        self._arguments = [str(keys), str(dim), str(threads), str(batch)]

    def rates(self, ids: str, seconds: float, prefetch: bool) -> tuple[float, float]:
        """Lookups and updates a second."""
        command = [str(self.binary), *self._arguments, str(seconds), str(self._folder / f"{ids}.bin")]
        done = subprocess.run(
            [*command, str(int(prefetch))], check=True, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
        lookups, updates = done.stdout.split()
        return float(lookups), float(updates)


def measure_dim(
    dim: int, arguments: argparse.Namespace, folder: Path, log: IO[str]
) -> tuple[Rates, dict[str, dict[str, Any]]]:
    """All contestants at one dimension: rates by (contestant, operation, ids), and what each said when it was ready."""
    keys_file, ids = folder / "keys.npy", {name: str(folder / f"{name}.npy") for name in ("uniform", "zipf")}
    settings = {
        "keys": arguments.keys,
        "dim": dim,
        "threads": arguments.threads,
        "batch": arguments.batch,
        "init_size": arguments.keys,
        "keys_file": str(keys_file),
        "ids": ids,
    }
    rates: Rates = {}
    ready: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        processes = []
        for name in arguments.peers:
            process = stack.enter_context(start(name, settings, log))
            processes.append(process)
            ready[name] = process.ready
            say(f"dim {dim}: {name} is filled, {process.ready['row_bytes']:.0f} bytes a row")
        limit = Limit(folder, arguments.keys, dim, arguments.threads, arguments.batch)
        for number in range(arguments.rounds):
            for distribution in ids:
                for op in ("lookup", "dedup", "update"):
                    for process in processes:
                        if op == "update" and process.name not in WITH_SLOTS:
                            continue  # these tables know no optimizer
                        measured = rate(process, op, distribution, arguments.seconds)
                        rates.setdefault((process.name, op, distribution), []).append(measured)
                for name, prefetch in (("limit", False), ("limit with prefetch", True)):
                    lookups, updates = limit.rates(distribution, arguments.seconds, prefetch)
                    rates.setdefault((name, "lookup", distribution), []).append(lookups)
                    rates.setdefault((name, "update", distribution), []).append(updates)
            say(f"dim {dim}: round {number + 1}/{arguments.rounds} done")
    # Alone in memory: every key comes once, so there is no distribution. Tables grow from empty; where one can be
    # sized beforehand, that is measured beside it.
    tables = [(name, {"init_size": 0}) for name in arguments.peers]
    if "tfra" in arguments.peers:
        tables.append(("tfra, sized before", {"peer": "tfra", "init_size": arguments.keys // 4}))
    for number in range(arguments.rounds):
        for name, extra in tables:
            for op in ("insert", "insert with slots"):
                if op == "insert" or name.startswith(WITH_SLOTS):
                    measured = insert_rate(name, {**settings, **extra}, op == "insert with slots", log)
                    rates.setdefault((name, op, "uniform"), []).append(measured)
        say(f"dim {dim}: inserts {number + 1}/{arguments.rounds} done")
    return rates, ready


def measure_tiers(arguments: argparse.Namespace, folder: Path, log: IO[str]) -> dict[str, list[float]]:
    """Lookups of Zipf ids with DRAM for a tenth of the rows, beside all of them in DRAM, at dim 16."""
    row_bytes = 2 * 16 * 4 + 16
    settings = {
        "peer": "engine",
        "keys": arguments.keys,
        "dim": 16,
        "threads": arguments.threads,
        "batch": arguments.batch,
        "keys_file": str(folder / "keys.npy"),
        "ids": {"zipf": str(folder / "zipf.npy")},
        "path": str(folder / "tiers"),
        "first_tier_bytes": int(arguments.keys * ROW_SHARE_IN_DRAM * row_bytes),
    }
    storages = ("DRAM", "DRAM_PMEM", "DRAM_SSDHASH")
    rates: dict[str, list[float]] = {name: [] for name in storages}
    with ExitStack() as stack:
        processes = []
        for storage in storages:
            extra = {} if storage == "DRAM" else {"storage": storage}
            process = stack.enter_context(start(storage, {**settings, **extra}, log))
            rate(process, "train", "zipf", 4 * arguments.seconds)  # frequencies settle which rows are hot
            processes.append(process)
        for _ in range(arguments.rounds):
            for process in processes:
                rates[process.name].append(rate(process, "lookup", "zipf", arguments.seconds))
    return rates


def report(
    results: Mapping[int, tuple[Rates, dict[str, dict[str, Any]]]],
    tiers: Mapping[str, Sequence[float]],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Print and write the tables; the content of the result line."""
    lines = ["| dim | contestant | ids | " + " | ".join(OPERATIONS) + " | bytes a row |"]
    lines.append("|---" * (4 + len(OPERATIONS)) + "|")
    bars: dict[str, float] = {}
    for dim, (rates, ready) in results.items():
        for name in dict.fromkeys(key[0] for key in rates):
            for distribution in ("uniform", "zipf"):
                if not any((name, op, distribution) in rates for op in OPERATIONS):
                    continue
                cells = []
                for op in OPERATIONS:
                    values = rates.get((name, op, distribution))
                    cells.append("" if values is None else f"{statistics.median(values) / 1e6:.2f}")
                memory = f"{ready[name]['row_bytes']:.0f}" if name in ready else ""
                lines.append(f"| {dim} | {name} | {distribution} | {' | '.join(cells)} | {memory} |")
            if lookups := rates.get((name, "lookup", "uniform")):
                bars[f"{name}, dim {dim}"] = statistics.median(lookups)
    lines += ["", "| storage, 10 % of the rows in DRAM, Zipf ids, dim 16 | lookups, M/s |", "|---|---|"]
    stored = {name: statistics.median(measured) for name, measured in tiers.items()}
    lines += [f"| {name} | {rate / 1e6:.2f} |" for name, rate in stored.items()]
    table = "\n".join(lines)
    say(table)
    first = min(results)
    ready = results[first][1]

    def ratio(
        op: str, ours: str, theirs: str, dim: int = first, *, their_op: str | None = None
    ) -> float | None:
        rates = results[dim][0]
        pair = [rates.get((ours, op, "uniform")), rates.get((theirs, their_op or op, "uniform"))]
        if pair[0] is None or pair[1] is None:
            return None
        return round(statistics.median(pair[0]) / statistics.median(pair[1]), 3)

    if not arguments.no_docs:
        write_docs(table, bars, ready, arguments)
    return {
        "benchmark": "engine",
        "keys": arguments.keys,
        "threads": arguments.threads,
        "lookup_vs_tfra": ratio("lookup", "engine", "tfra"),
        "lookup_vs_limit": ratio("lookup", "engine", "limit"),
        "lookup_vs_limit_with_prefetch": ratio("lookup", "engine", "limit with prefetch"),
        # Ours makes the optimizer's slots in the same call; TFRA's upsert of values alone is the harder rival.
        "insert_vs_tfra": ratio("insert with slots", "engine", "tfra", their_op="insert"),
        "insert_rows_vs_tfra": ratio("insert", "engine", "tfra"),
        "insert_with_slots_vs_tfra": ratio("insert with slots", "engine", "tfra"),
        "update_vs_limit": ratio("update", "engine", "limit"),
        "by_dim": {
            dim: {
                "lookup_vs_tfra": ratio("lookup", "engine", "tfra", dim),
                "lookup_vs_limit": ratio("lookup", "engine", "limit", dim),
                "insert_vs_tfra": ratio("insert with slots", "engine", "tfra", dim, their_op="insert"),
                "insert_rows_vs_tfra": ratio("insert", "engine", "tfra", dim),
                "insert_with_slots_vs_tfra": ratio("insert with slots", "engine", "tfra", dim),
                "update_vs_limit": ratio("update", "engine", "limit", dim),
            }
            for dim in results
        },
        "tier_pmem_ratio": round(stored["DRAM_PMEM"] / stored["DRAM"], 3),
        "tier_ssd_ratio": round(stored["DRAM_SSDHASH"] / stored["DRAM"], 3),
        "row_bytes": round(ready["engine"]["row_bytes"], 1),
        "row_bytes_ideal": 8 + 2 * 4 * first + 16,
        "versions": {name: answer["version"] for name, answer in ready.items()},
    }


def write_docs(
    table: str,
    bars: Mapping[str, float],
    ready: Mapping[str, Mapping[str, Any]],
    arguments: argparse.Namespace,
) -> None:
    """docs/benchmarks/engine.md and its plot."""
    folder = ROOT / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    versions = "; ".join(f"{name}: {answer['version']}" for name, answer in ready.items())
    page = (
        f"# The embedding engine\n\n`python -m benchmarks.engine` with {arguments.threads} threads on {os.cpu_count()} "
        f"cores: {arguments.keys:,} keys, batches of {arguments.batch:,}; medians of {arguments.rounds} alternating "
        f"rounds of {arguments.seconds} s. Millions of keys a second. `limit` is a bare loop without locks, counts or "
        f"growth. Inserts fill empty tables of a quarter of the keys, in a process of their own; rows include "
        f"Adagrad's slots where the column says so, and bytes a row do for engine and TFRA. {versions}.\n\n"
        f"![](engine.svg)\n\n{table}\n"
    )
    (folder / "engine.md").write_text(page)
    ours = [name for name in bars if name.startswith("engine")]
    chart = bar_chart(bars, "Lookups of uniform ids", unit="keys/s", ours=ours)
    (folder / "engine.svg").write_text(chart)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=4_000_000)
    parser.add_argument("--batch", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=20, help="different batches")
    parser.add_argument("--dims", type=lambda text: [int(part) for part in text.split(",")], default=[16, 64])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), default=["engine", "tfra", "mutable", "dense"]
    )
    parser.add_argument("--no-docs", action="store_true", help="do not write docs/benchmarks/")
    arguments = parser.parse_args()
    if "engine" not in arguments.peers:
        parser.error("peers must include engine, which the others are compared with.")
    if arguments.keys < 8 * arguments.batch:
        parser.error(
            "keys must be at least 8 batches: a quarter of them is inserted, the first batch untimed. "
            f"Received: keys={arguments.keys}, batch={arguments.batch}"
        )
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        write_ids(folder, arguments.keys, arguments.batch, arguments.batches)
        with (folder / "peers.log").open("w") as log:
            results = {dim: measure_dim(dim, arguments, folder, log) for dim in arguments.dims}
            tiers = measure_tiers(arguments, folder, log)
        result = report(results, tiers, arguments)
    say("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
