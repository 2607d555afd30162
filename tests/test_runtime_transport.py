"""Calls: token, TLS, deadlines, errors, and servers that go on after bad messages."""

import subprocess
import threading
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from deeprec_spark.runtime.calls import retried
from deeprec_spark.runtime.channel import Channel
from deeprec_spark.runtime.channel_server import ChannelServer
from deeprec_spark.runtime.errors import ConnectionLostError, RemoteError, StaleNodeError
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.transport import (
    Connection,
    MessageServer,
    TlsOptions,
    join_address,
    local_host_towards,
    split_address,
)

TOKEN = "secret-token"


class Handlers:
    """Handlers under test; `release` ends the waiting one."""

    def __init__(self):
        self.release = threading.Event()
        self.calls = 0

    def table(self):
        return {"echo": self.echo, "raise": self.raise_, "wait": self.wait}

    def echo(self, message):
        self.calls += 1
        return Message(message.header, message.arrays)

    def raise_(self, message):
        kinds = {
            "ValueError": ValueError,
            "KeyError": KeyError,
            "Stale": StaleNodeError,
            "Other": ZeroDivisionError,
        }
        raise kinds[message.header["kind"]]("what happened")

    def wait(self, message):
        self.release.wait(30)
        return Message()


class Flight:
    """The coordinator's transport."""

    server, client = MessageServer, Connection


class OverTcp:
    """The servers' transport, between hosts."""

    server, client = ChannelServer, partial(Channel, local=False)


class OverUnix:
    """The servers' transport, on one host."""

    server, client = ChannelServer, Channel


@pytest.fixture(params=[Flight, OverTcp, OverUnix])
def way(request):
    return request.param


@pytest.fixture
def handlers():
    return Handlers()


@pytest.fixture
def start(way, handlers):
    """Starts servers of that transport, which end with the test."""
    servers = []

    def start(**options):
        servers.append(way.server(handlers.table(), host="127.0.0.1", token=TOKEN, **options))
        return servers[-1]

    yield start
    handlers.release.set()
    for server in servers:
        server.stop()


@pytest.fixture
def server(start):
    return start()


@pytest.fixture
def connect(way):
    """Makes clients of that transport, which end with the test."""
    clients = []

    def connect(server, token=TOKEN, **options):
        clients.append(way.client(server.address, token=token, **{"timeout": 20, **options}))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def connection(server, connect):
    return connect(server)


def test_a_message_goes_and_comes_back(connection):
    answer = connection.call("echo", Message({"a": [1, None]}, {"k": np.arange(5)}))
    assert answer.header == {"a": [1, None]}
    assert answer.array("k", np.int64).tolist() == [0, 1, 2, 3, 4]


_SIGNALS = """
import os, signal, threading
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.transport import Connection, MessageServer

came = threading.Event()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: came.set())
server = MessageServer({"echo": lambda message: message}, host="127.0.0.1", token="t")
connection = Connection(server.address, token="t", timeout=10)
for number in (signal.SIGTERM, signal.SIGINT):
    came.clear()
    os.kill(os.getpid(), number)
    assert came.wait(10)
    for _ in range(20):  # a server that shuts down refuses at the latest when its answers to earlier calls are out
        connection.call("echo", Message({"after": number}))
server.stop()
print("answered")
"""


def test_a_server_leaves_signals_to_the_process(run_python):
    """Flight's serve() would take SIGTERM for itself where Python handles it, and end."""
    assert "answered" in run_python(_SIGNALS, timeout=60).stdout


def test_large_messages(connection):
    rows = np.random.default_rng(0).random(3_000_000)
    assert np.array_equal(
        connection.call("echo", Message({}, {"rows": rows})).array("rows", np.float64), rows
    )


@pytest.mark.parametrize("token", ["", "secret-tokem", "secret-token ", "SECRET-TOKEN"])
def test_a_call_without_the_token_is_refused_before_the_handler(server, connect, handlers, token):
    with pytest.raises(PermissionError, match=r"refused echo.*wrong token"):
        connect(server, token).call("echo", Message())
    assert handlers.calls == 0


@pytest.mark.parametrize("way", [Flight], indirect=True)
def test_every_flight_method_needs_the_token(server):
    client = flight.FlightClient(f"grpc://{server.address}")
    for call in (
        lambda: list(client.list_flights()),
        lambda: list(client.list_actions()),
        lambda: list(client.do_action("echo")),
        lambda: client.get_flight_info(flight.FlightDescriptor.for_command(b"x")),
        lambda: client.do_get(flight.Ticket(b"x")).read_all(),
    ):
        with pytest.raises(flight.FlightUnauthenticatedError):
            call()
    client.close()


@pytest.mark.parametrize(
    ("kind", "raised", "text"),
    [
        ("ValueError", ValueError, "what happened"),
        ("KeyError", KeyError, "what happened"),
        ("Stale", StaleNodeError, "what happened"),
        ("Other", RemoteError, "failed in raise: ZeroDivisionError: what happened"),
    ],
)
def test_errors_of_handlers_arrive_as_themselves(connection, kind, raised, text):
    with pytest.raises(raised, match=text):
        connection.call("raise", Message({"kind": kind}))
    assert connection.call("echo", Message({"on": True})).header == {"on": True}


def test_unknown_methods_leave_the_server_running(connection):
    with pytest.raises(ValueError, match=r"no method of this name. Received: 'nothing'"):
        connection.call("nothing", Message())
    assert connection.call("echo", Message({"on": True})).header == {"on": True}


