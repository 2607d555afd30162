"""What a run of the training benchmark leaves: its result line, its table, its page with a plot."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contest import ContestOptions, Measurement
from benchmarks.peer_process import ROOT, bar_chart
from benchmarks.workloads import WORKLOADS, Workload

OURS = ("embedded", "1+1", "2+2")
SERVERS = "1+1"  # the contestant that stands for training with parameter servers
FOLDER = ROOT / "docs" / "benchmarks"


def result(measured: Sequence[Measurement], data: Workload, options: ContestOptions) -> dict[str, Any]:
    """The content of the result line: samples a second, their ratios, and of what they are.

    `vs_<peer>` is embedded over that peer; `ps_vs_<peer>` is one server and one worker over it.
    """
    rates = {one.peer.name: one.median for one in measured}
    return {
        "benchmark": "training",
        "model": data.model,
        "batch": data.batch,
        "samples_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        **ratios(rates),
        "cores": os.cpu_count(),
        "processor": processor(),
        "ids": data.ids,
        "dim": data.dim,
        "fields": data.fields,
        "rounds": rounds(measured),
        "seconds": options.seconds,
        "versions": {one.peer.name: one.version for one in measured},
        "settings": {one.peer.name: dict(one.settings) for one in measured},
    }


def rounds(measured: Sequence[Measurement]) -> int:
    """How many there were: a run that is told to end has fewer than were asked for."""
    return max(len(one.rates) for one in measured)


def ratios(rates: Mapping[str, float]) -> dict[str, float]:
    """`vs_…` and `ps_vs_…` of what was measured."""
    found = {}
    for ours, prefix, others in (
        ("embedded", "vs_", [name for name in rates if name not in OURS]),
        (SERVERS, "ps_vs_", [name for name in rates if name != SERVERS]),
    ):
        if ours in rates:
            for name in others:
                found[prefix + re.sub(r"\W", "_", name)] = round(rates[ours] / rates[name], 3)
    return found


def table(measured: Sequence[Measurement]) -> str:
    """A line for each contestant."""
    rates = {one.peer.name: one.median for one in measured}
    ours = [name for name in ("embedded", SERVERS) if name in rates]
    header = ["peer", "samples/s, median (min to max)", *(f"{name} is" for name in ours)]
    header += ["mean loss, last round", "settings", "version"]
    lines = [_line(header), "|---" * len(header) + "|"]
    for one in measured:
        settings = ", ".join(f"{key}={value}" for key, value in one.settings.items())
        lines.append(
            _line(
                [
                    one.peer.name,
                    f"{one.median:,.0f} ({min(one.rates):,.0f} to {max(one.rates):,.0f})",
                    *(f"{rates[name] / one.median:.2f} x" for name in ours),
                    f"{one.losses[-1]:.4f}",
                    settings,
                    one.version,
                ]
            )
        )
    return "\n".join(lines)


def write(
    found: Mapping[str, Any], measured: Sequence[Measurement], data: Workload, options: ContestOptions
) -> None:
    """Write the page and the plot of this run, and bring the overview of all runs up to date."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = f"training-{data.model}-{data.batch}"
    trials = [
        f"- {one.peer.name}: "
        + "; ".join(
            f"{', '.join(f'{key}={value}' for key, value in settings.items())}: {rate:,.0f}"
            for settings, rate in one.trials
        )
        for one in measured
        if one.trials
    ]
    alternation = "a fresh process for each turn" if options.fresh else "all processes alive, one at work"
    page = [
        f"# Training {data.model.upper()} at batch {data.batch:,}",
        "",
        f"`python -m benchmarks.training --model {data.model} --batch {data.batch}` on {os.cpu_count()} cores "
        f"({processor()}), Python {platform.python_version()}. {data.fields} id columns ({data.bags} of them bags of "
        f"{data.length}), {data.ids:,} ids in all (Zipf, exponent {data.exponent}), dim {data.dim}, Adagrad; medians "
        f"of {rounds(measured)} alternating rounds of about {options.seconds:.0f} s each, {alternation}.",
        "",
        f"![]({name}.svg)",
        "",
        table(measured),
        "",
    ]
    if trials:
        page += ["Settings tried at the start, samples/s:", "", *trials, ""]
    (FOLDER / f"{name}.md").write_text("\n".join(page))
    title = f"{data.model.upper()}, batch {data.batch:,}"
    chart = bar_chart(found["samples_per_s"], title, unit="samples/s", ours=OURS)
    (FOLDER / f"{name}.svg").write_text(chart)
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    overview()


def overview(folder: Path = FOLDER) -> None:
    """Write training-results.md: one table of all runs that have left their result in the folder."""
    runs = [json.loads(path.read_text()) for path in folder.glob("training-*.json")]
    order = list(WORKLOADS)
    runs.sort(key=lambda run: (order.index(run["model"]), run["batch"]))
    names = sorted({name for run in runs for name in run["samples_per_s"]}, key=_position)
    keys = ["vs_tfra", "vs_torch", "vs_keras", "ps_vs_embedded", "ps_vs_tfps", "ps_vs_orca"]
    lines = [
        "# Training speed: all runs",
        "",
        "Samples a second; a row is a run of `python -m benchmarks.training`, whose page has settings, versions.",
        "",
        _line(["model", "batch", *names]),
        "|---" * (len(names) + 2) + "|",
    ]
    for run in runs:
        rates = [
            f"{run['samples_per_s'][name]:,.0f}" if name in run["samples_per_s"] else "" for name in names
        ]
        link = f"[{run['model']}](training-{run['model']}-{run['batch']}.md)"
        lines.append(_line([link, f"{run['batch']:,}", *rates]))
    lines += ["", _line(["model", "batch", *keys]), "|---" * (len(keys) + 2) + "|"]
    lines += [
        _line([run["model"], f"{run['batch']:,}", *(f"{run[key]:.2f}" if key in run else "" for key in keys)])
        for run in runs
    ]
    (folder / "training-results.md").write_text("\n".join([*lines, ""]))


def processor() -> str:
    """The name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"


def _position(name: str) -> tuple[int, str]:
    return (OURS.index(name) if name in OURS else len(OURS), name)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
