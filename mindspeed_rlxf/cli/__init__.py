"""Entry point for `mindspeed-rlxf <command> ...`; each command has a module here."""

import sys
from collections.abc import Sequence

from mindspeed_rlxf.cli.command_line import use_utf8_output
from mindspeed_rlxf.config.problems import closest
from mindspeed_rlxf.ops.supervisor import supervise

COMMANDS = {
    "train": "train by PPO, GRPO or online DPO; dry_run=true prints the plan",
    "new": "write a first configuration for a Hugging Face folder",
    "preprocess": "make a prompt data set from rows of files",
    "convert": "convert weights between Hugging Face and Megatron",
    "doctor": "find what keeps a run from working",
    "generate": "answer prompts with a run's policy or another model",
    "report": "write a run's report as one HTML file",
    "watch": "serve the report of a run while it goes on",
    "from-verl": "print a YAML of verl in the keys used here",
}
"""Names of the commands, and what each does."""
OF_OTHERS = {"init": "new", "create": "new", "run": "train", "chat": "generate", "plan": "train"}
"""Names that users try -> ours."""


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
        if name == "train" and argv is None:
            exit_code = supervise()  # None in the child process, which trains
            if exit_code is not None:
                return exit_code
        # Imported here, as the process that supervises a run needs none of the commands.
        from mindspeed_rlxf.cli import (
            convert,
            doctor,
            from_verl,
            generate,
            new,
            preprocess,
            report,
            train,
            watch,
        )

        commands = (train, new, preprocess, convert, doctor, generate, report, watch, from_verl)
        return dict(zip(COMMANDS, commands, strict=True))[name].main(arguments[1:])
    use_utf8_output()
    usage = f"usage: mindspeed-rlxf {{{','.join(COMMANDS)}}} ..."
    if name in ("-h", "--help"):
        print(usage)
        print()
        for command, purpose in COMMANDS.items():
            print(f"  {command:<12}{purpose}")
        print()
        print("mindspeed-rlxf COMMAND --help has the options of a command.")
        return 0
    guess = OF_OTHERS.get(name) or closest(name, COMMANDS)
    hint = f"did you mean {guess}? " if guess else ""
    print(f"error: {name}: no such command; {hint}{usage}", file=sys.stderr)
    return 2
