"""Nodes with another installation are found before they compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.runtime.installed import build, check_builds, digest
from mindspeed_rlxf.runtime.places import Place


def test_names_and_contents_of_sources_decide(tmp_path: Path) -> None:
    def made(folder: str, **files: str) -> str:
        for name, text in files.items():
            path = tmp_path / folder / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return digest(tmp_path / folder)

    first = made("a", one="x", two="y")
    assert made("b", two="y", one="x") == first
    (tmp_path / "b" / "one.pyc").write_text("compiled")
    assert digest(tmp_path / "b") == first
    assert len({first, made("c", one="x", two="z"), made("d", one="x", tw="oy")}) == 3


def test_hosts_with_another_build_are_named_once() -> None:
    def place(host: str, found: str) -> Place:
        return Place(host, "10.0.0.1", 0, (), found)

    check_builds([place("a", build()), place("b", build())])
    with pytest.raises(UserError) as caught:
        check_builds([place("a", build()), place("b", "0.0.9, sources 0"), place("b", "0.0.9")])
    (problem,) = caught.value.problems
    assert problem.startswith(f"mindspeed_rlxf on b must be that of the driver ({build()})")
