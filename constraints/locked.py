"""Requirements for pip: the lines of a set, each with the hashes of SHA256SUMS.

    python constraints/locked.py constraints/cpu.txt > requirements.txt
    pip install --no-deps --require-hashes -r requirements.txt

torch is left out: its build is the machine's choice. `--absent` and `--misfits` are for a machine
that has its own torch and more (`DEVICE=cuda` or `npu`): what is installed stays there unless it
cannot work. `--only` prints the named packages alone, `--no-hashes` the lines as they stand.
"""

import argparse
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

SUMS = Path(__file__).with_name("SHA256SUMS")
OURS = "mindspeed-rlxf"
LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)\s*(;\s*(?P<if>.+))?")
FILE = re.compile(r"(?P<name>[A-Za-z0-9_.-]+?)-(?P<version>\d[^-]*?)(-.+\.whl|\.tar\.gz)")


class Pin(NamedTuple):
    """One line of a set. name: normalized. marker: empty where the line has none."""

    name: str
    version: str
    marker: str
    line: str


def normalized(name: str) -> str:
    """The form in which two spellings of a package's name are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> list[Pin]:
    """The packages that a set names. Raises SystemExit for a line of another form."""
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = LINE.fullmatch(line)
            if not match:
                raise SystemExit(f"error: {line!r} is not NAME==VERSION, with or without a marker")
            name = normalized(match["name"])
            found.append(Pin(name, match["version"], match["if"] or "", line))
    return found


def sums(text: str) -> dict[str, str]:
    """File name -> SHA-256, of lines as sha256sum writes them."""
    return {name: digest for digest, name in (line.split() for line in text.splitlines())}


def package(file: str) -> tuple[str, str]:
    """Name and version of a wheel or source distribution. Raises ValueError for another file."""
    match = FILE.fullmatch(file)
    if not match:
        raise ValueError(f"{file} is no wheel or source distribution")
    return normalized(match["name"]), match["version"]


def hashed(chosen: Iterable[Pin], files: dict[str, str]) -> list[str]:
    """The lines, each with `--hash` for every file of that version.

    Raises SystemExit for a package without a file.
    """
    digests: dict[tuple[str, str], list[str]] = {}
    for file, digest in files.items():
        digests.setdefault(package(file), []).append(digest)
    lines = []
    for pin in chosen:
        if (pin.name, pin.version) not in digests:
            raise SystemExit(
                f"error: {SUMS.name} has no file of {pin.name} {pin.version}; "
                "run python constraints/update_hashes.py"
            )
        options = [f"--hash=sha256:{digest}" for digest in digests[pin.name, pin.version]]
        lines.append(" \\\n    ".join([pin.line, *options]))
    return lines


def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def applies(pin: Pin) -> bool:
    """Whether the line is for this Python and machine. `packaging` has to be installed."""
    from packaging.markers import Marker

    return not pin.marker or Marker(pin.marker).evaluate()


def misfits(chosen: list[Pin]) -> list[Pin]:
    """Packages of the set whose installed version is refused by one that needs them, or missing.

    Asked are the requirements of the set, of torch and of this package. `packaging` has to be
    installed. A package at the version of the set is never among them.
    """
    from packaging.requirements import Requirement

    here = {pin.name: pin for pin in chosen if applies(pin)}
    wrong = {name for name in here if installed(name) is None}
    for asking in {*here, "torch", OURS} - wrong:
        for text in (requires(asking) if installed(asking) else None) or []:
            wanted = Requirement(text)
            name = normalized(wanted.name)
            extra = {"extra": "test" if asking == OURS else ""}
            there = installed(name) if name in here else None
            if there is None or (wanted.marker and not wanted.marker.evaluate(extra)):
                continue
            if there != here[name].version and not wanted.specifier.contains(there, True):
                wrong.add(name)
    return [pin for name, pin in here.items() if name in wrong]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("set", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these packages, where named")
    parser.add_argument("--no-hashes", action="store_true")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--absent", action="store_true", help="what is not installed in any version")
    which.add_argument("--misfits", action="store_true", help="what is missing or does not fit")
    options = parser.parse_args()

    chosen = [pin for pin in pins(options.set.read_text(encoding="utf-8")) if pin.name != "torch"]
    if options.only:
        names = {normalized(name) for name in options.only}
        chosen = [pin for pin in chosen if pin.name in names]
    if (options.absent or options.misfits) and installed("torch") is None:
        raise SystemExit(
            "error: DEVICE=cuda and DEVICE=npu use the installed torch and none is installed for "
            "this Python; install one, or set PYTHON to the interpreter that has it"
        )
    if options.absent:
        chosen = [pin for pin in chosen if installed(pin.name) is None]
    if options.misfits:
        chosen = misfits(chosen)
    lines = [pin.line for pin in chosen]
    if not options.no_hashes:
        lines = hashed(chosen, sums(SUMS.read_text(encoding="utf-8")))
    if lines:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
