"""Constraints for a machine that has its own torch (`DEVICE=cuda` or `npu`).

Prints the lines of the given constraints file whose package is not installed yet, and the
installed torch at its exact version, so that installing under the result changes no torch.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LINE = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==")


def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def constraints(lines: list[str]) -> list[str]:
    """Constraint lines that leave every installed package alone; torch is held at its version.

    Raises SystemExit where no torch is installed.
    """
    torch = installed("torch")
    if torch is None:
        raise SystemExit(
            "error: DEVICE=cuda and DEVICE=npu use the installed torch and none is installed for "
            "this Python; install one, or set PYTHON to the interpreter that has it"
        )
    pins = [f"torch=={torch}"]
    for line in lines:
        match = LINE.match(line)
        if match and installed(match["name"]) is None:
            pins.append(line)
    return pins


if __name__ == "__main__":
    print("\n".join(constraints(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())))
