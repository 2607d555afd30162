"""Calls between driver, servers and workers: Arrow Flight with a token for each job.

A server is a table of named handlers, message in, message out. Every call carries the job's token
(compared in constant time before anything else happens) and a deadline.
"""

from __future__ import annotations

import hmac
import logging
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from deeprec_spark.runtime.calls import Handler, checked, error_message, handler_of
from deeprec_spark.runtime.errors import ConnectionLostError, RemoteError
from deeprec_spark.runtime.messages import MAX_MESSAGE_BYTES, Message, decode, encode

logger = logging.getLogger(__name__)

# Without these a channel that once failed to connect may wait two minutes before it tries again.
_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True)
class TlsOptions:
    """Certificate files (PEM), read where they are used: they must exist under these paths on every host.

    Servers need `certificate` and `private_key`, clients `ca_certificate`. `override_hostname` is for certificates
    that do not name the hosts. With `verify_client` a server also asks for a client certificate signed by the same
    authority, for which clients present their own `certificate`.
    """

    certificate: str | None = None
    private_key: str | None = None
    ca_certificate: str | None = None
    override_hostname: str | None = None
    verify_client: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError(
                f"TlsOptions needs certificate and private_key together. Received: certificate={self.certificate!r}, "
                f"private_key={'None' if self.private_key is None else 'set'}"
            )
        if self.verify_client and (self.ca_certificate is None or self.certificate is None):
            raise ValueError(
                "TlsOptions(verify_client=True) needs ca_certificate and certificate. Received: None"
            )

    def server_arguments(self) -> dict[str, Any]:
        """Keyword arguments of a Flight server."""
        if self.certificate is None or self.private_key is None:
            raise ValueError("A server with TLS needs TlsOptions.certificate and private_key. Received: None")
        arguments: dict[str, Any] = {
            "tls_certificates": [(Path(self.certificate).read_bytes(), Path(self.private_key).read_bytes())]
        }
        if self.verify_client and self.ca_certificate is not None:
            arguments.update(verify_client=True, root_certificates=Path(self.ca_certificate).read_bytes())
        return arguments

    def client_arguments(self) -> dict[str, Any]:
        """Keyword arguments of a Flight client."""
        arguments: dict[str, Any] = {}
        if self.ca_certificate is not None:
            arguments["tls_root_certs"] = Path(self.ca_certificate).read_bytes()
        if self.override_hostname is not None:
            arguments["override_hostname"] = self.override_hostname
        if self.verify_client and self.certificate is not None and self.private_key is not None:
            arguments["cert_chain"] = Path(self.certificate).read_bytes()
            arguments["private_key"] = Path(self.private_key).read_bytes()
        return arguments

    def server_context(self) -> ssl.SSLContext:
        """What a server over plain sockets wraps its connections with."""
        if self.certificate is None or self.private_key is None:
            raise ValueError("A server with TLS needs TlsOptions.certificate and private_key. Received: None")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.private_key)
        if self.verify_client and self.ca_certificate is not None:
            context.load_verify_locations(self.ca_certificate)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """What a client over plain sockets wraps its connections with; the server's name is checked."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca_certificate)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.verify_client and self.certificate is not None and self.private_key is not None:
            context.load_cert_chain(self.certificate, self.private_key)
        return context


def local_host_towards(address: str) -> str:
    """This host's address on the route to `host:port`; nothing is sent."""
    host, port = split_address(address)
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; IPv6 hosts stand in brackets."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or not host:
        raise ValueError(f"An address is host:port. Received: {address!r}")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _TokenGate(flight.ServerMiddlewareFactory):
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str | bytes]]) -> None:
        values = headers.get("authorization", [])
        given = values[0] if len(values) == 1 else ""
        if not hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected):
            raise flight.FlightUnauthenticatedError("The call does not carry this job's token.")


class _FlightServer(flight.FlightServerBase):
    def __init__(
        self, location: str, token: str, handlers: Mapping[str, Handler], max_bytes: int, **tls: Any
    ) -> None:
        self._handlers = dict(handlers)
        self._max_bytes = max_bytes
        super().__init__(location, middleware={"token": _TokenGate(token)}, **tls)

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        return iter([flight.Result(self._answer(action.type, action.body))])

    def _answer(self, method: str, body: pa.Buffer) -> pa.Buffer:
        try:
            handler = handler_of(self._handlers, method)
            answer = handler(decode(body, max_bytes=self._max_bytes))
            return encode(answer, max_bytes=self._max_bytes)
        except Exception as error:  # every error must reach the caller, and the server must go on
            return encode(error_message(method, error))


