"""Commands: parse, compose, call; no logic. `mindspeed-rlxf <command> ...` enters here."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mindspeed_rlxf.cli import convert, doctor, preprocess, train

COMMANDS = {
    "train": train.main,
    "preprocess": preprocess.main,
    "convert": convert.main,
    "doctor": doctor.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the named command with the rest of the line; 2 for a command that is not there."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in COMMANDS:
        return COMMANDS[name](arguments[1:])
    usage = f"usage: mindspeed-rlxf {{{','.join(COMMANDS)}}} ..."
    if name in ("-h", "--help"):
        print(usage)
        return 0
    print(f"error: {name}: no such command; {usage}", file=sys.stderr)
    return 2
