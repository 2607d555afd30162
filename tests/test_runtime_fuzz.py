"""10,000 malformed messages and raw noise against each kind of server and the coordinator: all are refused."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest

from deeprec_spark.runtime import staleness
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions
from deeprec_spark.runtime.handshake import MAGIC
from deeprec_spark.runtime.messages import Message, decode, encode
from deeprec_spark.runtime.store_messages import Sender
from deeprec_spark.runtime.transport import split_address
from deeprec_spark.runtime.worker_client import WorkerClient
from tests.fuzz_servers import TOKEN, Job, Kind, server_messages, specs, step_messages
from tests.fuzzing import ChannelCaller, FlightCaller, storm
from tests.mutations import Mutator
from tests.raw_channel import RawChannel

# Together 10,000: to the coordinator, to servers of each kind, and within the rounds of synchronous ones.
TO_COORDINATOR = 2800
TO_SERVER: dict[Kind, int] = {"async": 1600, "staleness": 1600, "sync": 1400, "backup": 1400}
ROUNDS: dict[Kind, int] = {"sync": 100, "backup": 100}
"""Of three workers with two requests each, or two with three."""

# Python reports each class or function that an unpickler looks up; hooks cannot be removed, so it counts for ever.
unpickled: list[str] = []
sys.addaudithook(lambda event, _: unpickled.append(event) if event == "pickle.find_class" else None)


def surprises(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Errors of handlers that are no refusal."""
    texts = {str(record.exc_info[1]) for record in caplog.records if record.exc_info}
    return {text for text in texts if "A snapshot of the table is running already" not in text}


def coordinator_messages() -> dict[str, Message]:
    """A valid message for each method of the coordinator, of a node that does not hold its rank."""
    node = {"rank": 2, "incarnation": 77, "timeout": 0.0, "phase": 1}
    return {
        "claim": Message({"rank": 5, "attempt": "first", "host": "a", "timeout": 0.0}),
        "announce": Message({**node, "address": "127.0.0.1:1"}),
        "exited": Message({**node, "code": 1, "reason": ""}),
        "log": Message({**node, "lines": ["one", "two"]}),
        "complete": Message({**node, "index": 0}),
        "progress": Message({**node, "data": {"steps": 1}}),
        "finish": Message({**node, "data": {"steps": 1}}, {"blob": np.zeros(9, np.uint8)}),
        "fail": Message({**node, "reason": "r", "traceback": "t"}),
    }


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    options = CoordinatorOptions(1, 2, token=TOKEN, heartbeat_timeout=600.0, start_timeout=600.0)
    coordinator = Coordinator(options)
    yield coordinator
    coordinator.stop(timeout=0)


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """Of the kind that the test is given."""
    job = Job(request.param)
    yield job
    job.close()


@pytest.mark.parametrize("job", TO_SERVER, indirect=True)
def test_a_server_refuses_malformed_messages_and_goes_on(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness, "_POLL_SECONDS", 0.2)
    messages = TO_SERVER[job.kind]
    job.check()
    found = len(unpickled)
    caller = ChannelCaller(job.address, TOKEN)
    storm(caller, server_messages(job.methods), tmp_path / "loaded", job.check, messages, seed=1)
    assert job.steps >= 6
    assert len(unpickled) == found
    assert caller.outcomes["ValueError"] > messages // 3
    assert surprises(caplog) == set()


