"""Spans of nodes on one clock, and the file that a trace viewer opens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from deeprec_spark.runtime.coordinator import Coordinator
from deeprec_spark.runtime.errors import ConnectionLostError, RemoteError
from deeprec_spark.runtime.options import CoordinatorOptions
from deeprec_spark.runtime.worker_client import NodeClient
from deeprec_spark.tracing.chrome import MAX_SPANS, JobTrace
from deeprec_spark.tracing.node import NodeObserver, clock_offset
from deeprec_spark.tracing.spans import Span, SpanRing, TraceBounds, decode_spans, encode_spans
from tests.cut_proxy import CutProxy

STEPS = {"capacity": 100, "sample_every": 1}


def test_a_clock_that_is_off_is_put_right_by_asking_the_driver() -> None:
    with Coordinator(CoordinatorOptions(num_ps=0, num_workers=1)) as coordinator:
        client = NodeClient(coordinator.address, token=coordinator.token, rank=0)
        offset, uncertainty = clock_offset(client.clock, clock=lambda: time.monotonic() + 1234.5)
        client.close()
    assert 0 < uncertainty < 1.0
    assert offset == pytest.approx(-1234.5, abs=uncertainty)


def test_a_node_times_its_calls_and_tells_spans_once() -> None:
    observer = NodeObserver(time.monotonic)
    handlers = observer.timed({"double": lambda value: 2 * value})
    assert handlers["double"](4) == 8
    data, blob = observer.observe({"trace": STEPS})
    assert (data["calls"]["double"][0], blob) == (1, b"")  # it was not asked for spans before
    before = time.monotonic()
    assert handlers["double"](5) == 10
    data, blob = observer.observe({"trace": STEPS})
    [span] = decode_spans(blob)
    assert (span.name, span.number, data["calls"]["double"][0]) == ("double", 1, 2)
    assert before <= span.start <= span.start + span.seconds <= time.monotonic()
    assert abs(data["offset"]) <= data["uncertainty"]
    assert observer.observe({"trace": None})[1] == b""
    handlers["double"](6)
    assert observer.observe({"trace": None})[1] == b""


def test_a_failed_call_is_the_callers_error_and_not_counted() -> None:
    observer = NodeObserver(time.monotonic)
    with pytest.raises(ZeroDivisionError):
        observer.timed({"divide": lambda value: 1 / value})["divide"](0)
    assert observer.observe({})[0]["calls"] == {}


@pytest.mark.parametrize("error", [TimeoutError("too late"), ConnectionLostError("gone"), RemoteError("odd")])
def test_spans_wait_for_a_clock_that_does_not_answer(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [error, *[7.0] * 5]

    def clock() -> float:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return float(found)

    observer = NodeObserver(clock)
    observer.observe({"trace": STEPS})
    observer.timed({"double": lambda value: 2 * value})["double"](4)
    data, blob = observer.observe({"trace": STEPS})
    assert (data["calls"]["double"][0], "offset" in data, blob) == (1, False, b"")
    assert str(error) in caplog.text
    data, blob = observer.observe({"trace": STEPS})
    assert ([span.name for span in decode_spans(blob)], "offset" in data) == (["double"], True)


def test_what_a_store_cannot_tell_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def tables() -> dict[str, dict[str, int]]:
        raise OSError("no such tier")

    observer = NodeObserver(time.monotonic)
    observer.tables = tables
    assert observer.observe({}) == ({"calls": {}}, b"")
    assert "no such tier" in caplog.text


def test_the_drivers_clock_is_asked_again_where_the_connection_breaks() -> None:
    with Coordinator(CoordinatorOptions(num_ps=0, num_workers=1)) as coordinator:
        proxy = CutProxy(coordinator.address)
        client = NodeClient(proxy.address, token=coordinator.token, rank=0)
        try:
            client.clock()
            proxy.arm("request", 0)
            assert abs(client.clock() - time.monotonic()) < 60
            assert proxy.cuts == 1
        finally:
            client.close()
            proxy.close()


def test_spans_survive_the_wire() -> None:
    spans = [Span("pull", "main", 1.5, 0.25, 3), Span("größe", "", 0.0, 0.0, 1)]
    assert decode_spans(encode_spans(spans)) == spans
    for damaged in (b"[1]", b"{", b'[["a", "b", "c", 0.5, 1]]', b'[["a"]]'):
        with pytest.raises(ValueError, match="Received"):
            decode_spans(damaged)


def test_the_file_has_processes_threads_and_spans_by_time(tmp_path: Path) -> None:
    trace = JobTrace(num_ps=1, num_workers=1, steps=10)
    now = time.monotonic()
    trace.add(1, [Span("compute", "MainThread", now + 100.2, 0.1, 1)], offset=-100.0, uncertainty=0.0005)
    trace.add(0, [Span("pull", "a", now + 0.1, 0.05, 1)])
    trace.driver("epoch", now, 0.4)
    trace.write(tmp_path / "trace.json")
    whole = json.loads((tmp_path / "trace.json").read_text())
    events = whole["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(names[span["pid"]], span["name"]) for span in spans] == [
        ("driver", "epoch"), ("server 0", "pull"), ("worker 0", "compute"),
    ]  # fmt: skip
    starts = [span["ts"] for span in spans]
    assert starts[1] - starts[0] == pytest.approx(1e5, abs=1)
    assert starts[2] - starts[0] == pytest.approx(2e5, abs=1)
    assert spans[2]["dur"] == pytest.approx(1e5, abs=1)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert threads[spans[2]["pid"], spans[2]["tid"]] == "MainThread"
    assert whole["otherData"]["clock uncertainty in ms"]["worker 0"] == 0.5


@pytest.mark.parametrize(("num_ps", "num_workers"), [(0, 1), (2, 2), (8, 1000)])
def test_memory_is_bounded_whatever_the_nodes_tell(num_ps: int, num_workers: int) -> None:
    trace = JobTrace(num_ps, num_workers, steps=10_000)
    nodes = num_ps + num_workers + 1
    assert 0 < trace.bounds.capacity <= MAX_SPANS // nodes
    ring = SpanRing(TraceBounds(trace.bounds.capacity))
    for number in range(1, 2 * trace.bounds.capacity):
        ring.add("pull", "main", float(number), 0.5, number)
    for _ in range(3):
        trace.add(0, [Span("pull", "main", 0.0, 1.0, 1)] * trace.bounds.capacity)
    assert len(ring.drain()) == trace.bounds.capacity
    assert sum(event["ph"] == "X" for event in trace.events()) == trace.bounds.capacity