@pytest.mark.parametrize("way", [Flight], indirect=True)
def test_malformed_bodies_leave_the_server_running(server, connection):
    client = flight.FlightClient(f"grpc://{server.address}")
    options = flight.FlightCallOptions(timeout=10, headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    for body in (b"", b"garbage", b"DRM1" + b"\xff" * 100):
        results = list(client.do_action(flight.Action("echo", pa.py_buffer(body)), options))
        assert b"Not a message" in results[0].body.to_pybytes()
    client.close()
    assert connection.call("echo", Message({"on": True})).header == {"on": True}


def test_oversized_messages_are_refused(start, connect):
    connection = connect(start(max_bytes=1000))
    with pytest.raises(ValueError, match="may have 1000 bytes"):
        connection.call("echo", Message({}, {"a": np.zeros(1000)}))
    assert connection.call("echo", Message({"on": True})).header == {"on": True}


def test_a_deadline_ends_a_call(connection):
    with pytest.raises(TimeoutError, match=r"did not answer wait within 0.3 s"):
        connection.call("wait", Message(), timeout=0.3)
    assert connection.call("echo", Message({"on": True})).header == {"on": True}


def test_nobody_there(server, connection):
    server.stop()
    with pytest.raises(ConnectionLostError, match="cannot be reached for echo"):
        connection.call("echo", Message())


def test_a_taken_port_is_an_error(server, start):
    _, port = split_address(server.address)
    with pytest.raises(ConnectionLostError, match=f"No server can be bound to 127.0.0.1:{port}"):
        start(port=port)


def test_a_server_needs_a_token(way):
    with pytest.raises(ValueError, match="empty token"):
        way.server({}, host="127.0.0.1", token="")


def test_a_lost_connection_is_tried_again_until_the_time_is_up():
    attempts = []

    def call():
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionLostError("gone")
        return "answer"

    assert retried(call, 10) == "answer"
    assert len(attempts) == 3
    with pytest.raises(ConnectionLostError):
        retried(lambda: (_ for _ in ()).throw(ConnectionLostError("gone")), 0.2)


def test_addresses():
    assert split_address("host.name:80") == ("host.name", 80)
    assert split_address(join_address("::1", 80)) == ("::1", 80)
    assert local_host_towards("127.0.0.1:1") == "127.0.0.1"
    with pytest.raises(ValueError, match="Received: 'nothing'"):
        split_address("nothing")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    place = tmp_path_factory.mktemp("tls")
    for name in ("server", "other"):
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
                *("-keyout", place / f"{name}.key", "-out", place / f"{name}.pem"),
            ],
            check=True,
            capture_output=True,
        )
    return place


def _tls(place, name, **more):
    return TlsOptions(
        certificate=str(place / f"{name}.pem"),
        private_key=str(place / f"{name}.key"),
        ca_certificate=str(place / "server.pem"),
        **more,
    )


def test_tls(certificates, start, connect):
    server = start(tls=_tls(certificates, "server"))
    good = connect(server, tls=_tls(certificates, "server"))
    assert good.call("echo", Message({"on": True})).header == {"on": True}
    distrustful = connect(server, tls=TlsOptions(ca_certificate=str(certificates / "other.pem")))
    with pytest.raises(ConnectionLostError, match="cannot be reached"):
        distrustful.call("echo", Message())
    with pytest.raises((ConnectionLostError, RemoteError)):
        connect(server).call("echo", Message())


def test_tls_carries_large_messages(certificates, start, connect):
    tls = _tls(certificates, "server")
    rows = np.random.default_rng(0).random(1_000_003)
    answer = connect(start(tls=tls), tls=tls).call("echo", Message({}, {"rows": rows, "more": rows[:3]}))
    assert np.array_equal(answer.array("rows", np.float64), rows)
    assert np.array_equal(answer.array("more", np.float64), rows[:3])


def test_tls_with_client_certificates(certificates, start, connect):
    tls = _tls(certificates, "server", verify_client=True)
    server = start(tls=tls)
    assert connect(server, tls=tls).call("echo", Message({"on": True})).header == {"on": True}
    nameless = connect(server, tls=TlsOptions(ca_certificate=str(certificates / "server.pem")))
    with pytest.raises((ConnectionLostError, RemoteError)):
        nameless.call("echo", Message())


def test_a_server_of_another_name_is_not_trusted(certificates, start, connect):
    server = start(tls=_tls(certificates, "server"))
    other = connect(server, tls=_tls(certificates, "server", override_hostname="other.example"))
    with pytest.raises((ConnectionLostError, RemoteError)):
        other.call("echo", Message())
    named = connect(server, tls=_tls(certificates, "server", override_hostname="localhost"))
    assert named.call("echo", Message({"on": True})).header == {"on": True}


def test_tls_options_are_checked(way):
    with pytest.raises(ValueError, match=r"together. Received: certificate='a'"):
        TlsOptions(certificate="a")
    with pytest.raises(ValueError, match="verify_client=True"):
        TlsOptions(verify_client=True)
    with pytest.raises(ValueError, match="A server with TLS needs"):
        way.server({}, host="127.0.0.1", token=TOKEN, tls=TlsOptions(ca_certificate="x"))


def test_a_long_call_whose_connection_breaks_is_tried_again() -> None:
    pause, calls = threading.Event(), []

    def call() -> str:
        calls.append(1)
        if len(calls) == 1:
            pause.wait(0.4)
            raise ConnectionLostError("reset after a long wait for others")
        return "answer"

    assert retried(call, 0.2) == "answer"
