"""A small HTTP server that cannot hurt its run: bounded bodies, clients, and time for each."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from hybridflow.recipe.names import hint

MAX_BODY = 64 << 10
_MOST_READ = 1 << 20
MOST_CLIENTS = 64
CLIENT_SECONDS = 10.0
"""How long one request may take from the connection to the last byte of its answer."""

_BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 10\r\n\r\n"
    b'{"error": "as many clients as can be are being served"}\n'
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What a route is asked: its path's parameter, the JSON of the body, and by whom."""

    client: str
    parameter: str = ""
    body: Any = None


@dataclass(frozen=True)
class Reply:
    """An answer: a mapping is sent as JSON, a text as ``content_type``."""

    status: int
    content: Mapping[str, Any] | str
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """What is sent; ValueError where a mapping is no JSON."""
        if isinstance(self.content, str):
            return self.content.encode()
        return json.dumps(self.content, allow_nan=False).encode() + b"\n"


class Refused(Exception):
    """A request that gets an error, whose text says what was wrong."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.reply = Reply(status, {"error": message}, headers=headers)


Route = Callable[[Request], Reply]


class ControlServer(ThreadingHTTPServer):
    """Listens from the beginning and answers from ``start`` on.

    Routes go by method and path; ``*`` in a path is its one parameter.

    Args:
        token: every request must carry it as a bearer token; None: nothing, and the requests must
            name this machine's loopback, so that no web page can send them.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, host: str, port: int, token: str | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.token = token
        self.routes: Mapping[tuple[str, str], Route] = {}
        self._clients = threading.Semaphore(MOST_CLIENTS)
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self.server_address[:2]
        name = f"[{host}]" if ":" in str(host) else host
        return f"http://{name}:{port}"

    def start(self, routes: Mapping[tuple[str, str], Route]) -> None:
        """Serve ``routes`` on a thread until ``stop``."""
        self.routes = routes
        serve = partial(self.serve_forever, poll_interval=0.1)
        threading.Thread(target=serve, name="control", daemon=True).start()

    def stop(self) -> None:
        """Answer no more."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, where fewer than the most are being served."""
        if not self._clients.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.settimeout(0.0)  # whoever does not read at once gets no reason
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Ends with the client's time, however slowly it sends or reads."""
        timer = threading.Timer(CLIENT_SECONDS, _cut, (request,))
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no event; anything else is logged."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("the control port failed on a request of %s", client_address)


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with its answer (HTTP/1.0)."""

    timeout = CLIENT_SECONDS
    server_version, sys_version = "hybridflow", ""
    server: ControlServer

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PATCH = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: changes are events of the run, and probes would fill its log."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class finds wrong with the request's form, as JSON too."""
        reply = Reply(code, {"error": message or self.responses[code][0]})
        self._send(reply, reply.body())

    def _serve(self) -> None:
        try:
            reply = self._answer()
            body = reply.body()
        except Refused as refused:
            reply, body = refused.reply, refused.reply.body()
        except OSError:
            raise
        except Exception:
            logger.exception("the control port failed on %s %s", self.command, self.path)
            reply = Reply(500, {"error": "a fault of the control port; the driver's log has it"})
            body = reply.body()
        self._send(reply, body)

    def _answer(self) -> Reply:
        raw = self._raw()  # first: a close with bytes unread takes the answer from the client
        self._authorise()
        route, parameter = self._route(self.path.split("?")[0])
        return route(Request(str(self.client_address[0]), parameter, _parsed(raw)))

    def _authorise(self) -> None:
        if self.server.token is not None:
            scheme, _, given = self.headers.get("Authorization", "").partition(" ")
            same = hmac.compare_digest(
                given.strip().encode("utf-8", "surrogateescape"), self.server.token.encode()
            )
            if not (same and scheme.lower() == "bearer"):
                raise Refused(401, "a bearer token is needed", **{"WWW-Authenticate": "Bearer"})
            return
        if "Origin" in self.headers or not _is_loopback(self.headers.get("Host", "localhost")):
            raise Refused(403, "only programs of this machine may ask, by its loopback address")

    def _route(self, path: str) -> tuple[Route, str]:
        methods: dict[str, tuple[Route, str]] = {}
        for (method, pattern), route in self.server.routes.items():
            before, star, after = pattern.partition("*")
            inner = path[len(before) : len(path) - len(after)]
            if path == pattern or (
                star and path == before + inner + after and inner and "/" not in inner
            ):
                methods[method] = route, inner if star else ""
        if not methods:
            known = {pattern for _, pattern in self.server.routes}
            raise Refused(404, f"no endpoint {path}; {hint(path, known)}")
        if self.command not in methods:
            allowed = ", ".join(methods)
            raise Refused(405, f"{path} takes {allowed}, not {self.command}", Allow=allowed)
        return methods[self.command]

    def _raw(self) -> bytes:
        if self.headers.get("Transfer-Encoding"):
            raise Refused(411, "a body needs a Content-Length")
        told = self.headers.get("Content-Length", "0")
        if not (told.isascii() and told.isdigit() and len(told) < 16):
            raise Refused(400, f"Content-Length is {told!r}")
        raw = self.rfile.read(min(int(told), _MOST_READ))
        if int(told) > MAX_BODY:
            raise Refused(413, f"a body has at most {MAX_BODY} bytes")
        if len(raw) < int(told):
            raise ConnectionAbortedError("the client went away within its body")
        return raw

    def _send(self, reply: Reply, data: bytes) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(data)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _is_loopback(told: str) -> bool:
    """Whether a Host header names this machine to itself."""
    try:
        host = urlsplit(f"//{told}").hostname or ""
    except ValueError as error:
        raise Refused(400, f"the header Host is no address: {error}") from error
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.removesuffix(".") == "localhost"


def _parsed(raw: bytes) -> Any:
    if not raw:
        return None
    try:
        return json.loads(raw, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found
