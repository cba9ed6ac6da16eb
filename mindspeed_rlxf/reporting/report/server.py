"""Serve the report of a running run to browsers on this host.

The server listens only on the loopback address, and a request must name this address. That refuses
pages of other sites whose names resolve to this host (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mindspeed_rlxf.reporting.report.content import RunFolder, gather
from mindspeed_rlxf.reporting.report.page import MAX_BYTES, make_page, pack, pack_samples

HOST = "127.0.0.1"
NAMES = (HOST, "localhost", "[::1]")
FILES = ("metrics.jsonl", "samples.jsonl", "val_samples.jsonl", "failure.json", "run.lock")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
TIMEOUT_S = 30.0  # of an idle connection


class LiveRun:
    """Makes the page and its data; data is made again only if the files of the run have changed."""

    def __init__(self, open_run: Callable[[], RunFolder], max_samples: int) -> None:
        """open_run: returns the run with its present state; max_samples: of the page"""
        self._open, self._max_samples = open_run, max_samples
        self._made: dict[str, tuple[str, bytes]] = {}  # part -> version, bytes
        self._lock = threading.Lock()

    def version(self) -> str:
        """Return a hash of the run's state and of the sizes of FILES, absent ones included.

        Other files of the run do not change it. Raises OSError.
        """
        run = self._open()
        seen = [run.state]
        for name in FILES:
            file = run.path / name
            seen.append(f"{file.stat().st_size}" if file.exists() else "-")
        return hashlib.sha256(" ".join(seen).encode()).hexdigest()[:16]

    def page(self) -> bytes:
        """Return the HTML page, which requests its data from the server."""
        return make_page(self._open().name, {}, live=True).encode("utf-8", "backslashreplace")

    def part(self, name: str) -> bytes:
        """Return the data `main` or `samples` as compressed JSON, of the present `version`.

        Made again only if the version has changed. One thread at a time makes data; others wait for
        it, and get the same bytes if the version is the same. Raises OSError.
        """
        with self._lock:  # one request makes it, the others wait for it
            version = self.version()
            if self._made.get(name, ("", b""))[0] != version:
                self._made[name] = (version, self._make(name))
            return self._made[name][1]

    def _make(self, name: str) -> bytes:
        run = self._open()
        if name == "samples":
            return pack_samples([run], self._max_samples, MAX_BYTES)
        return pack({"made": time.strftime("%Y-%m-%d %H:%M:%S"), "runs": [gather(run)]})


class LiveServer(ThreadingHTTPServer):
    """HTTP server on the loopback address; port 0 = any free port."""

    daemon_threads = True

    def __init__(self, run: LiveRun, port: int) -> None:
        self.run = run
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore every exception of a request, such as a connection that the browser closed."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests for the page, its version and its data; 403 for another host name."""

    server: LiveServer
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self._hosts():
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"not a name of this host\n")
        run = self.server.run
        routes: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html; charset=utf-8", run.page),
            "/version": ("text/plain", lambda: run.version().encode()),
            "/data/main": ("application/octet-stream", lambda: run.part("main")),
            "/data/samples": ("application/octet-stream", lambda: run.part("samples")),
        }
        if self.path not in routes:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"no such page\n")
        kind, make = routes[self.path]
        try:
            content = make()
        except OSError as error:
            text = f"a file of the run cannot be read: {error.strerror}\n"
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", text.encode())
        return self._send(HTTPStatus.OK, kind, content)

    def _hosts(self) -> set[str]:
        return {f"{name}:{self.server.server_port}" for name in NAMES}

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
