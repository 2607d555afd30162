"""Training speed beside other libraries: the same model, data and optimizer on the same cores, alternating.

    python -m benchmarks.training --model dlrm --batch 2048
    python -m benchmarks.training --model bags --batch 512 --peers embedded,torch --quick

Every peer runs in processes (some in an environment) of its own and is timed in turns, so that a slow minute of the
machine hits all alike. Before that each peer tries its thread settings and keeps the best. The last line printed is
`RESULT {json}`; a table and a plot go to docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import training_report
from benchmarks.contest import Contest, ContestOptions
from benchmarks.contestants import Peer, selected
from benchmarks.peer_process import end_on_sigterm, say
from benchmarks.workloads import WORKLOADS, workload

QUICK = ContestOptions(seconds=2.0, warmup=2.0, trial=0.0, rounds=3)


def main() -> None:
    """The command line."""
    end_on_sigterm()
    arguments, contestants = _parse(sys.argv[1:])
    options = _options(arguments)
    generated = workload(arguments.model, arguments.batch, arguments.ids, arguments.samples)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        data = Path(folder) / "batches.npz"
        generated.write(data)
        measured = Contest(data, arguments.batch, options).run(contestants)
    result = training_report.result(measured, generated, options)
    say(training_report.table(measured))
    if not arguments.no_docs:
        training_report.write(result, measured, generated, options)
    say("RESULT " + json.dumps(result))


def _options(arguments: argparse.Namespace) -> ContestOptions:
    """What the command line says, over the defaults of a quick or a full run."""
    base = QUICK if arguments.quick else ContestOptions()
    chosen: dict[str, Any] = {
        name: value
        for name in ("seconds", "warmup", "rounds")
        if (value := getattr(arguments, name)) is not None
    }
    trial = 0.0 if arguments.no_calibration else base.trial
    # Tables of 20 M ids and their slots, times the contestants, are more than this kind of machine holds.
    fresh = arguments.fresh or (arguments.model == "bags" and arguments.ids is None)
    return ContestOptions(**{**vars(base), "trial": trial, "fresh": fresh, **chosen})


def _parse(texts: list[str]) -> tuple[argparse.Namespace, list[Peer]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(WORKLOADS), default="dlrm")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--ids", type=int, help="ids of all columns together; default: the model's")
    parser.add_argument("--samples", type=int, help="that are generated, and read again and again")
    parser.add_argument("--peers", help="names, separated by commas; default: all that can train the model")
    parser.add_argument("--quick", action="store_true", help="three short rounds, settings untried")
    parser.add_argument("--seconds", type=float, help="of each contestant in a round, about")
    parser.add_argument("--warmup", type=float, help="seconds before the first round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--no-calibration", action="store_true", help="take each peer's last settings untried"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="one process at a time, anew in each round (bags: always)"
    )
    parser.add_argument("--no-docs", action="store_true", help="do not write docs/benchmarks/")
    arguments = parser.parse_args(texts)
    try:
        contestants = selected(arguments.peers and arguments.peers.split(","))
    except ValueError as error:
        parser.error(str(error))
    return arguments, contestants


if __name__ == "__main__":
    main()
