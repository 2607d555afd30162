"""What only channels have: Unix sockets, connections that are kept, frames, and an end that waits for running calls."""

from __future__ import annotations

import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from deeprec_spark.runtime import channel_server
from deeprec_spark.runtime.channel import Channel
from deeprec_spark.runtime.channel_server import ChannelServer
from deeprec_spark.runtime.errors import ConnectionLostError
from deeprec_spark.runtime.frames import HEAD_BYTES
from deeprec_spark.runtime.handshake import RefusedError, introduce
from deeprec_spark.runtime.messages import Message, encode
from deeprec_spark.runtime.stream import ClosedError, Stream
from deeprec_spark.runtime.transport import TlsOptions, split_address
from deeprec_spark.tracing.node import NodeObserver
from deeprec_spark.tracing.spans import decode_spans
from tests.raw_channel import RawChannel, dial

TOKEN = "token"


class Service:
    """Handlers, one of which waits until it may end."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.may_end = threading.Event()

    def wait(self, message: Message) -> Message:
        self.entered.set()
        assert self.may_end.wait(30)
        return Message({"waited": True})

    @staticmethod
    def echo(message: Message) -> Message:
        return Message(message.header, message.arrays)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.may_end.set()


def serve(service: Service, **options: object) -> ChannelServer:
    handlers = {"echo": service.echo, "wait": service.wait}
    return ChannelServer(handlers, host="127.0.0.1", token=TOKEN, **options)  # type: ignore[arg-type]


@pytest.fixture
def server(service: Service) -> Iterator[ChannelServer]:
    server = serve(service)
    yield server
    service.may_end.set()
    server.stop()


@pytest.mark.parametrize("local", [True, False])
def test_one_host_meets_at_the_unix_socket(server: ChannelServer, local: bool) -> None:
    channel = Channel(server.address, token=TOKEN, local=local)
    channel.call("echo", Message())
    [stream] = channel._idle
    assert (stream._socket.family == socket.AF_UNIX) is local
    channel.close()


def test_without_a_unix_socket_it_is_tcp(service: Service) -> None:
    server = serve(service, local=False)
    channel = Channel(server.address, token=TOKEN)
    assert channel.call("echo", Message({"on": True})).header == {"on": True}
    [stream] = channel._idle
    assert stream._socket.family == socket.AF_INET
    channel.close()
    server.stop()


@pytest.mark.parametrize("token", ["", TOKEN])
def test_the_unix_socket_takes_no_one_who_was_not_told_of_it(server: ChannelServer, token: str) -> None:
    """Names of sockets can be read in /proc by everybody on a host; the token alone does not do there."""
    assert server._door is not None
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(b"\0" + server._door.name)
        stream = Stream(stranger)
        with pytest.raises(RefusedError):
            introduce(stream, token, time.monotonic() + 20)
        with pytest.raises(ClosedError):
            stream.receive(memoryview(bytearray(1)), time.monotonic() + 20)


def test_whoever_else_has_the_name_of_the_unix_socket_is_left_alone(
    server: ChannelServer, service: Service
) -> None:
    other = serve(service)
    assert server._door is not None
    assert other._door is not None
    channel = Channel(server.address, token=TOKEN)
    channel._door = replace(server._door, name=other._door.name)
    assert channel.call("echo", Message({"on": True})).header == {"on": True}
    [stream] = channel._idle
    assert stream._socket.getpeername().removeprefix(b"\0") == server._door.name
    channel.close()
    other.stop()


def test_connections_are_kept_and_each_call_at_a_time_has_its_own(
    server: ChannelServer, service: Service
) -> None:
    channel = Channel(server.address, token=TOKEN)
    for _ in range(5):
        channel.call("echo", Message())
    assert len(channel._idle) == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.call, "wait", Message())
        assert service.entered.wait(20)
        assert channel.call("echo", Message({"beside": True})).header == {"beside": True}
        service.may_end.set()
        assert waiting.result(20).header == {"waited": True}
    assert len(channel._idle) == 2
    channel.close()
    with pytest.raises(ConnectionLostError, match="the channel is closed"):
        channel.call("echo", Message())


def test_calls_at_a_time_are_of_threads_with_names_of_their_own() -> None:
    """A trace has a track for each thread's name, on which spans must not overlap."""
    together = threading.Barrier(2, timeout=30)

    def meet(message: Message) -> Message:
        together.wait()
        return Message({"thread": threading.current_thread().name})

    observer = NodeObserver(time.monotonic)
    observer.observe({"trace": {"capacity": 10}})
    server = ChannelServer(observer.timed({"meet": meet}), host="127.0.0.1", token=TOKEN, local=False)
    for _ in range(3):  # numbers of connections that have ended are given again
        channels = [Channel(server.address, token=TOKEN) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda channel: channel.call("meet", Message()).header["thread"], channels))
        for channel in channels:
            channel.close()
        with server._lock:
            assert server._lock.wait_for(lambda: not server._threads, 30)
        assert sorted(found) == ["channel 1", "channel 2"]
    server.stop()
    _, blob = observer.observe({"trace": {"capacity": 10}})
    assert [span.thread for span in decode_spans(blob)].count("channel 1") == 3


