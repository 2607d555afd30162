"""What a fit writes: scalars that TensorBoard reads, a page that stands alone, files on a real S3 server."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deeprec_spark.runtime.errors import JobError, NodeError
from deeprec_spark.runtime.orders import Answer, OrderError
from deeprec_spark.tracing import (
    FitObserver,
    FitRecorder,
    FitReport,
    ShardReport,
    TracingOptions,
    WorkerReport,
)
from deeprec_spark.tracing.board import ScalarBoard
from deeprec_spark.tracing.output import OutputFolder
from deeprec_spark.tracing.page import MAX_BARS, shard_bars, worker_bars
from deeprec_spark.tracing.scalars import call_scalars, shard_scalars, worker_scalars
from deeprec_spark.tracing.staleness import Staleness
from tests.servers.s3 import ACCESS, BUCKET, SECRET, S3Server


def worker(index: int, compute: float = 1.0, slowdown: float = 1.0) -> WorkerReport:
    return WorkerReport(index, 640, 10, 2.0, {"compute": compute, "read": 0.5, "wait": 0.1}, slowdown)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What stock TensorBoard finds in a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [
            (event.step, float(tensor_util.make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }


def test_tensorboard_reads_the_scalars_of_each_run(tmp_path: Path) -> None:
    with ScalarBoard(tmp_path) as board:
        board.write("worker 0", 10, {"samples per second": 320.0, "ms per step/pull": 1.5})
        board.write("worker 0", 20, {"samples per second": 640.0})
        board.write("server 0", 20, {"rows/items": 7.0})
    assert scalars(tmp_path / "worker 0") == {
        "samples per second": [(10, 320.0), (20, 640.0)],
        "ms per step/pull": [(10, 1.5)],
    }
    assert scalars(tmp_path / "server 0") == {"rows/items": [(20, 7.0)]}


def test_scalars_are_those_since_the_last_ones() -> None:
    before = replace(worker(0), stale_pulls=4, staleness=Staleness(10, 30, 5))
    now = WorkerReport(0, 1280, 20, 6.0, {"compute": 3.0}, stale_pulls=9, staleness=Staleness(20, 45, 7))
    found = worker_scalars(now, before)
    assert found["samples per second"] == pytest.approx(160.0)
    assert found["ms per step/whole"] == pytest.approx(400.0)
    assert found["ms per step/compute"] == pytest.approx(200.0)
    assert found["staleness/mean"] == pytest.approx(1.5)
    assert found["staleness/most so far"] == 7.0
    assert found["staleness/pulled ahead"] == pytest.approx(0.5)
    assert worker_scalars(before, before) == {}
    shard = ShardReport(0, "items", rows=5, keys=110, memory_bytes=2_000_000, moved_bytes=0)
    assert shard_scalars(shard, 10, 2.0) == {
        "rows/items": 5.0,
        "memory MB/items": 2.0,
        "keys per second/items": 50.0,
    }
    calls = call_scalars({"pull": [30, 4.0]}, {"pull": [10, 1.0]}, 2.0)
    assert calls == {"calls per second/pull": 10.0, "calls in progress/pull": 1.5}


def test_the_page_has_a_bar_for_each_stage_and_needs_no_other_file() -> None:
    shards = [ShardReport(0, "a<b", 5, 90, 1, 1), ShardReport(1, "a<b", 5, 30, 1, 1)]
    page = FitReport.of("async", [worker(0), worker(1, compute=1.8)], shards).to_html()
    assert "a&lt;b" in page
    assert "a<b" not in page
    assert "src=" not in page
    assert "href=" not in page
    assert "<script" not in page
    assert "hottest: server 0, 1.50 of the mean" in page


def test_bars_are_as_long_as_what_they_show() -> None:
    drawing = ElementTree.fromstring(
        worker_bars([worker(0, compute=1.0), worker(1, compute=2.0, slowdown=1.9)])
    )
    widths = {
        bar[0].text: float(bar.attrib["width"]) for bar in drawing.iter("{http://www.w3.org/2000/svg}rect")
    }
    assert widths["compute 200.00 ms"] == pytest.approx(2 * widths["compute 100.00 ms"], abs=0.2)
    drawing = ElementTree.fromstring(
        shard_bars([ShardReport(0, "t", 1, 90, 1, 1), ShardReport(1, "t", 1, 30, 1, 1)])
    )
    hot, cold = (float(bar.attrib["width"]) for bar in drawing.iter("{http://www.w3.org/2000/svg}rect"))
    assert hot == pytest.approx(3 * cold, abs=0.2)
    ElementTree.fromstring(shard_bars([]))


def test_of_very_many_workers_the_slowest_are_shown() -> None:
    page = FitReport.of(
        "async", [WorkerReport(i, 10, 1, 1.0 + i, {"compute": 1.0}) for i in range(300)], []
    ).to_html()
    assert page.count("<text") == 2 * MAX_BARS  # a name and a number each
    assert ">worker 299 " in page
    assert ">worker 0<" not in page


def test_wrong_options_are_refused() -> None:
    for wrong in ({"trace_steps": -1}, {"sample_every": 0}, {"interval_secs": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TracingOptions(**wrong)  # type: ignore[arg-type]


def test_a_remote_folder_gets_what_has_changed(tmp_path: Path) -> None:
    with S3Server(tmp_path) as server:
        query = f"?endpoint_override=127.0.0.1:{server.port}&scheme=http&region=us-east-1"
        output = OutputFolder(f"s3://{BUCKET}/model/tracing{query}&access_key={ACCESS}&secret_key={SECRET}")
        (output.local / "worker 0").mkdir()
        (output.local / "worker 0" / "events").write_bytes(b"one")
        output.publish()
        place = server.place("model", "tracing", "worker 0", "events")
        assert place.read_bytes() == b"one"
        (output.local / "trace.json").write_bytes(b"{}")
        place.write_bytes(b"untouched")
        output.close()
        assert server.place("model", "tracing", "trace.json").read_bytes() == b"{}"
        assert place.read_bytes() == b"untouched"
        lost = OutputFolder(f"s3://no-such-bucket/tracing{query}&access_key={ACCESS}&secret_key={SECRET}")
        (lost.local / "trace.json").write_bytes(b"{}")
        with pytest.raises(OSError, match="no-such-bucket"):
            lost.close()
    assert not output.local.exists()
    assert not lost.local.exists()


def test_nodes_that_do_not_answer_do_not_end_a_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Answer | JobError] = [
        OrderError("server 0 could not observe: TimeoutError", "TimeoutError"),
        NodeError("Order 'observe' was not answered within 60 s."),
        Answer({"calls": {}, "tables": {"items": {"rows": 5, "lookups": 7, "bytes": 64}}}),
    ]

    def ask(payload: Mapping[str, Any], everyone: bool) -> Mapping[int, Answer]:
        found = told.pop(0)
        if isinstance(found, JobError):
            raise found
        return {0: found}

    observer = FitObserver("async", num_ps=1, dims={"items": 4})
    with FitRecorder(observer, TracingOptions(tensorboard=False), str(tmp_path), 1, 1) as recorder:
        recorder.nodes_started(ask)
        recorder.epoch_end(0, step=1, results=[])
        recorder.epoch_end(1, step=2, results=[])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["(1 times so far)" in warnings[0], "(2 times so far)" in warnings[1], len(warnings)] == [
        True,
        True,
        2,
    ]
    assert observer.report().shards[0].keys == 7


def test_what_cannot_be_written_does_not_end_a_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder vanishes, and a file is in its place."""
    folder = tmp_path / "logs"
    observer = FitObserver("async", num_ps=0, dims={})
    with FitRecorder(observer, TracingOptions(log_dir=str(folder)), str(tmp_path), 0, 1) as recorder:
        observer.worker(0, {"samples": 10, "steps": 1, "seconds": 1.0, "stages": {}})
        folder.rmdir()
        folder.write_bytes(b"")
        recorder.epoch_end(0, step=1, results=[])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2  # of the scalars, and of the report
    assert all(text.startswith("What this fit tells of itself cannot be written") for text in warnings)
    assert observer.report().workers[0].samples == 10
