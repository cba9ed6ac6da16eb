"""`watch`: serve a run's report to browsers on this host, updated while the run writes.

The server listens only on the loopback address, and a request must name this address: pages from
other sites whose names resolve to this host (DNS rebinding) are refused.

Exit codes: 0 = ended by Ctrl-C; 2 = a mistake on the command line, one `error:` line per problem.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from mindspeed_rlxf.checkpoint.report_file import find_problem, find_version, open_runs
from mindspeed_rlxf.cli.command_line import Parser, command, option
from mindspeed_rlxf.cli.report import SAMPLES
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.reporting.report.page import make_report

PORT = 8760
WAIT_S = 2.0  # between two looks for the first iteration
HOST = "127.0.0.1"
OPTIONS = (
    option("run", metavar="RUN", help="run directory"),
    option("--port", type=int, default=PORT, help=f"of 127.0.0.1; 0 = any free port ({PORT})"),
    SAMPLES,
)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print an address and serve a run's live report there until Ctrl-C; return 0.

    Returns 2 for mistakes, which it prints.
    """
    parser = Parser(
        OPTIONS,
        prog="mindspeed-rlxf watch",
        description="Serves the report of a run on the loopback address while the run goes on.",
    )
    arguments = parser.parse_args(argv)
    run = Path(arguments.run)
    try:
        wait_for_iteration(run)
    except KeyboardInterrupt:
        return 0
    open_runs([run])
    server = make_server(run, arguments.samples, arguments.port)
    with contextlib.closing(server.socket), contextlib.suppress(KeyboardInterrupt):
        print(f"watching {run}: http://{HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


def wait_for_iteration(run: Path) -> None:
    """Wait until a run that has begun has an iteration; return at once for other folders."""
    has_begun = (run / "config.yaml").is_file()
    if has_begun and find_problem(run):
        print(f"waiting for the first iteration of {run} (Ctrl-C ends it)", flush=True)
    while has_begun and find_problem(run) and not (run / "failure.json").exists():
        time.sleep(WAIT_S)


def make_server(run: Path, max_samples: int, port: int) -> HTTPServer:
    """Return a server for a run's report at `/`, and its version at `/version`.

    Raises UserError if the port cannot be bound.
    """
    page_of_version = {"": b""}  # the last page alone, to make it anew only after a change

    def page() -> bytes:
        version = find_version(run)
        if version not in page_of_version:
            text = make_report(open_runs([run]), max_samples, version)
            page_of_version.clear()
            page_of_version[version] = text.encode("utf-8", "backslashreplace")
        return page_of_version[version]

    pages: dict[str, Callable[[], bytes]] = {
        "/": page, "/version": lambda: find_version(run).encode()
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            names = [f"{name}:{server.server_port}" for name in (HOST, "localhost")]
            if self.headers.get("Host") not in names:
                return self.send_error(403)
            if self.path not in pages:
                return self.send_error(404)
            content = pages[self.path]()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    try:
        server = HTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(
            Problem("--port", f"must be a free port of this host: {error}", port, "use 0")
        ) from error
    return server
