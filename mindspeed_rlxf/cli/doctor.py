"""`doctor`: find what keeps a run from working, on this host or on every cluster host.

Exit codes: 0 = no error (maybe warnings); 1 = an error was found; 2 = a mistake on the command
line, one `error:` line per problem.
"""

import json
from collections.abc import Sequence

from mindspeed_rlxf.cli.command_line import Parser, command, option
from mindspeed_rlxf.compat.mindspeed_llm.translate import translate
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.load import resolve_with_notes
from mindspeed_rlxf.config.problems import ConfigError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.device.findings import Finding, error, ok
from mindspeed_rlxf.ops.doctor.checks import check_host, choose_subject
from mindspeed_rlxf.ops.doctor.hosts import check_cluster
from mindspeed_rlxf.ops.doctor.output import as_json, as_text, exit_code

KINDS = [kind.value for kind in DeviceKind]
OPTIONS = (
    option("--cluster", action="store_true", help="check all Ray hosts, and collectives"),
    option("--address", help="of the Ray cluster (runtime.address, RAY_ADDRESS)"),
    option("--json", action="store_true", help="print JSON"),
    option("--device", choices=KINDS, default="auto", help="kind to check (device.kind)"),
    option("--config-name", "-cn", help="check the run directory and devices of this run"),
    option("--config-dir", "-cd", help="folder to look in before the built-in one"),
    option("overrides", nargs="*", metavar="key=value", help="changes to the YAML"),
)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check this host, or every host with --cluster; print the findings, as JSON with --json.

    Returns 1 if there is an error, else 0; 2 for user mistakes, which it prints.
    """
    parser = Parser(
        OPTIONS,
        prog="mindspeed-rlxf doctor",
        description="Finds what keeps a run from working. Exit code 1 when there is an error.",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.overrides and arguments.config_name is None:
        parser.error(f"{arguments.overrides[0]} changes a configuration: give --config-name")
    config: RunConfig | None = None
    findings: list[Finding] = []
    name = arguments.config_name
    if name:
        tree = compose(name, arguments.overrides, arguments.config_dir)
        try:
            stem = name.removesuffix(".yaml")
            config, _ = resolve_with_notes(translate(tree), stem, arguments.overrides)
            findings = [ok("config", name)]
        except ConfigError as problem:
            remedy = "correct it: its run directory and devices are not looked at"
            findings = [error("config", str(cause), remedy) for cause in problem.problems]
    subject = choose_subject(config, DeviceKind(arguments.device))
    if arguments.cluster:
        address = arguments.address or (config.runtime.address if config else None)
        findings += check_cluster(subject, address)
    else:
        findings += check_host(subject)
    if arguments.json:
        print(json.dumps(as_json(findings), indent=2, ensure_ascii=False))
    else:
        print(as_text(findings))
    return exit_code(findings)
