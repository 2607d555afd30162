"""Training speed beside Keras, PyTorch and TFRA: the same model, data and optimizer on the same cores, alternating.

    python -m benchmarks.training --model dlrm --batch 2048

Every peer runs in a process (PyTorch in an environment) of its own and is timed in turns, so that a slow minute of the
machine hits all alike. Before that each peer tries its thread settings and keeps the best. The last line printed is
`RESULT {json}`; a table and a plot go to docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.engine import TFRA
from benchmarks.peer_process import ROOT, PeerProcess, bar_chart, environment_python, say
from benchmarks.workloads import WORKLOADS, Workload, workload


@dataclass(frozen=True)
class Peer:
    """One contestant: the module of its worker, its settings to try, and the packages of its environment."""

    name: str
    module: str
    settings: tuple[Mapping[str, Any], ...]
    packages: tuple[str, ...] = ()
    probe: str = ""  # the module that says whether the environment is there


def peers(cores: int) -> list[Peer]:
    """All contestants, this project first."""
    pools = tuple({"intra": cores, "inter": inter} for inter in sorted({1, cores}))
    return [
        # One update of staleness is what asynchronous training does by itself; see docs/benchmarks/training.md.
        Peer("embedded", "benchmarks.peers.embedded", tuple({**pool, "staleness": 1} for pool in pools)),
        Peer(
            "tfra",
            "benchmarks.peers.tfra",
            pools,
            packages=TFRA,
            probe="tf_keras, tensorflow_recommenders_addons",
        ),
        Peer(
            "keras",
            "benchmarks.peers.keras_embedding",
            tuple({**pool, "jit": jit} for pool in pools for jit in (True, False)),
        ),
        Peer(
            "torch",
            "benchmarks.peers.pytorch",
            (
                {"threads": 1, "fused": True},
                *(
                    {"threads": cores, "fused": fused, "wait": wait}
                    for fused in (False, True)
                    for wait in ("passive", "active")
                ),
            ),
            packages=("torch", "numpy"),
            probe="torch, numpy",
        ),
    ]


def start(peer: Peer, python: str, data: Path, settings: Mapping[str, Any], log: IO[str]) -> PeerProcess:
    """A peer's process, stopped while it has nothing to do."""
    environment = {}
    if "wait" in settings:
        environment["OMP_WAIT_POLICY"] = settings["wait"]
    if peer.name == "tfra":
        environment["TF_USE_LEGACY_KERAS"] = "1"  # it was made for Keras 2's TensorFlow
    return PeerProcess(
        peer.name,
        [python, "-m", peer.module, json.dumps({"data": str(data), **settings})],
        log,
        environment=environment,
        pause=True,
    )


def environment_of(peer: Peer) -> str:
    """The interpreter that runs the peer."""
    if not peer.packages:
        return sys.executable
    return environment_python(peer.name, peer.packages, f"import {peer.probe}")


@dataclass
class Measurement:
    """What one peer did."""

    peer: Peer
    settings: Mapping[str, Any]
    version: str
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median samples a second over the rounds."""
        return statistics.median(self.rates)


def calibrate(peer: Peer, python: str, data: Path, batch: int, steps: int, log: IO[str]) -> Mapping[str, Any]:
    """The fastest of the peer's settings."""
    rates = []
    for settings in peer.settings:
        try:
            with start(peer, python, data, settings, log) as process:
                process.ask({"steps": 8})
                rate = steps * batch / process.ask({"steps": steps})["seconds"]
        except RuntimeError as error:
            say(f"  {peer.name} {dict(settings)}: fails ({str(error).splitlines()[0]})")
            rate = 0.0
        say(f"  {peer.name} {dict(settings)}: {rate:,.0f} samples/s")
        rates.append(rate)
    if not any(rates):
        raise RuntimeError(f"No setting of peer {peer.name} runs. Received: settings {peer.settings}")
    return peer.settings[int(np.argmax(rates))]


