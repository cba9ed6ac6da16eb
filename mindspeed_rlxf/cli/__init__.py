"""Entry point of `mindspeed-rlxf <command> ...`. Commands parse, compose and call."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mindspeed_rlxf.cli.command_line import speak_utf8
from mindspeed_rlxf.ops.supervisor import supervise

COMMANDS = ("train", "preprocess", "convert", "doctor", "report", "watch")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command with the rest of the line; return its exit code, 2 for an unknown one.

    `train` runs in a child process that is started again after a failure (`ops.supervisor`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in COMMANDS:
        code = supervise() if name == "train" and argv is None else None
        if code is not None:
            return code
        # Imported here, as the process that supervises a run needs none of the commands.
        from mindspeed_rlxf.cli import convert, doctor, preprocess, report, train, watch

        commands = (train, preprocess, convert, doctor, report, watch)
        return dict(zip(COMMANDS, commands, strict=True))[name].main(arguments[1:])
    speak_utf8()
    usage = f"usage: mindspeed-rlxf {{{','.join(COMMANDS)}}} ..."
    if name in ("-h", "--help"):
        print(usage)
        return 0
    print(f"error: {name}: no such command; {usage}", file=sys.stderr)
    return 2
