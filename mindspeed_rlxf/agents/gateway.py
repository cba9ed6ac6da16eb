"""A server of OpenAI's chat API, for agents that are programs: an endpoint for each session.

    POST /sessions/TOKEN/v1/chat/completions     the next turn (`endpoint`); bearer: TOKEN
    POST /sessions/TOKEN/v1/reward               {"score": 1.0, "form": 0.5}: `Session.reward`

It is of the standard library. A thread for each connection only reads and writes; what a request
means is decided on the agents' event loop. Nothing is logged, as paths and headers hold tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from mindspeed_rlxf.agents.chat_api import ChatError, ChatRequest
from mindspeed_rlxf.agents.endpoint import Endpoint, ServedSession
from mindspeed_rlxf.config.problems import shorten_value

BACKLOG = 128
IDLE_S = 600.0  # longest time between two requests of a connection, and to read one
ANSWER_S = 24 * 3600.0  # to sample a turn; the run's own deadlines are shorter
MAX_BODY = 64 * 2**20
DROPPED_AT_ONCE = 64 * 2**10  # bytes
CHAT, REWARD = "v1/chat/completions", "v1/reward"
ROUTES = f"there is POST .../{CHAT} and .../{REWARD}"


class Gateway:
    """The server of this process's sessions. It listens as long as the object lives.

    Attributes:
        address: Host and port.
    """

    def __init__(
        self, host: str, stop_strings: Sequence[str] = (), tools: Sequence[str] = ()
    ) -> None:
        """Listen on a free port of `host`; requests may have these stop strings and tools."""
        self._stop_strings, self._tools = tuple(stop_strings), tuple(tools)
        self._endpoints: dict[bytes, Endpoint] = {}
        server = _Server((host, 0), _Handler)
        server.endpoints = self._endpoints
        port = server.server_address[1]
        self.address = (socket.gethostname() if host in ("", "0.0.0.0") else host), int(port)
        thread = threading.Thread(
            target=server.serve_forever, args=[0.1], name="gateway", daemon=True
        )
        thread.start()
        self._end = weakref.finalize(self, _end, server)

    def open(self, session: ServedSession) -> Endpoint:
        """Return an endpoint for a session, until the end of its block; call it on its loop."""
        host, port = self.address
        token = secrets.token_urlsafe(32)
        base_url = f"http://{host}:{port}/sessions/{token}/v1"
        endpoint = Endpoint(session, base_url, token, self._stop_strings, self._tools)
        digest = _digest(token)
        self._endpoints[digest] = endpoint
        endpoint.on_close = partial(self._endpoints.pop, digest, None)
        return endpoint

    def close(self) -> None:
        """Stop to listen."""
        self._end()


def _end(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


def _digest(token: str) -> bytes:
    # Looking up a digest takes no longer for a token that is nearly right.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class _Server(ThreadingHTTPServer):
    """Serves each connection in a thread; `endpoints` by the digests of their tokens."""

    request_queue_size = BACKLOG
    daemon_threads = True
    block_on_close = False
    endpoints: dict[bytes, Endpoint]

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks a name server for this host's name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a traceback may show a token."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the path holds the token."""

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        is_number = length.isascii() and length.isdigit()
        self._num_unread = int(length) if is_number else MAX_BODY + 1
        try:
            try:
                self._answer()
            except ChatError as error:
                self._refuse(error)
        except OSError:  # the client is gone
            self.close_connection = True

    def do_GET(self) -> None:
        self._num_unread = 0
        self._refuse(ChatError(404, "not_found", ROUTES))

    def _refuse(self, error: ChatError) -> None:
        """Send an error, then drop what is still being sent, or the client may not see it."""
        is_endless = self._num_unread > MAX_BODY
        self.close_connection |= is_endless
        fields = {"message": str(error), "type": "invalid_request_error", "code": error.code}
        self._send(error.status, json.dumps({"error": fields}).encode())
        while self._num_unread and not is_endless:
            dropped = self.rfile.read(min(self._num_unread, DROPPED_AT_ONCE))
            if not dropped:
                raise ConnectionResetError
            self._num_unread -= len(dropped)

    def _answer(self) -> None:
        endpoint, route = self._find_endpoint()
        body = self._read_body()
        if route == CHAT:
            self._complete(endpoint, ChatRequest.parse(body))
        else:
            self._take_reward(endpoint, body)

    def _find_endpoint(self) -> tuple[Endpoint, str]:
        """Return what a request is for, by its head alone. Raises ChatError."""
        _, folder, token, route = (*self.path.partition("?")[0].split("/", 3), "", "", "")[:4]
        endpoint = self.server.endpoints.get(_digest(token))
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if endpoint is None or not hmac.compare_digest(_digest(bearer), _digest(endpoint.api_key)):
            raise ChatError(401, "invalid_api_key", "there is no conversation of this token")
        if folder != "sessions" or route not in (CHAT, REWARD):
            raise ChatError(404, "not_found", ROUTES)
        return endpoint, route

    def _read_body(self) -> bytes:
        if self._num_unread > MAX_BODY:
            raise ChatError(413, "invalid_request_error", "Content-Length is missing or too large")
        body = self.rfile.read(self._num_unread)
        if len(body) < self._num_unread:
            raise ConnectionResetError
        self._num_unread = 0
        return body

    def _take_reward(self, endpoint: Endpoint, body: bytes) -> None:
        try:
            parts = {str(name): float(value) for name, value in json.loads(body).items()}
            score = parts.pop("score")
        except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError):
            sent = shorten_value(body.decode(errors="replace"))
            message = f"a reward must be a JSON object of numbers with `score`, not {sent}"
            raise ChatError(400, "invalid_request_error", message) from None
        _run_on(endpoint, _give_reward(endpoint, score, parts))
        self._send(200, b"{}")

    def _complete(self, endpoint: Endpoint, request: ChatRequest) -> None:
        exchange = _run_on(endpoint, endpoint.complete(request))
        assert exchange.completion is not None, "it was answered"
        if self._is_client_gone():
            raise ConnectionResetError
        exchange.note_sent(1)  # before it is: the next request may come at once
        try:
            if request.stream:
                body = exchange.completion.to_events(request.model, request.stream_usage)
                self._send(200, body, "text/event-stream")
            else:
                self._send(200, exchange.completion.to_json(request.model))
        except OSError:
            exchange.note_sent(-1)
            raise

    def _is_client_gone(self) -> bool:
        self.connection.settimeout(0)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:  # it waits for the answer
            return False
        finally:
            self.connection.settimeout(IDLE_S)

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