def measure(contestants: Sequence[Peer], data: Path, arguments: argparse.Namespace) -> list[Measurement]:
    """Calibrate every peer, then time them in turns."""
    measured: list[Measurement] = []
    with ExitStack() as stack:
        log = stack.enter_context(
            tempfile.NamedTemporaryFile("w", prefix="benchmark-", suffix=".log", delete=False)
        )
        processes = []
        for peer in contestants:
            python = environment_of(peer)
            settings = peer.settings[-1]
            if not arguments.no_calibration:
                settings = calibrate(peer, python, data, arguments.batch, arguments.steps, log)
            process = stack.enter_context(start(peer, python, data, settings, log))
            process.ask({"steps": arguments.warmup})
            processes.append(process)
            measured.append(Measurement(peer, settings, process.ready["version"]))
        for number in range(arguments.rounds):
            for result, process in zip(measured, processes, strict=True):
                answer = process.ask({"steps": arguments.steps})
                result.rates.append(arguments.steps * arguments.batch / answer["seconds"])
                result.losses.append(answer["loss"])
            rates = ", ".join(f"{result.peer.name} {result.rates[-1]:,.0f}" for result in measured)
            say(f"round {number + 1}/{arguments.rounds}: {rates} samples/s")
    return measured


def report(measured: Sequence[Measurement], data: Workload, arguments: argparse.Namespace) -> dict[str, Any]:
    """Print the table, write it and the plot, and return the result line's content."""
    rates = {result.peer.name: result.median for result in measured}
    mine = rates["embedded"]
    header = (
        "| peer | settings | version | samples/s, median (min to max) | embedded is | mean loss, last round |"
    )
    lines = [header, "|---|---|---|---|---|---|"]
    for result in measured:
        settings = ", ".join(f"{key}={value}" for key, value in result.settings.items())
        lines.append(
            f"| {result.peer.name} | {settings} | {result.version} "
            f"| {result.median:,.0f} ({min(result.rates):,.0f} to {max(result.rates):,.0f}) "
            f"| {mine / result.median:.2f} x | {result.losses[-1]:.4f} |"
        )
    table = "\n".join(lines)
    say(table)
    if not arguments.no_docs:
        _write_docs(table, rates, data, arguments)
    return {
        "benchmark": "training",
        "model": arguments.model,
        "batch": arguments.batch,
        "samples_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        **{f"vs_{name}": round(mine / rate, 3) for name, rate in rates.items() if name != "embedded"},
        "cores": os.cpu_count(),
        "ids": data.ids,
        "dim": data.dim,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "versions": {result.peer.name: result.version for result in measured},
    }


def _write_docs(
    table: str, rates: Mapping[str, float], data: Workload, arguments: argparse.Namespace
) -> None:
    folder = ROOT / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"training-{arguments.model}-{arguments.batch}"
    page = (
        f"# Training {arguments.model.upper()} at batch {arguments.batch:,}\n\n"
        f"`python -m benchmarks.training --model {arguments.model} --batch {arguments.batch}` on "
        f"{os.cpu_count()} cores ({_processor()}), Python {platform.python_version()}. {data.fields} id "
        f"columns ({data.bags} of them bags of {data.length}), {data.ids:,} ids in all (Zipf, exponent "
        f"{data.exponent}), dim {data.dim}, Adagrad; medians of "
        f"{arguments.rounds} alternating rounds of {arguments.steps} steps.\n\n![]({name}.svg)\n\n{table}\n"
    )
    (folder / f"{name}.md").write_text(page)
    (folder / f"{name}.svg").write_text(
        bar_chart(
            rates,
            f"{arguments.model.upper()}, batch {arguments.batch:,}",
            unit="samples/s",
            ours=("embedded",),
        )
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(WORKLOADS), default="dlrm")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=24, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=48, help="steps before the first round")
    parser.add_argument("--ids", type=int, help="ids of all columns together; default: the model's")
    parser.add_argument("--peers", default="embedded,tfra,keras,torch", help="names, separated by commas")
    parser.add_argument(
        "--no-calibration", action="store_true", help="take each peer's last settings untried"
    )
    parser.add_argument("--no-docs", action="store_true", help="do not write docs/benchmarks/")
    arguments = parser.parse_args()
    known = {peer.name: peer for peer in peers(os.cpu_count() or 1)}
    names = arguments.peers.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"peers must be of {', '.join(known)}. Received: {', '.join(unknown)}")
    if "embedded" not in names:
        parser.error("peers must include embedded, which the others are compared with.")
    generated = workload(arguments.model, arguments.batch, arguments.ids)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        data = Path(folder) / "batches.npz"
        generated.write(data)
        measured = measure([known[name] for name in names], data, arguments)
        result = report(measured, generated, arguments)
    say("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