def test_closing_a_channel_ends_its_running_calls(server: ChannelServer, service: Service) -> None:
    channel = Channel(server.address, token=TOKEN)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.call, "wait", Message())
        assert service.entered.wait(20)
        channel.close()
        with pytest.raises(ConnectionLostError, match="cannot be reached for wait"):
            waiting.result(20)


def test_the_end_waits_for_running_calls_and_for_nothing_else(service: Service) -> None:
    server = serve(service)
    busy, idle = Channel(server.address, token=TOKEN), Channel(server.address, token=TOKEN)
    idle.call("echo", Message())
    half = dial(server.address, TOKEN)
    half.send([b"DRF1" + bytes(10)], None)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(busy.call, "wait", Message())
        assert service.entered.wait(20)
        stopped = pool.submit(server.stop)
        with pytest.raises(ClosedError):
            half.receive(memoryview(bytearray(1)), time.monotonic() + 20)
        assert not stopped.done()
        service.may_end.set()
        assert waiting.result(20).header == {"waited": True}
        stopped.result(20)
    with pytest.raises(ConnectionLostError):
        idle.call("echo", Message())
    for channel in (busy, idle):
        channel.close()
    half.close()
    assert server._threads == {}


def test_a_call_that_does_not_end_is_cut_off_at_the_ends_deadline(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(service)
    channel = Channel(server.address, token=TOKEN)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.call, "wait", Message())
        assert service.entered.wait(20)
        server.stop(timeout=0.2)
        with pytest.raises(ConnectionLostError):
            waiting.result(20)
    assert "still answers calls" in caplog.text
    channel.close()


def test_a_server_that_comes_back_is_found_again(service: Service) -> None:
    first = serve(service)
    _, port = split_address(first.address)
    channel = Channel(first.address, token=TOKEN)
    channel.call("echo", Message())
    first.stop()
    second = serve(service, port=port)
    with pytest.raises(ConnectionLostError):
        channel.call("echo", Message())
    assert channel.call("echo", Message({"again": 1})).header == {"again": 1}
    channel.close()
    second.stop()


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"XXXX" + bytes(60), id="another magic"),
        pytest.param(struct.pack("<4s4xQ48s", b"DRF1", 1 << 60, b"echo"), id="a size beyond all"),
    ],
)
def test_what_is_no_frame_ends_its_connection_alone(server: ChannelServer, frame: bytes) -> None:
    assert len(frame) == HEAD_BYTES
    stream = dial(server.address, TOKEN)
    stream.send([frame], None)
    with pytest.raises(ConnectionError):
        stream.receive(memoryview(bytearray(1)), time.monotonic() + 20)
    stream.close()
    channel = Channel(server.address, token=TOKEN)
    assert channel.call("echo", Message({"on": True})).header == {"on": True}
    channel.close()


def test_a_message_above_the_limit_is_dropped_and_its_connection_goes_on(service: Service) -> None:
    server = serve(service, max_bytes=100_000)
    raw = RawChannel(server.address, TOKEN)
    answer = raw.call("echo", encode(Message({}, {"a": np.zeros(2_000_000)})).to_pybytes())
    assert "may have 100000 bytes" in answer.header["error"]["message"]
    stream = raw._mine.stream
    assert raw.call("echo", encode(Message({"on": True})).to_pybytes()).header == {"on": True}
    assert raw._mine.stream is stream
    raw.close()
    server.stop()


def test_who_stops_within_a_message_is_cut_off(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_server, "TRANSFER_SECONDS", 0.3)
    stream = dial(server.address, TOKEN)
    stream.send([struct.pack("<4s4xQ48s", b"DRF1", 1000, b"echo"), bytes(500)], None)
    with pytest.raises(ConnectionError):
        stream.receive(memoryview(bytearray(1)), time.monotonic() + 20)
    stream.close()


def heard(stranger: socket.socket) -> int:
    """How many bytes come until the server ends the connection."""
    stranger.settimeout(20)
    count = 0
    with suppress(ConnectionResetError):
        while part := stranger.recv(100):
            count += len(part)
    return count


def stranger_to(server: ChannelServer, host: str = "127.0.0.1") -> socket.socket:
    """A connection whose end says nothing."""
    return socket.create_connection(split_address(server.address), 20, source_address=(host, 0))


