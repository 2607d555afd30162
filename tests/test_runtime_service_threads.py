"""The threads that serve a node beside its work go on after whatever error a call meets."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from deeprec_spark.runtime import node_control
from deeprec_spark.runtime.calls import Handler
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions
from deeprec_spark.runtime.errors import JobEndedError
from deeprec_spark.runtime.job import NodeJob, NodeSettings
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.node import NodeProcess
from deeprec_spark.runtime.node_control import NodeControl
from deeprec_spark.runtime.orders import OrderError
from deeprec_spark.runtime.transport import MessageServer
from deeprec_spark.runtime.worker_client import Heartbeat, NodeClient, WorkerClient

SECONDS = 30.0


@pytest.fixture
def serve() -> Iterator[Callable[[Mapping[str, Handler]], NodeClient]]:
    """A client of a driver with these handlers."""
    ends: list[Callable[[], None]] = []

    def start(handlers: Mapping[str, Handler]) -> NodeClient:
        server = MessageServer(handlers, host="127.0.0.1", token="secret")
        client = NodeClient(server.address, token="secret", rank=1, incarnation=1)
        ends.extend([client.close, server.stop])
        return client

    yield start
    for end in ends:
        end()


def script(*answers: Exception | Mapping[str, Any]) -> Handler:
    """A handler that answers its calls in this order."""
    left = iter(answers)

    def answer(message: Message) -> Message:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return Message(found)

    return answer


@pytest.mark.parametrize("end", [{"status": "stop"}, JobEndedError("over")])
def test_heartbeats_go_on_after_an_unforeseen_error(
    serve: Callable[[Mapping[str, Handler]], NodeClient], end: Any, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [OSError("disk"), KeyError("rank"), ValueError("odd")]
    client = serve({"heartbeat": script(*errors, {"status": "ok"}, end)})
    reasons: queue.Queue[str] = queue.Queue()
    with Heartbeat(client, interval=0.01, timeout=SECONDS, on_stop=reasons.put):
        assert reasons.get(timeout=SECONDS) == "the job has ended"
    assert sum("No heartbeat" in record.getMessage() for record in caplog.records) == len(errors)


def test_an_error_that_stays_ends_the_node_at_the_deadline(
    serve: Callable[[Mapping[str, Handler]], NodeClient],
) -> None:
    client = serve({"heartbeat": script(*[OSError("disk")] * 1000)})
    reasons: queue.Queue[str] = queue.Queue()
    with Heartbeat(client, interval=0.05, timeout=0.2, on_stop=reasons.put):
        assert "disk" in reasons.get(timeout=SECONDS)


def test_orders_are_heard_and_answered_after_an_unforeseen_error(
    serve: Callable[[Mapping[str, Handler]], NodeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_control, "_RETRY_SECONDS", 0.01)

    def order(number: int, kind: str) -> dict[str, Any]:
        return {"status": "order", "number": number, "kind": kind, "payload": {}}

    answers: queue.Queue[Mapping[str, Any]] = queue.Queue()

    def answer(message: Message) -> Message:
        answers.put(message.header)
        if message.header["data"] == {"refused": True}:
            raise OSError("cannot be kept")
        return Message()

    orders = script(
        KeyError("seen"), {"status": "order"}, ValueError("odd"), order(1, "no json"), order(2, "refused"),
        order(3, "good"), {"status": "stop"},
    )  # fmt: skip
    ended: queue.Queue[bool] = queue.Queue()
    control = NodeControl(
        serve({"order": orders, "answer": answer}),
        {
            "no json": lambda payload: ({"object": object()}, b""),
            "refused": lambda payload: ({"refused": True}, b""),
            "good": lambda payload: ({"good": True}, b""),
        },
        lambda: ended.put(True),
    )
    try:
        assert ended.get(timeout=SECONDS)
    finally:
        control.close()
    found = [(header["number"], header["data"], header["error_type"]) for header in list(answers.queue)]
    assert found == [
        (1, {}, "TypeError"),
        (2, {"refused": True}, ""),
        (2, {}, "RemoteError"),
        (3, {"good": True}, ""),
    ]


def test_an_answer_above_the_jobs_limit_is_refused_where_it_is_made() -> None:
    options = CoordinatorOptions(0, 1, max_message_bytes=100_000)
    with Coordinator(options) as coordinator:
        client = WorkerClient(coordinator.address, token=coordinator.token, rank=0)
        assert client.claim("first", "host-a", timeout=0)["status"] == "accepted"
        client.announce(None)
        settings = NodeSettings(
            0, 1, "async", coordinator.address, coordinator.token, "none:none", max_message_bytes=100_000
        )
        node = NodeProcess(NodeJob(settings, 0, client.incarnation, 1.0, SECONDS))
        try:
            with (
                node._control({"big": lambda payload: ({}, bytes(200_000))}),
                pytest.raises(OrderError, match="send less at once"),
            ):
                coordinator.order("big", timeout=SECONDS)
        finally:
            node._client.close()
            client.exited(0)
            client.close()
