"""An HTTP proxy that delays, refuses and cuts requests as a test tells it."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal

Fault = Literal["pass", "slow", "503", "cut", "cut answer"]
_SLOW_SECONDS = 0.3
_HOP = {"connection", "transfer-encoding", "keep-alive"}


@dataclass(frozen=True)
class Request:
    """A request that came: method and path with its query, the number of it in all, and of this method and path."""

    method: str
    path: str
    number: int
    attempt: int


class FaultyProxy:
    """Stands before a server on this host; `rule` says what befalls each request. A context manager."""

    def __init__(self, port: int, rule: Callable[[Request], Fault] | None = None) -> None:
        self.rule = rule or (lambda request: "pass")
        self.requests: list[Request] = []
        self.faults = 0
        self._upstream = port
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60
            # An answer is one packet: two would wait for each other's acknowledgement.
            wbufsize = -1
            disable_nagle_algorithm = True

            def handle_expect_100(self) -> bool:
                self.send_response_only(100)
                self.end_headers()
                self.wfile.flush()
                return True

            def _any(self) -> None:
                proxy._serve(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is printed."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                """Clients whose connection is cut are what this is for."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="faulty-proxy")

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    def _note(self, method: str, path: str) -> Request:
        with self._lock:
            same = sum(one.method == method and one.path == path for one in self.requests)
            request = Request(method, path, len(self.requests), same)
            self.requests.append(request)
            return request

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        request = self._note(handler.command, handler.path)
        fault = self.rule(request)
        if fault != "pass":
            with self._lock:
                self.faults += 1
        body = self._body(handler, half=fault == "cut")
        if fault == "cut":
            handler.close_connection = True
            handler.connection.close()
            return
        if fault == "503":
            answer = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
            handler.send_response(503)
            handler.send_header("Content-Length", "0" if handler.command == "HEAD" else str(len(answer)))
            handler.end_headers()
            if handler.command != "HEAD":
                handler.wfile.write(answer)
            return
        if fault == "slow":
            self._stopping.wait(_SLOW_SECONDS)
        self._forward(handler, body, cut=fault == "cut answer")

    def _body(self, handler: BaseHTTPRequestHandler, *, half: bool) -> bytes:
        if "chunked" in handler.headers.get("Transfer-Encoding", "").lower():
            parts = []
            while size := int(handler.rfile.readline().partition(b";")[0], 16):
                parts.append(handler.rfile.read(size))
                handler.rfile.readline()
            while handler.rfile.readline().strip():
                pass
            return b"".join(parts)
        length = int(handler.headers.get("Content-Length") or 0)
        return handler.rfile.read(length // 2 if half else length)

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes, *, cut: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=60)
        try:
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                if name.lower() not in (*_HOP, "content-length", "expect"):
                    connection.putheader(name, value)
            if body or handler.command in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            answer = connection.getresponse()
            content = answer.read()
            handler.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in (*_HOP, "content-length", "server", "date"):
                    handler.send_header(name, value)
            length = answer.getheader("Content-Length") if handler.command == "HEAD" else str(len(content))
            handler.send_header("Content-Length", length or "0")
            handler.end_headers()
            if cut:
                handler.wfile.write(content[: len(content) // 2])
                handler.wfile.flush()
                handler.close_connection = True
                handler.connection.close()
            elif handler.command != "HEAD":
                handler.wfile.write(content)
        finally:
            connection.close()
