"""Nodes with another installation or other files are named before they compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mindspeed_rlxf.runtime.installed import build
from mindspeed_rlxf.runtime.node_report import NodeReport, problems, report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def node(ours: NodeReport, host: str, **changes: object) -> NodeReport:
    return dataclasses.replace(ours, host=host, **changes)  # type: ignore[arg-type]


def test_a_like_node_has_no_problem(folder: Path) -> None:
    ours = report([str(folder)], str(folder / "config.json"))
    assert ours.sees_run and ours.build == build()
    assert not report([], str(folder / "nothing")).sees_run
    assert problems(ours, [node(ours, "a"), node(ours, "b")], {str(folder): "ref.load"}) == []


def test_a_node_without_the_folder_or_with_half_of_it_is_named(folder: Path) -> None:
    ours = report([str(folder)], None)
    keys = {str(folder): "ref.load"}
    (problem,) = problems(ours, [ours, node(ours, "b", files={str(folder): {}})], keys)
    assert problem == (
        f"ref.load={folder} must be on every node; b has no such folder; copy the folder to b, "
        "or use one that every node shares"
    )
    half = {str(folder): {**ours.files[str(folder)], "model.safetensors": "3 bytes"}}
    (problem,) = problems(ours, [node(ours, "b", files=half)], keys)
    assert "on b: model.safetensors (3 bytes there, 5 bytes here); copy" in problem


def test_contents_of_small_files_count(folder: Path) -> None:
    before = report([str(folder)], None)
    (folder / "config.json").write_text("[]")
    assert problems(before, [report([str(folder)], None)], {str(folder): "ref.load"})


def test_other_sources_and_packages_are_named(folder: Path) -> None:
    ours = report([], None)
    (problem,) = problems(ours, [ours, node(ours, "b", build="0.0.9, sources 0")], {})
    assert problem.startswith(f"mindspeed_rlxf on b must be that of the driver ({build()})")
    older = {**ours.packages, "torch": "2.1.0"}
    (problem,) = problems(ours, [node(ours, "b", packages=older)], {})
    assert problem.startswith("torch on b must be that of the driver")
    local = {**ours.packages, "torch": ours.packages["torch"].split("+")[0] + "+other"}
    assert problems(ours, [node(ours, "b", packages=local)], {}) == []


def test_device_packages_are_compared_among_nodes_and_not_with_the_driver() -> None:
    ours = report([], None)
    newer, older = ({**ours.packages, "torch-npu": v} for v in ("2.7.1", "2.6.0"))
    a, b = node(ours, "a", packages=newer), node(ours, "b", packages=older)
    assert problems(ours, [a, node(a, "c")], {}) == []
    (problem,) = problems(ours, [a, b], {})
    assert problem.startswith("torch-npu on b must be that of a (2.7.1), not 2.6.0")
