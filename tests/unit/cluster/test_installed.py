"""The hash of an installation differs from that of another one."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rlxf.cluster.installed import digest


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
