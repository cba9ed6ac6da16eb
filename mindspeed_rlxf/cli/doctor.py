"""`doctor`: find what keeps a run from working, on this host or on every host of a cluster.

Exit codes: 0 = no error (there may be warnings); 1 = an error was found; 2 = a mistake on the
command line, one `error:` line per problem. With --bundle or --calibrate: 0 = written.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rlxf.cli.command_line import Parser, fail, option, protect_output
from mindspeed_rlxf.compat import older_toolkit
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import ConfigError, UserError
from mindspeed_rlxf.config.resolve import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.files.printable import write_raw
from mindspeed_rlxf.ops.doctor.bundle import write_bundle
from mindspeed_rlxf.ops.doctor.cluster import check_cluster
from mindspeed_rlxf.ops.doctor.findings import Finding, error, ok
from mindspeed_rlxf.ops.doctor.local import check_host
from mindspeed_rlxf.ops.doctor.report import line_width, make_report, wants_colour
from mindspeed_rlxf.ops.doctor.subject import choose_subject

KINDS = [kind.value for kind in DeviceKind]
DEADLINE_S = 300.0
OPTIONS = (
    option("--cluster", action="store_true", help="check all Ray hosts, and collectives"),
    option("--address", help="of the Ray cluster (runtime.address, RAY_ADDRESS)"),
    option("--bundle", metavar="RUN", help="pack logs, versions and this report of a run"),
    option("--calibrate", action="store_true", help="measure this device for predicted times"),
    option("--to", metavar="FILE", help="--calibrate: file to write, for plan.calibration"),
    option("--json", action="store_true", help="print JSON"),
    option("--device", choices=KINDS, default="auto", help="kind to check (device.kind)"),
    option("--deadline", type=float, default=DEADLINE_S, help="--cluster: seconds in all (300)"),
    option("--config-name", "-cn", help="check also files, space and devices for this run"),
    option("--config-dir", "-cd", help="folder to look in before the built-in one"),
    option("overrides", nargs="*", metavar="key=value", help="changes to the YAML"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Check this host, or with --cluster every host; print the findings, with --json as JSON.

    Returns 1 if one of them is an error, else 0; 2 for mistakes of the user, which it prints.
    With --bundle it packs the findings and a run's logs into an archive in the current directory
    instead, and returns 0. With --calibrate it measures a device instead (`_calibrate`).
    """
    protect_output()
    try:
        arguments = _parse(argv)
        config, found = _load_config(arguments)
        if arguments.calibrate:
            return _calibrate(arguments, config, found)
        subject = choose_subject(config, DeviceKind(arguments.device), arguments.cluster)
        if arguments.cluster:
            address = arguments.address or (config.runtime.address if config else None)
            allowed = config is not None and config.runtime.allow_unauthenticated
            found += check_cluster(subject, address, arguments.deadline, allowed)
        else:
            found += check_host(subject)
        report = make_report(found)
        if arguments.bundle is not None:  # a success, whatever the report says
            file = write_bundle(Path(arguments.bundle), report, Path.cwd())
            size = f"{file.stat().st_size // 1024} KiB"
            print(f"written: {file} ({size}); look through it before you send it")
            return 0
    except UserError as problem:
        return fail(problem.problems)
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        text = report.as_text(line_width(sys.stdout), wants_colour(sys.stdout))
        write_raw(sys.stdout, f"{text}\n")
    return report.exit_code


def _calibrate(
    arguments: argparse.Namespace, config: RunConfig | None, found: list[Finding]
) -> int:
    """Measure this host's first device, write the calibration file and print its path; return 0.

    Prints progress to stderr, and the device and the largest error of the fit beside the path. The
    file is --to, or that of the device's kind in the user's folder.
    config: gives the kind of device and the CPU threads; None = --device, and one thread
    found:  findings of `_load_config`; if --config-name is given and config is None, only print
            them and return 1
    Raises UserError when a measurement fails, or, before it, if the file cannot be written.
    """
    from mindspeed_rlxf.ops.planning.calibrate import calibrate
    from mindspeed_rlxf.ops.planning.calibration import (
        check_writable,
        default_file,
        write_calibration,
    )

    if arguments.config_name is not None and config is None:
        text = make_report(found).as_text(line_width(sys.stdout), wants_colour(sys.stdout))
        write_raw(sys.stdout, f"{text}\n")
        return 1
    kind = config.device.kind if config else DeviceKind(arguments.device)
    threads = config.device.cpu_threads if config else 1
    file = Path(arguments.to) if arguments.to else default_file(kind)
    check_writable(file)  # before the minutes that the measurement takes
    made = calibrate(kind, threads, lambda text: print(text, file=sys.stderr, flush=True))
    write_calibration(file, made)
    print(f"written: {file} ({made.device}; phases fitted within {made.worst:.0%})")
    return 0


def _load_config(arguments: argparse.Namespace) -> tuple[RunConfig | None, list[Finding]]:
    """Load the configuration of --config-name; return it with one finding, `ok`.

    Returns (None, []) without --config-name, and (None, errors) where keys or values are wrong.
    Raises ConfigError where the YAML cannot be composed.
    """
    name = arguments.config_name
    if name is None:
        return None, []
    tree = compose(name, arguments.overrides, arguments.config_dir)
    try:
        return resolve(tree, name.removesuffix(".yaml"), older_toolkit), [ok("config", name)]
    except ConfigError as problem:
        remedy = "correct it: files and devices of this configuration are not looked at"
        return None, [error("config", str(each), remedy) for each in problem.problems]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises UserError for unknown options, overrides without --config-name, --to without
    --calibrate, and a --deadline below 10.
    """
    parser = Parser(
        OPTIONS,
        prog="mindspeed-rlxf doctor",
        description="Finds what keeps a run from working. Exit code 1 when there is an error.",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.overrides and arguments.config_name is None:
        parser.error(f"{arguments.overrides[0]} changes a configuration: give --config-name")
    if arguments.to and not arguments.calibrate:
        parser.error("--to names the file of --calibrate: give that too")
    if not 10 <= arguments.deadline < math.inf:
        rule = "must be at least 10, and finite"
        parser.error(f"--deadline={arguments.deadline:g} {rule}; use 60 or more")
    return arguments
