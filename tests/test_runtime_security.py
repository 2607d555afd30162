"""Who may call, what decoding refuses, how large a message may be, and what never shows a secret."""

from __future__ import annotations

import hmac
import io
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from deeprec_spark.data.arrays import unpack_arrays
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.store import PullRequest, TableSpec, UniqueKeys
from deeprec_spark.runtime import transport
from deeprec_spark.runtime.channel import Channel
from deeprec_spark.runtime.channel_server import ChannelServer
from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions
from deeprec_spark.runtime.errors import ConnectionLostError
from deeprec_spark.runtime.frames import send_frame
from deeprec_spark.runtime.handshake import ANSWER_BYTES, MAGIC
from deeprec_spark.runtime.job import NodeJob, NodeSettings
from deeprec_spark.runtime.launch import LaunchOptions
from deeprec_spark.runtime.messages import Message, decode, encode
from deeprec_spark.runtime.remote_store import RemoteStore, RemoteStoreOptions
from deeprec_spark.runtime.server import ParameterServer, ServerOptions
from deeprec_spark.runtime.stream import Stream
from deeprec_spark.runtime.transport import Connection, split_address
from deeprec_spark.runtime.worker_client import NodeClient, WorkerClient
from tests.mutations import Exploit
from tests.raw_channel import RawChannel

TOKEN = "the-job's-secret"


@pytest.fixture
def endpoints() -> Iterator[dict[str, tuple[str, list[str]]]]:
    """Address and methods of every public endpoint of a job."""
    service = ParameterServer(LocalStore(), ServerOptions(1, 2))
    server = ChannelServer(service.handlers(), host="127.0.0.1", token=TOKEN)
    coordinator = Coordinator(CoordinatorOptions(1, 2, token=TOKEN))
    yield {
        "server": (server.address, list(service.handlers())),
        "coordinator": (coordinator.address, list(coordinator._server._server._handlers)),
    }
    coordinator.stop(timeout=0)
    service.stop()
    server.stop()


def flight_calls(
    client: flight.FlightClient, options: flight.FlightCallOptions, methods: list[str]
) -> dict[str, Callable[[], Any]]:
    """Every call that Arrow Flight has, and every method of the endpoint."""
    schema = pa.schema([("a", pa.int64())])
    descriptor = flight.FlightDescriptor.for_command(b"x")

    def put() -> None:
        writer, _ = client.do_put(descriptor, schema, options)
        writer.write_batch(pa.record_batch([[1]], schema))
        writer.close()

    def exchange() -> None:
        writer, reader = client.do_exchange(descriptor, options)
        writer.done_writing()
        reader.read_chunk()

    calls: dict[str, Callable[[], Any]] = {
        "list_flights": lambda: list(client.list_flights(options=options)),
        "list_actions": lambda: list(client.list_actions(options)),
        "get_flight_info": lambda: client.get_flight_info(descriptor, options),
        "get_schema": lambda: client.get_schema(descriptor, options),
        "do_get": lambda: client.do_get(flight.Ticket(b"x"), options).read_all(),
        "do_put": put,
        "do_exchange": exchange,
    }
    body = encode(Message({"rank": 1, "incarnation": 1, "timeout": 0.0}))
    for method in [*methods, "no such method"]:
        action = flight.Action(method, body)
        calls[f"do_action {method}"] = lambda action=action: list(client.do_action(action, options))
    return calls


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param([], id="none"),
        pytest.param([(b"authorization", b"")], id="empty"),
        pytest.param([(b"authorization", b"Bearer ")], id="empty token"),
        pytest.param([(b"authorization", b"Bearer another-job's-secret")], id="another job's"),
        pytest.param([(b"authorization", TOKEN.encode())], id="no scheme"),
        pytest.param([(b"authorization", f"bearer {TOKEN}".encode())], id="other scheme"),
        pytest.param([(b"authorization", f"Bearer {TOKEN}x".encode())], id="longer"),
        pytest.param([(b"authorization", f"Bearer {TOKEN[:-1]}".encode())], id="shorter"),
        pytest.param([(b"authorization", f"Bearer {TOKEN}".encode())] * 2, id="twice"),
        pytest.param([(b"token", TOKEN.encode())], id="other header"),
    ],
)
def test_no_call_of_any_kind_without_the_token(
    endpoints: dict[str, tuple[str, list[str]]], headers: list[tuple[bytes, bytes]]
) -> None:
    address, methods = endpoints["coordinator"]
    client = flight.FlightClient(f"grpc://{address}")
    options = flight.FlightCallOptions(timeout=20, headers=headers)
    calls = flight_calls(client, options, methods)
    assert len(calls) > 12
    for name, call in calls.items():
        # Streams report it as an OSError of the same text.
        with pytest.raises((flight.FlightUnauthenticatedError, OSError), match="this job's token") as caught:
            call()
        assert TOKEN not in str(caught.value), name
    client.close()