async def _give_reward(endpoint: Endpoint, score: float, parts: dict[str, float]) -> None:
    try:
        endpoint.reward(score, parts)
    except ValueError as error:  # nan
        raise ChatError(400, "invalid_request_error", str(error)) from None


def _run_on(endpoint: Endpoint, coroutine: Any) -> Any:
    """Run a coroutine on the agents' event loop, and return its result."""
    future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, endpoint.loop)
    try:
        return future.result(ANSWER_S)
    except TimeoutError:
        future.cancel()
        raise ChatError(503, "timeout", f"no turn within {ANSWER_S:g} s") from None


class _Opened:
    gateway: Gateway | None = None


def open_gateway(host: str, stop_strings: Sequence[str] = (), tools: Sequence[str] = ()) -> None:
    """Open this process's gateway, which `open_endpoint` uses; a former one is closed."""
    close_gateway()
    _Opened.gateway = Gateway(host, stop_strings, tools)


def close_gateway() -> None:
    """Close this process's gateway, if there is one."""
    if _Opened.gateway is not None:
        _Opened.gateway.close()
    _Opened.gateway = None


def open_endpoint(session: Any) -> Endpoint:
    """Return an OpenAI endpoint that says a session's turns, until the end of its block.

    async with open_endpoint(session) as endpoint:
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    """
    if _Opened.gateway is None:
        raise RuntimeError("a run whose agent opens an endpoint needs rollout.gateway: true")
    return _Opened.gateway.open(session)
