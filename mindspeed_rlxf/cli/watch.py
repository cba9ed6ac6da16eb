"""`watch`: serve the report of a run to browsers on this host, updated while the run writes.

Exit codes: 0 = ended by Ctrl-C; 2 = a mistake on the command line, one `error:` line per problem.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rlxf.cli.command_line import Parser, fail, option, protect_output
from mindspeed_rlxf.cli.report import parse_with_samples
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.reporting.report.content import RunFolder
from mindspeed_rlxf.reporting.report.samples import MAX_SAMPLES
from mindspeed_rlxf.reporting.report.server import LiveRun, LiveServer
from mindspeed_rlxf.run.report import find_state, open_runs

PORT = 8760
OPTIONS = (
    option("run", metavar="RUN", help="run directory"),
    option("--port", type=int, default=PORT, help=f"of 127.0.0.1; 0 = any free port ({PORT})"),
    option("--samples", type=int, default=MAX_SAMPLES, help=f"most samples shown ({MAX_SAMPLES})"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the live report of a run until Ctrl-C, after a line with its address; return 0.

    Returns 2 for mistakes, which it prints.
    """
    protect_output()
    try:
        arguments = _parse(argv)
        (first,) = open_runs([Path(arguments.run)])

        def open_run() -> RunFolder:
            return RunFolder(first.path, first.name, find_state(first.path), first.split)

        server = _listen(LiveRun(open_run, arguments.samples), arguments.port)
    except UserError as problem:
        return fail(problem.problems)
    with contextlib.closing(server.socket), contextlib.suppress(KeyboardInterrupt):
        print(f"watching {first.path}: {server.url} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


def _listen(run: LiveRun, port: int) -> LiveServer:
    """Return a server bound to this port of 127.0.0.1.

    Raises UserError if it cannot be bound: it is taken, not allowed or over 65535.
    """
    try:
        return LiveServer(run, port)
    except (OSError, OverflowError) as error:
        problem = Problem("--port", f"must be a free port of this host: {error}", port, "use 0")
        raise UserError(problem) from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Raises UserError for unknown options and a negative --samples."""
    parser = Parser(
        OPTIONS,
        prog="mindspeed-rlxf watch",
        description="Serves the report of a run on the loopback address while the run goes on.",
    )
    return parse_with_samples(parser, argv)