@pytest.mark.parametrize("job", ROUNDS, indirect=True)
def test_whatever_a_worker_sends_for_a_step_the_others_take_it(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request comes malformed first; where that passes for a valid one, its round must come about all the same."""
    ranks = list(job.stores)
    job.stores[1].create_tables(specs())
    zeros = np.zeros(5, np.float32)
    init = Message({"optimizer": {"type": "SGD", "learning_rate": 1.0}}, {"dense": zeros, "state": zeros})
    channel = RawChannel(job.address, TOKEN)
    assert "error" not in channel.call("init_dense", encode(init).to_pybytes()).header
    caller = ChannelCaller(job.address, TOKEN)

    def take(rank: int, number: int) -> None:
        sender = Sender(rank, 1, number)
        steps = step_messages(sender)[rank % 2 :: 2]
        if job.kind == "backup":
            steps.insert(1, ("admit", Message(sender.to_header())))
        for index, (method, message) in enumerate(steps):
            chance = Mutator(100 * number + 10 * rank + index, steps, tmp_path / "loaded")
            caller.send(method, in_the_name_of(sender, chance, index))
            answer = channel.call(method, encode(message).to_pybytes()).header
            assert "error" not in answer, (number, rank, method, answer)

    with ThreadPoolExecutor(len(ranks)) as pool:
        for number in range(1, ROUNDS[job.kind] + 1):
            list(pool.map(take, ranks, [number] * len(ranks), timeout=60))
    caller.close()
    channel.close()
    # Both happen often: some are refused, some pass.
    assert min(caller.outcomes["ValueError"], caller.outcomes["answered"]) > 50
    assert not (tmp_path / "loaded").exists()
    assert surprises(caplog) == set()


def in_the_name_of(sender: Sender, mutator: Mutator, index: int) -> bytes:
    """A mutation of one message that has this sender, or can have none."""
    while True:
        body = mutator.of(index)
        try:
            if Sender.of(decode(pa.py_buffer(body))) == sender:
                return body
        except ValueError:
            return body


def test_the_coordinator_refuses_malformed_messages_and_goes_on(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    client = WorkerClient(coordinator.address, token=TOKEN, rank=1)
    assert client.claim("mine", "host", timeout=0)["status"] == "accepted"
    client.announce(None)

    def check() -> None:
        assert client.heartbeat()

    methods = list(coordinator._server._server._handlers)
    assert set(coordinator_messages()) <= set(methods)
    found = len(unpickled)
    caller = FlightCaller(coordinator.address, TOKEN)
    common = Message({"rank": 2, "incarnation": 77, "timeout": 0.0, "phase": 1, "save_id": "s", "base": None})
    base = [(method, coordinator_messages().get(method, common)) for method in methods]
    storm(caller, base, tmp_path / "loaded", check, TO_COORDINATOR, seed=2)
    assert len(unpickled) == found
    assert caller.outcomes["ValueError"] > TO_COORDINATOR // 3
    client.close()


def noises(seed: int) -> Iterator[bytes]:
    """What strangers send to an open port."""
    chance = random.Random(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for _ in range(60):
        yield chance.randbytes(chance.randrange(1, 3000))
        yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500)
        yield preface + chance.randbytes(chance.randrange(2000))
        # A settings frame, then a frame that says it has 16 MB.
        yield preface + b"\0\0\0\x04\0\0\0\0\0" + b"\xff\xff\xff\0\0\0\0\0\x01" + chance.randbytes(1000)
        yield MAGIC + chance.randbytes(chance.randrange(200))


@pytest.mark.parametrize("job", ["async"], indirect=True)
@pytest.mark.parametrize("which", ["server", "coordinator"])
def test_noise_on_the_port_harms_nobody(which: str, job: Job, coordinator: Coordinator) -> None:
    address = job.address if which == "server" else coordinator.address
    caller = (ChannelCaller if which == "server" else FlightCaller)(address, TOKEN)
    caller.send("statistics", b"")
    process = psutil.Process()
    descriptors, memory = process.num_fds(), process.memory_info().rss
    silent = [socket.create_connection(split_address(address), 5) for _ in range(50)]
    for noise in noises(3):
        with socket.create_connection(split_address(address), 5) as stranger:
            stranger.sendall(noise)
            if noise.startswith(b"GET"):
                stranger.settimeout(5)
                stranger.recv(100)
    caller.send("statistics", b"")
    for stranger in silent:
        stranger.close()
    assert sum(caller.outcomes.values()) == 2
    assert caller.slowest < 10.0
    caller.close()
    end = time.monotonic() + 20
    pause = threading.Event()
    while process.num_fds() > descriptors + 10:
        assert time.monotonic() < end, f"{process.num_fds()} descriptors, {descriptors} before"
        pause.wait(0.1)
    assert process.memory_info().rss - memory < 200 << 20
