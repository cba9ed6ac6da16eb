"""`report`: write one HTML file about one or several runs.

Exit codes: 0 = written; 2 = a mistake on the command line, one `error:` line per problem.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rlxf.checkpoint.report_file import write_report
from mindspeed_rlxf.cli.command_line import Parser, fail, option, use_utf8_output
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.reporting.report.samples import MAX_SAMPLES

OPTIONS = (
    option("runs", nargs="+", metavar="RUN", help="run directory; several share charts"),
    option("--output", "-o", metavar="FILE", help="RUN/report.html, with several RUNs report.html"),
    option("--samples", type=int, default=MAX_SAMPLES, help=f"most samples shown ({MAX_SAMPLES})"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report, print its path and size; return 0, or 2 for mistakes, which it prints."""
    use_utf8_output()
    try:
        arguments = _parse(argv)
        runs = [Path(run) for run in arguments.runs]
        file = _report_path(arguments.output, runs)
        try:
            size = write_report(runs, file, arguments.samples)
        except OSError as error:
            rule = f"must be a file that can be written: {error.strerror}"
            problem = Problem("--output", rule, repr(str(file)), "give another one")
            raise UserError(problem) from error
    except UserError as mistake:
        return fail(mistake.problems)
    print(f"report: {file} ({size / 1e6:.1f} MB)")
    return 0


def _report_path(output: str | None, runs: Sequence[Path]) -> Path:
    """Return the report to write: `output`, or report.html by default.

    The default is in the run's folder, or in the current directory for several runs.
    """
    if output is not None:
        return Path(output)
    return runs[0] / "report.html" if len(runs) == 1 else Path("report.html")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Raises UserError for unknown options and a negative --samples."""
    parser = Parser(
        OPTIONS,
        prog="mindspeed-rlxf report",
        description="Writes one HTML file with curves, schedule and samples; it needs no network.",
    )
    return parse_with_samples(parser, argv)


def parse_with_samples(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line with `parser`, which has --samples.

    Raises UserError for what the parser refuses, and for --samples below 0.
    """
    arguments = parser.parse_args(argv)
    if arguments.samples < 0:
        parser.error(f"--samples={arguments.samples} must be 0 or more; use {MAX_SAMPLES}")
    return arguments