def test_who_says_nothing_or_takes_its_time_is_cut_off(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_server, "HANDSHAKE_SECONDS", 1.0)
    server = serve(service, local=False)
    friend = Channel(server.address, token=TOKEN)
    friend.call("echo", Message())
    with stranger_to(server) as silent, stranger_to(server) as slow, ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(heard, one) for one in (silent, slow)]
        began = time.monotonic()
        with suppress(OSError):
            while not ends[1].done():
                slow.send(b"D")
                wait([ends[1]], timeout=0.1)
        assert [end.result(20) for end in ends] == [36, 36]
        # One deadline for all of it: what trickles in does not put it off.
        assert time.monotonic() - began < 10
    assert friend.call("echo", Message({"on": True})).header == {"on": True}
    friend.close()
    server.stop()


@pytest.mark.parametrize("with_tls", [False, True])
def test_strangers_keep_nobody_out_who_knows_the_token(
    service: Service, monkeypatch: pytest.MonkeyPatch, tls: TlsOptions, with_tls: bool
) -> None:
    monkeypatch.setattr(channel_server, "MAX_STRANGERS", 3)
    monkeypatch.setattr(channel_server, "HANDSHAKE_SECONDS", 300.0)
    server = serve(service, local=False, tls=tls if with_tls else None)
    strangers = [stranger_to(server) for _ in range(3)]
    for number in range(5):
        friend = Channel(server.address, token=TOKEN, tls=tls if with_tls else None)
        assert friend.call("echo", Message({"on": number})).header == {"on": number}
        strangers.append(stranger_to(server))
        friend.close()
    # The oldest had to go, each for a newer one; that they did is what made room.
    assert {heard(stranger) for stranger in strangers[:5]} <= {0, 36}
    for stranger in strangers:
        stranger.close()
    server.stop()


def test_many_strangers_of_one_host_do_not_push_out_another_one(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_server, "MAX_STRANGERS", 3)
    monkeypatch.setattr(channel_server, "HANDSHAKE_SECONDS", 300.0)
    server = serve(service, local=False)
    with stranger_to(server) as friend:
        crowd = [stranger_to(server, "127.0.0.2") for _ in range(6)]
        assert {heard(stranger) for stranger in crowd[:4]} <= {0, 36}
        assert introduce(Stream(friend), TOKEN, time.monotonic() + 20) is None
    for stranger in crowd:
        stranger.close()
    server.stop()


def test_a_peer_that_does_not_read_does_not_hold_a_sender_beyond_its_deadline() -> None:
    mine, theirs = socket.socketpair()
    stream = Stream(mine)
    with theirs, pytest.raises(TimeoutError):
        stream.send([bytes(50_000_000)], time.monotonic() + 0.3)
    stream.close()


def test_many_parts_are_sent_in_several_calls_and_arrive_in_order() -> None:
    mine, theirs = socket.socketpair()
    sender, receiver = Stream(mine), Stream(theirs)
    parts = [np.full(1 + index % 7, index % 251, np.uint8) for index in range(3000)]
    expected = np.concatenate(parts)
    got = np.empty_like(expected)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, parts, time.monotonic() + 20)
        receiver.receive(memoryview(got), time.monotonic() + 20)
        sent.result(20)
    assert np.array_equal(got, expected)
    sender.close()
    receiver.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsOptions:
    """A certificate of this host, which is its own authority."""
    place = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
            ),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", place / "key.pem", "-out", place / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    return TlsOptions(str(place / "cert.pem"), str(place / "key.pem"), str(place / "cert.pem"))


def test_with_tls_the_handshake_of_a_local_client_is_over_tls_too(
    service: Service, tls: TlsOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_server, "HANDSHAKE_SECONDS", 2.0)
    server = serve(service, tls=tls)
    channel = Channel(server.address, token=TOKEN, tls=tls)
    assert channel.call("echo", Message({"on": True})).header == {"on": True}
    assert channel._idle[0]._socket.family == socket.AF_UNIX
    channel.close()
    # Without the certificate nobody learns where the Unix socket is.
    plain = Channel(server.address, token=TOKEN, timeout=20)
    with pytest.raises(ConnectionLostError):
        plain.call("echo", Message())
    assert plain._door is None
    plain.close()
    server.stop()


def test_without_a_certificate_nobody_gets_as_far_as_the_token(service: Service, tls: TlsOptions) -> None:
    server = serve(service, tls=replace(tls, verify_client=True))
    assert server._door is not None
    nameless = Channel(server.address, token=TOKEN, tls=tls, timeout=20)
    with pytest.raises(ConnectionLostError):
        nameless.call("echo", Message())
    assert nameless._door is None
    nameless.close()
    # Nor on the server's own host, though the token is right and the socket's name was found.
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(b"\0" + server._door.name)
        with pytest.raises(RefusedError):
            introduce(Stream(connected), TOKEN, time.monotonic() + 20)
    named = Channel(server.address, token=TOKEN, tls=replace(tls, verify_client=True))
    assert named.call("echo", Message({"on": True})).header == {"on": True}
    assert named._idle[0]._socket.family == socket.AF_UNIX
    named.close()
    server.stop()
