"""The report of a fit: slowdown, skew, its text, and how it adds up over epochs, copies and restarts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deeprec_spark.tracing import STAGES, FitObserver, FitReport, ShardReport, WorkerReport
from deeprec_spark.tracing.report import MAX_LINES, split_line


def worker(index: int, seconds: float, samples: int = 1000, **stages: float) -> WorkerReport:
    return WorkerReport(index, samples=samples, steps=10, seconds=seconds, stages=stages)


def shard(server: int, table: str, keys: int) -> ShardReport:
    return ShardReport(server, table, rows=keys // 2, keys=keys, memory_bytes=100, moved_bytes=8 * keys)


def told(samples: int, *, copy: int = 1, pull: float = 0.1, seconds: float = 1.0) -> dict[str, Any]:
    return {
        "samples": samples,
        "steps": samples // 10,
        "seconds": seconds,
        "stages": {"pull": pull},
        "incarnation": copy,
    }


def test_an_asynchronous_straggler_takes_longer_for_a_sample() -> None:
    report = FitReport.of("async", [worker(0, 1.0), worker(1, 1.0, samples=400), worker(2, 1.0)], [])
    assert [round(one.slowdown, 2) for one in report.workers] == [1.0, 2.5, 1.0]
    assert report.slowest is not None
    assert report.slowest.worker == 1


def test_a_synchronous_straggler_is_who_does_not_wait_in_pull_and_push() -> None:
    """All take the same time; two of them spend it waiting for the third."""
    waiting = {"pull": 5.0, "push": 3.0, "compute": 2.0}
    own = {"pull": 1.0, "push": 1.0, "compute": 8.0}
    report = FitReport.of(
        "sync", [worker(0, 10.0, **waiting), worker(1, 10.0, **own), worker(2, 10.0, **waiting)], []
    )
    assert [one.slowdown for one in report.workers] == [1.0, 4.0, 1.0]


def test_a_worker_without_samples_is_no_straggler() -> None:
    report = FitReport.of("async", [worker(0, 1.0), worker(1, 1.0, samples=0)], [])
    assert [one.slowdown for one in report.workers] == [1.0, 1.0]


def test_skew_is_the_hottest_server_over_the_mean_of_its_table() -> None:
    shards = [
        shard(0, "even", 50),
        shard(1, "even", 50),
        shard(0, "hot", 90),
        shard(1, "hot", 30),
        shard(0, "none", 0),
    ]
    skew = FitReport.of("async", [], shards).skew
    assert [(one.table, one.hottest, one.ratio) for one in skew] == [
        ("hot", 0, 1.5),
        ("even", 0, 1.0),
        ("none", 0, 1.0),
    ]


def test_the_text_has_a_line_for_each_worker_and_shard() -> None:
    report = FitReport.of(
        "async", [worker(0, 1.0, pull=0.5), worker(1, 2.0)], [shard(0, "items", 90), shard(1, "items", 30)]
    )
    lines = str(report).splitlines()
    assert len(lines) == 6
    assert lines[0].replace(" ms", "").split() == [
        "worker",
        "samples",
        "steps",
        "seconds",
        *STAGES,
        "slowdown",
        "pulled",
        "ahead",
        "staleness",
        "most",
    ]
    assert lines[1].split() == [
        "0",
        "1,000",
        "10",
        "1.0",
        "0.00",
        "0.00",
        "50.00",
        "0.00",
        "0.00",
        "0.00",
        "0.00",
        "0.67",
        "0",
        "0.00",
        "0",
    ]
    assert lines[4].split() == ["0", "items", "45", "90", "0.0", "0.0", "1.50"]
    assert json.loads(json.dumps(report.to_dict()))["skew"] == [
        {"table": "items", "hottest": 0, "ratio": 1.5}
    ]


def test_the_split_names_each_of_a_few_workers_and_the_slowest_of_many() -> None:
    assert split_line([]) == ""
    assert split_line([worker(0, 1.0, compute=0.5, pull=0.05)]) == "ms/step 100: pull 5.0 compute 50"
    two = split_line([worker(0, 1.0, compute=0.5), worker(1, 2.0, compute=1.5)])
    assert two == "ms/step worker 0 100: compute 50 | worker 1 200: compute 150"
    many = split_line([worker(index, 1.0 + index, compute=0.5) for index in range(5)])
    assert many == "ms/step mean 300: compute 50 | worker 4 500: compute 50"


def test_epochs_and_copies_of_a_worker_add_up() -> None:
    observer = FitObserver("async", num_ps=1, dims={})
    observer.worker(1, told(100))
    observer.worker(1, told(200, pull=0.2))
    observer.epoch_end()
    observer.worker(1, told(50))
    observer.worker(1, told(30, copy=2))  # it died after 50, and another copy began anew
    assert observer.running[0].samples == 30
    assert observer.report().workers[0].samples == 280
    observer.epoch_end()
    assert observer.report().workers[0].samples == 280
    assert observer.report().workers[0].stages["pull"] == pytest.approx(0.4)
    assert observer.running[0].samples == 30  # the line that ends an epoch still shows it


def test_staleness_is_told_of_each_asynchronous_worker() -> None:
    observer = FitObserver("async", num_ps=1, dims={})
    observer.worker(1, {**told(100), "stale_pulls": 9, "staleness": {"steps": 10, "updates": 12, "most": 3}})
    observer.epoch_end()
    observer.worker(1, {**told(50), "stale_pulls": 4, "staleness": {"steps": 5, "updates": 3, "most": 1}})
    observer.worker(2, told(100))
    report = observer.report()
    first, second = report.to_dict()["workers"]
    assert (first["stale_pulls"], first["staleness"]) == (13, {"mean": 1.0, "most": 3})
    assert (second["stale_pulls"], second["staleness"]) == (0, {"mean": 0.0, "most": 0})
    head, one, two = str(report).splitlines()
    assert head.endswith("pulled ahead  staleness  most")
    assert one.split()[-3:] == ["13", "1.00", "3"]
    assert two.split()[-3:] == ["0", "0.00", "0"]
    page = report.to_html()
    assert "updates between the pull and the push of a step: 1.00 on average, at most 3" in page
    # Synchronous workers push the same step that they pulled.
    assert "staleness" not in str(FitReport.of("sync", report.workers, []))


def test_counters_of_servers_begin_anew_with_each_start_of_the_nodes() -> None:
    observer = FitObserver("async", num_ps=1, dims={"items": 4})
    observer.nodes_started()
    observer.server(0, {"items": {"rows": 5, "lookups": 10, "bytes": 64}})
    observer.server(0, {"items": {"rows": 7, "lookups": 25, "bytes": 64}})
    observer.worker(1, told(100))
    observer.nodes_started()
    observer.server(0, {"items": {"rows": 6, "lookups": 5, "bytes": 96}})
    report = observer.report()
    assert report.shards == [ShardReport(0, "items", rows=6, keys=30, memory_bytes=96, moved_bytes=960)]
    assert report.workers[0].samples == 100


def test_the_counts_of_caches_are_those_of_the_newest_report_of_each_copy() -> None:
    observer = FitObserver("async", num_ps=1, dims={})
    observer.worker(1, {**told(10), "cache": {"hits": 1, "misses": 2}})
    observer.epoch_end()
    observer.worker(1, {**told(10), "cache": {"hits": 5, "misses": 2}})  # counts go on over epochs
    observer.worker(1, told(20))  # a report of progress tells nothing of it
    observer.worker(2, {**told(10), "cache": {"hits": 3}})
    observer.worker(2, {**told(10, copy=2), "cache": {"misses": 4}})
    assert observer.report().cache == {"hits": 8, "misses": 6}
    assert str(observer.report()).splitlines()[-1] == "cache of remote files: hits 8, misses 6"


def test_the_counts_of_caches_are_kept_when_the_nodes_start_again() -> None:
    """Their copies are numbered from 1 again."""
    observer = FitObserver("async", num_ps=1, dims={})
    observer.nodes_started()
    observer.worker(1, {**told(10), "cache": {"hits": 1, "misses": 2}})
    for hits in (3, 5):
        observer.nodes_started()
        observer.worker(1, {**told(10), "cache": {"hits": hits}})
    assert observer.report().cache == {"hits": 9, "misses": 2}
    assert observer.report().cache == {"hits": 9, "misses": 2}


def test_the_text_of_very_many_shows_the_slowest_and_the_hottest() -> None:
    workers = [worker(index, 1.0 + index) for index in range(1000)]
    shards = [
        shard(server, f"t{table:02}", 100 + 50 * (server == 7) * table)
        for table in range(26)
        for server in range(128)
    ]
    lines = str(FitReport.of("async", workers, shards)).splitlines()
    assert len(lines) == 2 * (1 + MAX_LINES + 1)
    assert [int(line.split()[0]) for line in lines[1 : MAX_LINES + 1]] == list(range(980, 1000))
    assert lines[MAX_LINES + 1] == "… and 980 more workers, none of them slower"
    assert lines[MAX_LINES + 3].split()[1] == "t25"
    assert any(line.split()[:2] == ["7", "t25"] for line in lines)
