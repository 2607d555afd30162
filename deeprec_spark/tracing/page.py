"""The report of a fit as a page: bars for the stages of each worker, and for the load of each server by table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from deeprec_spark.tracing.report import FitReport, ShardReport, WorkerReport
from deeprec_spark.tracing.stages import STAGES
from deeprec_spark.tracing.staleness import Staleness

COLOURS: Mapping[str, str] = {
    "read": "#7f9c3b",
    "prepare": "#b9cf7a",
    "pull": "#3b76af",
    "compute": "#e08e3c",
    "measure": "#f2c9a0",
    "push": "#7db4e0",
    "wait": "#c9c9c9",
}
MAX_BARS = 40
"""Of more workers or servers than this the page shows the slowest, or hottest, ones."""

_OWN = ("pull", "compute", "measure", "push", "wait")
_AHEAD = ("read", "prepare")
_LABEL, _WIDTH, _ROW = 110, 620, 26

_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
svg text{font:12px system-ui,sans-serif;fill:#222} .light{color:#666} h1{font-size:1.4rem} h2{font-size:1.1rem}
pre{overflow-x:auto;font-size:12px} .key{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}
"""


def render(report: FitReport) -> str:
    """The page as one HTML file without scripts or links."""
    workers = sorted(report.workers, key=lambda one: -one.slowdown)[:MAX_BARS]
    parts = [
        f"<h1>Where the time of a fit went</h1><p class=light>{_summary(report)}</p>",
        "<h2>Time of a step by worker</h2>",
        _legend(),
        worker_bars(sorted(workers, key=lambda one: one.worker)),
        "<p class=light>Upper bar: the training thread. Lower bar: read and prepare, which run ahead in another "
        "thread; they delay a step only where the upper bar waits.</p>",
    ]
    if report.shards:
        parts += ["<h2>Keys read by server and table</h2>", *_shard_parts(report)]
    parts.append(f"<h2>Numbers</h2><pre>{escape(str(report))}</pre>")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Report of a fit</title>"
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def worker_bars(workers: Sequence[WorkerReport]) -> str:
    """An SVG of milliseconds a step: two bars for each worker, by stage."""
    longest = max((max(_total(one, _OWN), _total(one, _AHEAD)) for one in workers), default=0.0) or 1.0
    rows = []
    for number, one in enumerate(workers):
        top = number * _ROW
        slow = f" x{one.slowdown:.2f}" if one.slowdown >= 1.05 else ""
        rows.append(f'<text x="0" y="{top + 15}">worker {one.worker}{slow}</text>')
        for stages, offset, height in ((_OWN, 3, 13), (_AHEAD, 17, 5)):
            x = float(_LABEL)
            for stage in stages:
                value = one.milliseconds(stage)
                width = _WIDTH * value / longest
                rows.append(_bar(x, top + offset, width, height, COLOURS[stage], f"{stage} {value:.2f} ms"))
                x += width
            if stages is _OWN:
                rows.append(f'<text x="{x + 4:.1f}" y="{top + 14}">{_total(one, _OWN):.1f} ms</text>')
    return _svg(len(workers), rows)


def shard_bars(shards: Sequence[ShardReport]) -> str:
    """An SVG of one table: the keys that were read from each server, against the mean."""
    mean = sum(one.keys for one in shards) / max(len(shards), 1)
    most = max((one.keys for one in shards), default=0) or 1
    rows = []
    for number, one in enumerate(shards):
        top = number * _ROW
        width = _WIDTH * one.keys / most
        ratio = one.keys / mean if mean else 1.0
        colour = "#c0504d" if ratio >= 1.25 else COLOURS["pull"]
        note = f"{one.keys:,} keys, {one.rows:,} rows, {one.moved_bytes / 1e6:.1f} MB"
        rows += [
            f'<text x="0" y="{top + 15}">server {one.server}</text>',
            _bar(_LABEL, top + 3, width, 16, colour, note),
            f'<text x="{_LABEL + width + 4:.1f}" y="{top + 15}">{ratio:.2f}</text>',
        ]
    middle = _LABEL + _WIDTH * mean / most
    rows.append(f'<path d="M{middle:.1f} 0V{len(shards) * _ROW}" stroke="#222" stroke-dasharray="3 3"/>')
    return _svg(len(shards), rows)


def _shard_parts(report: FitReport) -> list[str]:
    parts = ["<p class=light>The dashed line is the mean of the servers; numbers are against it.</p>"]
    for skew in report.skew[:MAX_BARS]:
        shards = [one for one in report.shards if one.table == skew.table]
        hottest = sorted(shards, key=lambda one: -one.keys)[:MAX_BARS]
        parts.append(
            f"<h3>{escape(skew.table)} <span class=light>hottest: server {skew.hottest}, "
            f"{skew.ratio:.2f} of the mean</span></h3>{shard_bars(sorted(hottest, key=lambda one: one.server))}"
        )
    return parts


def _summary(report: FitReport) -> str:
    samples = sum(one.samples for one in report.workers)
    text = f"{report.mode}, {len(report.workers)} workers, {samples:,} samples, {report.restarts} restarts"
    slowest = report.slowest
    if slowest is not None and len(report.workers) > 1:
        text += f"; slowest: worker {slowest.worker}, {slowest.slowdown:.2f} of the median"
    if report.mode == "async":
        seen = sum((one.staleness for one in report.workers), Staleness())
        text += f"; updates between the pull and the push of a step: {seen.mean:.2f} on average, at most {seen.most}"
    return text


def _legend() -> str:
    keys = (f'<span class=key style="background:{COLOURS[stage]}"></span>{stage}' for stage in STAGES)
    return f"<p>{''.join(keys)}</p>"


def _total(one: WorkerReport, stages: Sequence[str]) -> float:
    return sum(one.milliseconds(stage) for stage in stages)


def _bar(x: float, y: float, width: float, height: float, colour: str, note: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.3):.1f}" height="{height}" fill="{colour}">'
        f"<title>{escape(note)}</title></rect>"
    )


def _svg(rows: int, parts: Sequence[str]) -> str:
    width, height = _LABEL + _WIDTH + 90, max(rows, 1) * _ROW
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="100%">{"".join(parts)}</svg>'
