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
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ANSWER_SECONDS = 900
TFRA = ("tensorflow-cpu==2.16.2", "tensorflow-recommenders-addons==0.8.1", "setuptools<80", "numpy<2")
OPERATIONS = ("lookup", "dedup", "update", "insert")
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


def tfra_python() -> str:
    """The interpreter of TFRA's environment, made at first use below the user's cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = cache / "deeprec-spark" / "benchmarks" / "tfra"
    python = home / "bin" / "python"
    probe = "import tensorflow_recommenders_addons"
    if not (python.exists() and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0):
        say(f"making the environment of TFRA: {', '.join(TFRA)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TFRA], check=True, timeout=1800)
    return str(python)


class Worker:
    """A peer's running process."""

    def __init__(self, name: str, python: str, settings: Mapping[str, Any], log: IO[str]) -> None:
        self.name = name
        self._log = log
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
        if name == "tfra":  # it was made for Keras 2's TensorFlow
            environment["TF_USE_LEGACY_KERAS"] = "1"
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.tables", json.dumps(settings)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        self.ready = self._answer()

    def rate(self, op: str, ids: str, seconds: float) -> float:
        """Keys a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, "ids": ids, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["rate"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = threading.Timer(ANSWER_SECONDS, self._process.kill)
        deadline.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    parsed: dict[str, Any] = json.loads(line)
                    return parsed
        finally:
            deadline.cancel()
        self._log.flush()
        raise RuntimeError(
            f"The peer {self.name} died. Received: exit code {self._process.wait(30)}, log:\n"
            f"{Path(self._log.name).read_text()[-2000:]}"
        )


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
        "keys_file": str(keys_file),
        "ids": ids,
    }
    rates: Rates = {}
    ready: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        workers = []
        for name in arguments.peers:
            python = tfra_python() if name == "tfra" else sys.executable
            worker = Worker(name, python, {"peer": name, **settings}, log)
            stack.callback(worker.close)
            workers.append(worker)
            ready[name] = worker.ready
            say(f"dim {dim}: {name} is filled, {worker.ready['row_bytes']:.0f} bytes a row")
        limit = Limit(folder, arguments.keys, dim, arguments.threads, arguments.batch)
        for number in range(arguments.rounds):
            for distribution in ids:
                for op in OPERATIONS:
                    for worker in workers:
                        if op == "update" and worker.name not in ("engine", "tfra"):
                            continue  # these tables know no optimizer
                        if op == "insert" and distribution != "uniform":
                            continue  # every key once: there is no distribution
                        rate = worker.rate(op, distribution, arguments.seconds)
                        rates.setdefault((worker.name, op, distribution), []).append(rate)
                for name, prefetch in (("limit", False), ("limit with prefetch", True)):
                    lookups, updates = limit.rates(distribution, arguments.seconds, prefetch)
                    rates.setdefault((name, "lookup", distribution), []).append(lookups)
                    rates.setdefault((name, "update", distribution), []).append(updates)
            say(f"dim {dim}: round {number + 1}/{arguments.rounds} done")
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
        workers = []
        for storage in storages:
            extra = {} if storage == "DRAM" else {"storage": storage}
            worker = Worker(storage, sys.executable, {**settings, **extra}, log)
            stack.callback(worker.close)
            worker.rate("train", "zipf", 4 * arguments.seconds)  # frequencies settle which rows are hot
            workers.append(worker)
        for _ in range(arguments.rounds):
            for worker in workers:
                rates[worker.name].append(worker.rate("lookup", "zipf", arguments.seconds))
    return rates


def report(
    results: Mapping[int, tuple[Rates, dict[str, dict[str, Any]]]],
    tiers: Mapping[str, Sequence[float]],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Print and write the tables; the content of the result line."""
    lines = ["| dim | contestant | ids | " + " | ".join(OPERATIONS) + " | bytes a row |"]
    lines.append("|---" * 8 + "|")
    bars: dict[str, float] = {}
    for dim, (rates, ready) in results.items():
        for name in dict.fromkeys(key[0] for key in rates):
            for distribution in ("uniform", "zipf"):
                cells = []
                for op in OPERATIONS:
                    values = rates.get((name, op, distribution))
                    cells.append("" if values is None else f"{statistics.median(values) / 1e6:.2f}")
                memory = f"{ready[name]['row_bytes']:.0f}" if name in ready else ""
                lines.append(f"| {dim} | {name} | {distribution} | {' | '.join(cells)} | {memory} |")
            bars[f"{name}, dim {dim}"] = statistics.median(rates[name, "lookup", "uniform"])
    lines += ["", "| storage, 10 % of the rows in DRAM, Zipf ids, dim 16 | lookups, M/s |", "|---|---|"]
    stored = {name: statistics.median(measured) for name, measured in tiers.items()}
    lines += [f"| {name} | {rate / 1e6:.2f} |" for name, rate in stored.items()]
    table = "\n".join(lines)
    say(table)
    first = min(results)
    rates, ready = results[first]

    def ratio(op: str, ours: str, theirs: str, distribution: str = "uniform") -> float | None:
        pair = [rates.get((name, op, distribution)) for name in (ours, theirs)]
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
        "insert_vs_tfra": ratio("insert", "engine", "tfra"),
        "update_vs_limit": ratio("update", "engine", "limit"),
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
    from benchmarks.training import bar_chart

    folder = ROOT / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    versions = "; ".join(f"{name}: {answer['version']}" for name, answer in ready.items())
    page = (
        f"# The embedding engine\n\n`python -m benchmarks.engine` with {arguments.threads} threads on {os.cpu_count()} "
        f"cores: {arguments.keys:,} keys, batches of {arguments.batch:,}; medians of {arguments.rounds} alternating "
        f"rounds of {arguments.seconds} s. Millions of keys a second. `limit` is a bare loop without locks, counts or "
        f"growth. Inserts fill empty tables of a quarter of the keys; only the engine's include optimizer slots, but "
        f"bytes a row do for TFRA too. {versions}.\n\n![](engine.svg)\n\n{table}\n"
    )
    (folder / "engine.md").write_text(page)
    chart = bar_chart(bars, "Lookups of uniform ids").replace("samples/s", "keys/s")
    (folder / "engine.svg").write_text(chart)


def say(message: str) -> None:
    """One line to the user."""
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


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
