"""Entry point for `mindspeed-rlxf <command> ...`; each command has a module here."""

import sys
from collections.abc import Sequence

from mindspeed_rlxf.cli.command_line import use_utf8_output
from mindspeed_rlxf.ops.supervisor import supervise

COMMANDS = ("train", "preprocess", "convert", "doctor", "report", "watch", "from-verl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument; return its exit code.

    With --help or without arguments, print the usage and return 0. For an unknown command, print an
    `error:` line and return 2.

    Args:
        argv: None = this process's arguments; only then `train` may run in a child process,
            restarted after failures (`ops.supervisor`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in COMMANDS:
        if name == "train" and argv is None and (code := supervise()) is not None:
            return code
        # Imported here, as the process that supervises a run needs none of the commands.
        from mindspeed_rlxf.cli import convert, doctor, from_verl, preprocess, report, train, watch

        commands = (train, preprocess, convert, doctor, report, watch, from_verl)
        return dict(zip(COMMANDS, commands, strict=True))[name].main(arguments[1:])
    use_utf8_output()
    usage = f"usage: mindspeed-rlxf {{{','.join(COMMANDS)}}} ..."
    if name in ("-h", "--help"):
        print(usage)
        return 0
    print(f"error: {name}: no such command; {usage}", file=sys.stderr)
    return 2
