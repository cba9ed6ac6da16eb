"""Write SHA256SUMS anew: for whoever changes a version of a set.

    .venv/bin/python constraints/update_hashes.py

Asks PyPI for the files of every version that the sets name. Kept are the wheels that pip could
choose on Linux (x86_64, aarch64) with the Pythons below, and the source distribution where one of
these has no wheel. torch is left out: its build is the machine's choice.

Ends with an error where a version has no file for one of them, and where PyPI has another hash for
a file than SHA256SUMS.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator
from functools import cache
from typing import Any

from locked import SUMS, Pin, package, pins, sums
from packaging.markers import Marker
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

PYTHONS = [(3, minor) for minor in range(10, 15)]
MACHINES = ("x86_64", "aarch64")
INDEX = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"


def targets(pin: Pin) -> Iterator[tuple[tuple[int, int], str]]:
    """Pythons and machines that a line is for."""
    for python in PYTHONS:
        for machine in MACHINES:
            here = {"python_version": "{}.{}".format(*python), "platform_machine": machine}
            if not pin.marker or Marker(pin.marker).evaluate({**here, "sys_platform": "linux"}):
                yield python, machine


@cache
def tags(python: tuple[int, int], machine: str) -> set[Tag]:
    """What a wheel may say that pip takes there; of glibc any version."""
    names = ["manylinux1", "manylinux2010", "manylinux2014"]
    names += [f"manylinux_2_{minor}" for minor in range(5, 60)]
    platforms = [f"{name}_{machine}" for name in names]
    cp = "cp{}{}".format(*python)
    return {*cpython_tags(python, [cp], platforms), *compatible_tags(python, cp, platforms)}


@cache
def wheel_tags(file: str) -> frozenset[Tag]:
    return parse_wheel_filename(file)[3]


def usable(files: list[str], python: tuple[int, int], machine: str) -> list[str]:
    """The wheels among the files for one target, else the source distribution."""
    wanted = tags(python, machine)
    wheels = [file for file in files if file.endswith(".whl")]
    fitting = [file for file in wheels if wheel_tags(file) & wanted]
    return fitting or [file for file in files if not file.endswith(".whl")]


def published(pin: Pin) -> list[dict[str, Any]]:
    """What PyPI says about the files of one version."""
    request = urllib.request.Request(f"{INDEX}/{pin.name}/", headers={"Accept": JSON})
    with urllib.request.urlopen(request, timeout=60) as answer:
        listed = json.load(answer)["files"]
    # Files of old versions have forms that package() does not know (.exe, .zip, eggs).
    near = [file for file in listed if f"-{pin.version}" in file["filename"]]
    known = [file for file in near if file["filename"].endswith((".whl", ".tar.gz"))]
    return [file for file in known if package(file["filename"]) == (pin.name, pin.version)]


def chosen(pin: Pin) -> dict[str, str]:
    """File name -> SHA-256 of what pip could choose. Raises SystemExit where a target has none."""
    found: dict[str, str] = {}
    files = published(pin)
    for python, machine in targets(pin):
        number = "{}.{}".format(*python)
        allowed = {
            file["filename"]: file["hashes"]["sha256"]
            for file in files
            if f"{number}.99" in SpecifierSet(file.get("requires-python") or "")
        }
        names = usable(list(allowed), python, machine)
        if not names:
            raise SystemExit(f"error: {pin.line}: no file for Python {number} on {machine}")
        found.update({name: allowed[name] for name in names})
    return found


def main() -> None:
    texts = [file.read_text(encoding="utf-8") for file in sorted(SUMS.parent.glob("*.txt"))]
    named = {pin for text in texts for pin in pins(text) if pin.name != "torch"}
    before = sums(SUMS.read_text(encoding="utf-8")) if SUMS.exists() else {}
    after: dict[str, str] = {}
    for pin in sorted(named):
        after.update(chosen(pin))
    changed = [name for name in after if before.get(name, after[name]) != after[name]]
    if changed:
        raise SystemExit(f"error: PyPI has another hash than {SUMS.name}: {', '.join(changed)}")
    lines = [f"{after[name]}  {name}\n" for name in sorted(after, key=str.lower)]
    SUMS.write_text("".join(lines), encoding="utf-8")
    print(f"{SUMS.name}: {len(after)} files of {len(named)} lines", file=sys.stderr)


if __name__ == "__main__":
    main()
