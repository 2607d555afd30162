"""10,000 malformed messages and raw noise against a server and the coordinator: each is refused, and both go on."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import SGD, Adagrad
from deeprec_spark.embedding.options import CounterFilter, EmbeddingVariableOption
from deeprec_spark.embedding.store import PullRequest, PushRequest, SparseGradient, TableSpec, UniqueKeys
from deeprec_spark.runtime.calls import ERRORS
from deeprec_spark.runtime.channel_server import ChannelServer
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions
from deeprec_spark.runtime.handshake import MAGIC
from deeprec_spark.runtime.messages import Message, decode
from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions
from deeprec_spark.runtime.server import ParameterServer, ServerOptions
from deeprec_spark.runtime.store_messages import Sender, encode_pull, encode_push, spec_to_dict
from deeprec_spark.runtime.transport import split_address
from deeprec_spark.runtime.worker_client import WorkerClient
from tests.mutations import Mutator
from tests.raw_channel import RawChannel

TOKEN = "fuzz-token"
MESSAGES = 10_000
DIM = 4
KEYS = np.array([1, -1, 2**62], np.int64)

# Python reports each class or function that an unpickler looks up; hooks cannot be removed, so it counts for ever.
unpickled: list[str] = []
sys.addaudithook(lambda event, _: unpickled.append(event) if event == "pickle.find_class" else None)


class GuardedStore(LocalStore):
    """Touches no files: mutated paths must not scatter any over this machine."""

    def save(self, directory: str) -> list[Any]:
        raise FileNotFoundError(directory)

    def write_snapshot(self, save_id: str, directory: str) -> list[Any]:
        raise FileNotFoundError(directory)

    def restore(self, directory: str, *more: Any) -> None:  # type: ignore[override]  # whatever a server hands over
        raise FileNotFoundError(str(directory))


class Caller:
    """Sends raw bodies and sorts the answers."""

    def __init__(self, call: Callable[[str, bytes], Message]) -> None:
        self._call = call
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0

    def send(self, method: str, body: bytes) -> None:
        """One call; its answer or error is counted, anything but those is raised."""
        started = time.monotonic()
        try:
            header = self._call(method, body).header
            self.outcomes[header["error"]["type"] if "error" in header else "answered"] += 1
        except (flight.FlightError, pa.ArrowException, UnicodeEncodeError) as error:
            self.outcomes[type(error).__name__] += 1
        self.slowest = max(self.slowest, time.monotonic() - started)


class FlightCaller(Caller):
    """To the coordinator."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        super().__init__(self._do)
        self._client = flight.FlightClient(f"grpc://{address}")
        self._options = flight.FlightCallOptions(
            timeout=10.0, headers=[(b"authorization", f"Bearer {token}".encode())]
        )

    def _do(self, method: str, body: bytes) -> Message:
        [result] = list(self._client.do_action(flight.Action(method, pa.py_buffer(body)), self._options))
        return decode(result.body)

    def close(self) -> None:
        """Close the channel."""
        self._client.close()


