"""`report`: write one HTML file about one or several runs.

Exit codes: 0 = written; 2 = a mistake on the command line, one `error:` line per problem.
"""

from collections.abc import Sequence
from pathlib import Path

from mindspeed_rlxf.checkpoint.report_file import write_report
from mindspeed_rlxf.cli.command_line import Parser, command, number, option
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.reporting.report.samples import MAX_SAMPLES

SAMPLES = option(
    "--samples", type=number(0), default=MAX_SAMPLES, help=f"most samples shown ({MAX_SAMPLES})"
)
OPTIONS = (
    option("runs", nargs="+", metavar="RUN", help="run directory; several share charts"),
    option("--output", "-o", metavar="FILE", help="RUN/report.html, with several RUNs report.html"),
    SAMPLES,
)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write the report, print its path and size; return 0, or 2 for mistakes, which it prints."""
    parser = Parser(
        OPTIONS,
        prog="mindspeed-rlxf report",
        description="Writes one HTML file with curves, times and samples; it needs no network.",
    )
    arguments = parser.parse_args(argv)
    runs = [Path(run) for run in arguments.runs]
    folder = runs[0] if len(runs) == 1 else Path()
    file = Path(arguments.output or folder / "report.html")
    try:
        size = write_report(runs, file, arguments.samples)
    except OSError as error:
        rule = f"must be a file that can be written: {error.strerror}"
        raise UserError(Problem("--output", rule, repr(str(file)), "give another one")) from error
    print(f"report: {file} ({size / 1e6:.1f} MB)")
    return 0
