"""The files that `make STACK=...` installs from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

FILES = sorted((Path(__file__).parents[2] / "constraints").glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_line_is_a_comment_or_an_exact_version(file: Path) -> None:
    pins: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), line
            pins.append(f"{requirement.name} {requirement.marker or ''}")
    assert len(set(pins)) == len(pins), "a package is named twice"
    assert "torch " in pins, "make takes the torch from here"