class MessageServer:
    """Serves handlers on a port until `stop`; `address` is what clients connect to.

    Arguments:
        handlers: message in, message out, by method name; called from many threads at once.
        host: the interface to bind, and the name that `address` announces.
        port: 0 takes a free one, and keeps it.
        token: the job's secret; calls without it are refused.
        max_bytes: larger messages are refused, and larger answers not sent.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        host: str,
        port: int = 0,
        token: str,
        tls: TlsOptions | None = None,
        bind_host: str | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        if not token:
            raise ValueError("A server needs the job's token. Received: an empty token")
        scheme = "grpc+tls" if tls else "grpc"
        location = f"{scheme}://{join_address(bind_host or host, port)}"
        try:
            arguments = tls.server_arguments() if tls else {}
            self._server = _FlightServer(location, token, handlers, max_bytes, **arguments)
        except pa.ArrowException as error:
            raise ConnectionLostError(
                f"No server can be bound to {join_address(bind_host or host, port)}: {error}"
            ) from error
        self.address = join_address(host, self._server.port)
        # The server answers from its construction on. Not serve(): that ends the server at SIGTERM, while the driver
        # still saves.
        self._thread = threading.Thread(target=self._server.wait, name=f"flight-{self.address}", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """End the server once running calls are answered; wake waiting handlers before."""
        stopper = threading.Thread(target=self._server.shutdown, name="flight-stop", daemon=True)
        stopper.start()
        stopper.join(timeout)
        self._thread.join(timeout)
        if stopper.is_alive() or self._thread.is_alive():
            logger.warning("The server at %s still answers calls after %.0f s", self.address, timeout)


class Connection:
    """A client of one MessageServer; calls may run in several threads at once."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        tls: TlsOptions | None = None,
        timeout: float = 60.0,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._headers = [(b"authorization", f"Bearer {token}".encode())]
        scheme = "grpc+tls" if tls else "grpc"
        arguments = tls.client_arguments() if tls else {}
        self._client = flight.FlightClient(
            f"{scheme}://{address}", generic_options=_CHANNEL_OPTIONS, **arguments
        )

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        """Send a message and wait for the answer, `timeout` seconds at most.

        Raises:
            ConnectionLostError: nobody answers at the address.
            PermissionError: the token is not the server's.
            TimeoutError: no answer in time.
            ValueError, KeyError, TypeError, FileNotFoundError, StaleNodeError, JobEndedError: raised by the handler.
            RemoteError: the handler raised something else.
        """
        limit = self._timeout if timeout is None else timeout
        options = flight.FlightCallOptions(timeout=limit, headers=self._headers)
        body = encode(message, max_bytes=self._max_bytes)
        try:
            results = list(self._client.do_action(flight.Action(method, body), options))
        except flight.FlightUnauthenticatedError:
            raise PermissionError(
                f"{self.address} refused {method}: it belongs to another job (wrong token)."
            ) from None
        except flight.FlightTimedOutError:
            raise TimeoutError(f"{self.address} did not answer {method} within {limit:g} s.") from None
        except (flight.FlightUnavailableError, flight.FlightCancelledError) as error:
            raise ConnectionLostError(
                f"{self.address} cannot be reached for {method}: {_first_line(error)}"
            ) from None
        except (flight.FlightError, pa.ArrowException) as error:
            raise RemoteError(f"{self.address} failed in {method}: {_first_line(error)}") from error
        if len(results) != 1:
            raise RemoteError(
                f"{self.address} answered {method} with {len(results)} messages instead of one."
            )
        return checked(decode(results[0].body, max_bytes=self._max_bytes), self.address, method)

    def close(self) -> None:
        """Close the channel; running calls fail."""
        self._client.close()


def _first_line(error: Exception) -> str:
    return str(error).split(". gRPC client debug context", 1)[0].splitlines()[0]