def test_with_the_token_calls_get_through(endpoints: dict[str, tuple[str, list[str]]]) -> None:
    address, methods = endpoints["coordinator"]
    client = flight.FlightClient(f"grpc://{address}")
    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    for name, call in flight_calls(
        client, flight.FlightCallOptions(timeout=30, headers=headers), methods
    ).items():
        if name.startswith("do_action"):
            [result] = call()
            assert isinstance(decode(result.body), Message)
        else:  # the kinds of calls that are not served
            with pytest.raises((flight.FlightError, pa.ArrowException)) as caught:
                call()
            assert not isinstance(caught.value, flight.FlightUnauthenticatedError)
    client.close()


def test_every_method_of_a_server_answers_whoever_knows_the_token(
    endpoints: dict[str, tuple[str, list[str]]],
) -> None:
    address, methods = endpoints["server"]
    channel = RawChannel(address, TOKEN)
    for method in [*methods, "no such method"]:
        assert isinstance(channel.call(method, encode(Message({"rank": 1})).to_pybytes()), Message)
    channel.close()


@pytest.mark.parametrize(
    "proof",
    [
        pytest.param(b"", id="none"),
        pytest.param(MAGIC + bytes(64), id="zeros"),
        pytest.param(MAGIC + TOKEN.encode().ljust(64), id="the token itself"),
        pytest.param(b"XXXX" + bytes(64), id="another protocol"),
        pytest.param(hmac.digest(TOKEN.encode(), b"client" + bytes(64), "sha256"), id="of other nonces"),
    ],
)
def test_a_server_reads_no_request_before_the_proof(
    endpoints: dict[str, tuple[str, list[str]]], proof: bytes
) -> None:
    body = encode(Message()).to_pybytes()
    with socket.create_connection(split_address(endpoints["server"][0]), 20) as stranger:
        stream = Stream(stranger)
        greeting = memoryview(bytearray(len(MAGIC) + 32))
        stream.receive(greeting, time.monotonic() + 20)
        said = b""
        with suppress(OSError):  # the server may have cut us off already
            stream.send([proof], None)
            send_frame(stream, "statistics", [body], len(body), time.monotonic() + 20)
            stranger.shutdown(socket.SHUT_WR)
            while part := stranger.recv(4096):
                said += part
    assert said in (b"", MAGIC + b"\1" + bytes(128))


def test_a_recorded_handshake_is_of_no_use(endpoints: dict[str, tuple[str, list[str]]]) -> None:
    address = split_address(endpoints["server"][0])
    nonce = bytes(32)

    def greeted(connected: socket.socket) -> tuple[Stream, bytes]:
        stream = Stream(connected)
        greeting = bytearray(len(MAGIC) + 32)
        stream.receive(memoryview(greeting), time.monotonic() + 20)
        return stream, bytes(greeting[len(MAGIC) :])

    def status(stream: Stream) -> int:
        answer = bytearray(ANSWER_BYTES)
        stream.receive(memoryview(answer), time.monotonic() + 20)
        return answer[len(MAGIC)]

    with socket.create_connection(address, 20) as first:
        stream, theirs = greeted(first)
        proof = MAGIC + nonce + hmac.digest(TOKEN.encode(), b"client" + theirs + nonce, "sha256")
        stream.send([proof], None)
        assert status(stream) == 0
    with socket.create_connection(address, 20) as second:
        stream, _ = greeted(second)
        stream.send([proof], None)
        assert status(stream) == 1


