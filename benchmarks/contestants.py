"""Who takes part in the training benchmark: its process, its environment, and the settings that are tried."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.engine import TFRA
from benchmarks.peer_process import ROOT, PeerProcess, environment_python

BIGDL = (
    "bigdl-core==2.4.0.dev0",
    "bigdl-dllib-spark3==2.4.0",
    "bigdl-orca-spark3==2.4.0",
)
ORCA = (
    "pyspark==3.5.3",
    "tensorflow-cpu==2.21.0",
    "tf-keras==2.21.0",
    "numpy",
    "pandas",
    "pyarrow",
    "psutil",
    "packaging",
    "filelock",
    "pyzmq",
)


@dataclass(frozen=True)
class Peer:
    """One contestant: the module of its worker, its settings to try, and the packages of its environment.

    Arguments:
        name: how tables and results call it.
        module: run by `python -m`, speaks `benchmarks.peers.protocol`.
        settings: each is tried at the start, and the fastest is kept.
        packages, pinless: of its own environment; `pinless` ones are installed without what they depend on.
        probe: modules that say whether the environment is there.
        environment: variables of its process.
        pause: stop the process while others run; not possible where a node would be missed.
    """

    name: str
    module: str
    settings: tuple[Mapping[str, Any], ...]
    packages: tuple[str, ...] = ()
    pinless: tuple[str, ...] = ()
    probe: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    pause: bool = True

    def python(self) -> str:
        """The interpreter that runs the peer; its environment is made where it is missing."""
        if not self.packages:
            return sys.executable
        return environment_python(self.name, self.packages, f"import {self.probe}", pinless=self.pinless)

    def start(self, python: str, data: Path, settings: Mapping[str, Any], log: IO[str]) -> PeerProcess:
        """Its process, ready for requests."""
        environment = {**self.environment}
        if "wait" in settings:
            environment["OMP_WAIT_POLICY"] = settings["wait"]
        if not self.pause:
            # Processes that it starts itself import modules of this folder as well.
            environment["PYTHONPATH"] = str(ROOT)
        return PeerProcess(
            self.name,
            [python, "-m", self.module, json.dumps({"data": str(data), **settings})],
            log,
            environment=environment,
            pause=self.pause,
        )


def peers(cores: int) -> list[Peer]:
    """All contestants, this project first."""
    whole = {"intra": 1, "inter": cores}  # operations at the same time, none of them split
    pools = (whole, *({"intra": cores, "inter": inter} for inter in sorted({1, cores})))
    return [
        # As exact as the others: every pull sees all pushes, which is the default without servers.
        Peer(
            "embedded",
            "benchmarks.peers.embedded",
            tuple({**pool, "staleness": 0} for pool in pools),
        ),
        # As users start them, with the project's defaults: there is nothing to try.
        Peer("1+1", "benchmarks.peers.nodes", ({"servers": 1, "workers": 1},), pause=False),
        Peer("2+2", "benchmarks.peers.nodes", ({"servers": 2, "workers": 2},), pause=False),
        Peer(
            "tfra",
            "benchmarks.peers.tfra",
            pools,
            packages=TFRA,
            probe="tf_keras, tensorflow_recommenders_addons",
            # It was made for Keras 2's TensorFlow.
            environment={"TF_USE_LEGACY_KERAS": "1"},
        ),
        Peer(
            "keras",
            "benchmarks.peers.keras_embedding",
            (
                {**whole, "jit": False},
                *({"intra": cores, "inter": cores, "jit": jit} for jit in (False, True)),
            ),
        ),
        Peer(
            "torch",
            "benchmarks.peers.pytorch",
            (
                {"threads": 1, "fused": True},
                {"threads": cores, "fused": False, "wait": "active"},
                *({"threads": cores, "fused": True, "wait": wait} for wait in ("passive", "active")),
            ),
            packages=("torch", "numpy"),
            probe="torch, numpy",
        ),
        Peer(
            "tfps",
            "benchmarks.peers.tf_parameter_server",
            (
                {**whole, "steps_per_call": 8, "fused": True},
                *(
                    {"intra": cores, "inter": cores, "steps_per_call": steps, "fused": fused}
                    for steps, fused in ((1, True), (8, False), (8, True))
                ),
            ),
            pause=False,
        ),
        Peer(
            "orca",
            "benchmarks.peers.orca",
            # Orca's default is one thread; its optimizer is Keras 2's older one or its newer one.
            (
                {"intra": 1, "inter": 1, "legacy": True},
                {**whole, "legacy": True},
                {"intra": cores, "inter": cores, "legacy": False},
                {"intra": cores, "inter": cores, "legacy": True},
            ),
            packages=ORCA,
            pinless=BIGDL,
            probe="tf_keras, bigdl.orca",
            pause=False,
        ),
    ]


def selected(names: Sequence[str] | None) -> list[Peer]:
    """The contestants of these names, or all.

    Raises:
        ValueError: an unknown name.
    """
    known = {peer.name: peer for peer in peers(os.cpu_count() or 1)}
    if names is None:
        return list(known.values())
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"peers must be of {', '.join(known)}. Received: {', '.join(unknown)}")
    return [known[name] for name in names]