class ChannelCaller(Caller):
    """To a server."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self._channel = RawChannel(address, token)
        super().__init__(self._channel.call)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def server_messages() -> dict[str, Message]:
    """A valid message for each method of a server."""
    sender = Sender(rank=2, incarnation=1, sequence=1)
    option = EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=2))
    specs = [TableSpec("rows", DIM, optimizer=SGD(1.0)), TableSpec("more", 3, option, Adagrad(0.1), seed=3)]
    ones = np.ones(len(KEYS), np.int64)
    gradient = SparseGradient(KEYS, np.zeros((len(KEYS), DIM), np.float32))
    zeros = np.zeros(5, np.float32)
    return {
        "create_tables": Message({"specs": [spec_to_dict(spec) for spec in specs]}),
        "init_dense": Message({"optimizer": SGD(1.0).to_dict()}, {"dense": zeros, "state": zeros}),
        "pull": encode_pull(sender, PullRequest({"rows": UniqueKeys(KEYS, ones)})),
        "push": encode_push(sender, PushRequest({"rows": gradient}, zeros, zeros, 1, 0.1, 0.1)),
        "save": Message({"directory": "nowhere"}),
        "snapshot": Message({"save_id": "one", "base": None}),
        "write_snapshot": Message({"save_id": "one", "directory": "nowhere"}),
        "drop_snapshot": Message({"save_id": "one"}),
        "restore": Message({"chain": ["nowhere"], "directory": "nowhere", "save_id": "one"}),
    }


def coordinator_messages() -> dict[str, Message]:
    """A valid message for each method of the coordinator, of a node that does not hold its rank."""
    node = {"rank": 2, "incarnation": 77, "timeout": 0.0, "phase": 1}
    return {
        "claim": Message({"rank": 5, "attempt": "first", "host": "a", "timeout": 0.0}),
        "announce": Message({**node, "address": "127.0.0.1:1"}),
        "exited": Message({**node, "code": 1, "reason": ""}),
        "log": Message({**node, "lines": ["one", "two"]}),
        "complete": Message({**node, "index": 0, "epoch": 0}),
        "progress": Message({**node, "data": {"steps": 1}}),
        "finish": Message({**node, "data": {"steps": 1}}, {"blob": np.zeros(9, np.uint8)}),
        "fail": Message({**node, "reason": "r", "traceback": "t"}),
    }


def with_all(base: dict[str, Message], methods: Any) -> dict[str, Message]:
    """A message for methods that have none of their own."""
    common = Message({"rank": 2, "incarnation": 77, "timeout": 0.0, "phase": 1, "save_id": "s", "base": None})
    return {method: base.get(method, common) for method in methods}


@pytest.fixture
def server() -> Iterator[tuple[ChannelServer, list[str]]]:
    service = ParameterServer(GuardedStore(), ServerOptions(1, 2))
    handlers = service.handlers()
    server = ChannelServer(handlers, host="127.0.0.1", token=TOKEN)
    yield server, list(handlers)
    service.stop()
    server.stop()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    options = CoordinatorOptions(1, 2, token=TOKEN, heartbeat_timeout=600.0, start_timeout=600.0)
    coordinator = Coordinator(options)
    yield coordinator
    coordinator.stop(timeout=0)


def fuzz(
    caller: FlightCaller | ChannelCaller,
    base: dict[str, Message],
    marker: Path,
    check: Callable[[], None],
    seed: int,
) -> None:
    """Send half of all messages from four threads, checking on the way that the other side still works."""
    process = psutil.Process()
    before = process.memory_info().rss
    mutators = [Mutator(1000 * seed + number, base, marker) for number in range(4)]
    rounds = 5
    share = MESSAGES // 2 // len(mutators) // rounds

    def send(mutator: Mutator) -> None:
        for _ in range(share):
            caller.send(*mutator.next())

    for _ in range(rounds):
        with ThreadPoolExecutor(len(mutators)) as pool:
            list(pool.map(send, mutators, timeout=120))
        check()
    caller.close()
    grown = process.memory_info().rss - before
    assert sum(caller.outcomes.values()) == MESSAGES // 2
    assert grown < 300 << 20, f"{grown >> 20} MiB more memory"
    assert caller.slowest < 10.0
    assert not marker.exists()
    # Anything else would be a handler's surprise. The RuntimeError is that of a second snapshot at a time.
    expected = {
        "answered",
        *ERRORS,
        "UnicodeEncodeError",
        "ArrowInvalid",
        "FlightServerError",
        "RuntimeError",
    }
    assert set(caller.outcomes) <= expected, caller.outcomes


def test_a_server_refuses_malformed_messages_and_goes_on(
    server: tuple[ChannelServer, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, methods = server
    store = RemoteStore([endpoint.address], RemoteStoreOptions(TOKEN, rank=1, step_timeout=20.0))
    store.create_tables([TableSpec("mine", DIM, optimizer=SGD(1.0))])
    pushed = 0

    def check() -> None:
        nonlocal pushed
        ones = np.ones(len(KEYS), np.int64)
        request = PullRequest({"mine": UniqueKeys(KEYS, ones)}, dense=False)
        before = store.pull(request).rows["mine"].copy()
        store.push(
            PushRequest({"mine": SparseGradient(KEYS, -np.ones((len(KEYS), DIM), np.float32))}, None, None, 1)
        )
        pushed += 1
        np.testing.assert_allclose(store.pull(request).rows["mine"], before + 1, rtol=1e-6)

    check()
    found = len(unpickled)
    caller = ChannelCaller(endpoint.address)
    fuzz(caller, with_all(server_messages(), methods), tmp_path / "loaded", check, seed=1)
    assert pushed == 6
    assert len(unpickled) == found
    assert caller.outcomes["ValueError"] > 2000
    surprises = [text for record in caplog.records if record.exc_info for text in [str(record.exc_info[1])]]
    assert {text for text in surprises if "A snapshot of the table is running already" not in text} == set()
    store.close()


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
    caller = FlightCaller(coordinator.address)
    fuzz(caller, with_all(coordinator_messages(), methods), tmp_path / "loaded", check, seed=2)
    assert len(unpickled) == found
    assert caller.outcomes["ValueError"] > 2000
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


@pytest.mark.parametrize("which", ["server", "coordinator"])
def test_noise_on_the_port_harms_nobody(which: str, request: pytest.FixtureRequest) -> None:
    caller: FlightCaller | ChannelCaller
    if which == "server":
        endpoint, _ = request.getfixturevalue("server")
        address = endpoint.address
        caller = ChannelCaller(address)
    else:
        address = request.getfixturevalue("coordinator").address
        caller = FlightCaller(address)
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