def test_a_client_tells_an_impostor_nothing() -> None:
    """Something else has the server's port: it learns no token, gets no request, and no proof that it could use."""
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:

        def pose() -> bytes:
            connected, _ = impostor.accept()
            with connected:
                connected.settimeout(20)
                connected.sendall(MAGIC + bytes(32))
                heard = connected.recv(4096)
                connected.sendall(MAGIC + b"\0" + bytes(32 + 96))
                while part := connected.recv(4096):
                    heard += part
                return heard

        heard = pool.submit(pose)
        channel = Channel(f"127.0.0.1:{impostor.getsockname()[1]}", token=TOKEN, timeout=20)
        with pytest.raises(ConnectionLostError, match="does not know the job's token"):
            channel.call("statistics", Message({"secret": "hush"}))
        channel.close()
        told = heard.result(20)
    assert len(told) == len(MAGIC) + 64
    assert TOKEN.encode() not in told
    assert b"hush" not in told


def test_tokens_are_compared_in_constant_time(
    endpoints: dict[str, tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[Any, Any]] = []
    exactly = hmac.compare_digest

    def compare(given: Any, expected: Any) -> bool:
        compared.append((given, expected))
        return exactly(given, expected)

    monkeypatch.setattr(transport.hmac, "compare_digest", compare)
    for token in ("", "a", TOKEN[:-1] + "x", TOKEN):
        connection = Connection(endpoints["coordinator"][0], token=token)
        with nullcontext() if token == TOKEN else pytest.raises(PermissionError, match="wrong token"):
            connection.call("statistics", Message()) if token != TOKEN else claim(connection)
        connection.close()
    expected = f"Bearer {TOKEN}".encode()
    # Bytes of the whole header, right or wrong: nothing is looked at before.
    assert [pair[1] for pair in compared] == [expected] * 4
    assert [pair[0] for pair in compared][-1] == expected
    compared.clear()
    for token in ("", "a", TOKEN[:-1] + "x", TOKEN):
        channel = Channel(endpoints["server"][0], token=token, local=False)
        with nullcontext() if token == TOKEN else pytest.raises(PermissionError, match="wrong token"):
            channel.call("statistics", Message())
        channel.close()
    # The server's four, of the magic and a digest of fixed size, and the client's own.
    assert [len(pair[0]) for pair in compared] == [len(MAGIC) + 32] * 4 + [32]
    assert [len(pair[1]) for pair in compared] == [len(MAGIC) + 32] * 4 + [32]


def claim(connection: Connection) -> None:
    """A call of the coordinator that anybody with the token may make."""
    connection.call("claim", Message({"rank": 1, "attempt": "first", "host": "a", "timeout": 0.0}))


def test_tokens_are_long_and_differ() -> None:
    tokens = {CoordinatorOptions(0, 1).token for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 40


def test_pickles_are_not_loaded_wherever_bytes_come_in(
    endpoints: dict[str, tuple[str, list[str]]], tmp_path: Path
) -> None:
    marker = tmp_path / "loaded"
    evil = pickle.dumps(Exploit(marker))
    pickle.loads(evil)
    assert marker.exists()  # the trap works
    marker.unlink()
    with pytest.raises(ValueError, match="Not a message"):
        decode(pa.py_buffer(evil))
    objects = np.empty(2, dtype=object)
    objects[:] = [Exploit(marker), None]
    with pytest.raises(ValueError, match="cannot be sent: numbers of one dtype only"):
        encode(Message({}, {"objects": objects}))
    for saved in (lambda stream: np.save(stream, objects), lambda stream: np.savez(stream, objects)):
        stream = io.BytesIO()
        saved(stream)
        with pytest.raises(ValueError, match=r"Not arrays.*(allow_pickle=False|pickled)"):
            unpack_arrays(stream.getvalue())
    with pytest.raises(ValueError, match="Not arrays"):
        unpack_arrays(evil)
    address, methods = endpoints["coordinator"]
    client = flight.FlightClient(f"grpc://{address}")
    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    options = flight.FlightCallOptions(timeout=20, headers=headers)
    for method in methods:
        [result] = client.do_action(flight.Action(method, pa.py_buffer(evil)), options)
        assert "Not a message" in decode(result.body).header["error"]["message"]
    client.close()
    address, methods = endpoints["server"]
    channel = RawChannel(address, TOKEN)
    for method in methods:
        assert "Not a message" in channel.call(method, evil).header["error"]["message"]
    channel.close()
    assert not marker.exists()


def test_a_phases_result_stays_bytes(tmp_path: Path) -> None:
    marker = tmp_path / "loaded"
    message = Message(
        {"rank": 1, "data": {}}, {"blob": np.frombuffer(pickle.dumps(Exploit(marker)), np.uint8)}
    )
    assert decode(encode(message)).array("blob", np.uint8).tobytes() == pickle.dumps(Exploit(marker))
    assert not marker.exists()


def test_the_size_of_messages_is_an_option_of_the_job() -> None:
    coordinator = Coordinator(CoordinatorOptions(1, 1, token=TOKEN, max_message_bytes=20_000))
    settings = LaunchOptions.of(coordinator, "module:function").settings()
    assert settings.max_message_bytes == 20_000
    client = NodeClient(coordinator.address, token=TOKEN, rank=1)
    assert client.claim("first", "host", timeout=0)["status"] == "accepted"
    with pytest.raises(
        ValueError, match=r"may have 20000 bytes \(cluster.max_message_mb\). Received: \d+ bytes"
    ):
        client.log(["x" * 30_000])
    client.log(["short"])
    small = WorkerClient(coordinator.address, token=TOKEN, rank=1, max_bytes=1000)
    with pytest.raises(
        ValueError, match=r"send less at once \(a smaller batch_size\), or raise cluster.max_message_mb"
    ):
        small.log(["x" * 5000])
    small.close()
    client.close()
    coordinator.stop(timeout=0)


def test_answers_are_limited_too() -> None:
    service = ParameterServer(LocalStore(), ServerOptions(1, 1))
    server = ChannelServer(service.handlers(), host="127.0.0.1", token=TOKEN, max_bytes=50_000)
    store = RemoteStore([server.address], RemoteStoreOptions(TOKEN, rank=1))
    store.create_tables([TableSpec("wide", 64)])

    def pull(rows: int) -> PullRequest:
        return PullRequest({"wide": UniqueKeys(np.arange(rows), np.ones(rows, np.int64))}, dense=False)

    with pytest.raises(ValueError, match="may have 50000 bytes"):
        store.pull(pull(1000))
    assert store.pull(pull(10)).rows["wide"].shape == (10, 64)
    store.close()
    server.stop()


def test_options_do_not_show_secrets() -> None:
    environment = {"AWS_SECRET_ACCESS_KEY": "hush"}
    settings = NodeSettings(1, 1, "async", "host:1", TOKEN, "a:b", environment=environment)
    shown = [
        CoordinatorOptions(1, 1, token=TOKEN),
        LaunchOptions(1, 1, "host:1", TOKEN, "a:b", b"payload-hush", env=environment),
        settings,
        NodeJob(settings, 1, 1, 1.0, 10.0, payload=b"payload-hush"),
        RemoteStoreOptions(TOKEN),
    ]
    for options in shown:
        assert TOKEN not in repr(options)
        assert "hush" not in repr(options)


def test_a_failure_is_reported_without_secrets(endpoints: dict[str, tuple[str, list[str]]]) -> None:
    client = WorkerClient(endpoints["coordinator"][0], token=TOKEN, rank=1)
    sent: list[Message] = []

    def record(method: str, message: Message, **_: Any) -> Message:
        sent.append(message)
        return Message()

    client._connection.call = record  # type: ignore[method-assign]
    client.fail(ValueError(f"token {TOKEN}; s3://AKIA:hush@bucket/x?secret_key=hush"))
    text = str(sent[0].header)
    assert "ValueError: token *****; s3://AKIA:*****@bucket/x" in text
    assert TOKEN not in text
    assert "hush" not in text.replace(
        'hush@bucket/x?secret_key=hush")', ""
    )  # the source line of this very test
    client.close()
