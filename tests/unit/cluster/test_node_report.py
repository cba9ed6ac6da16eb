"""Nodes with another installation or other files are named before they compute."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest

from mindspeed_rlxf.cluster.installed import OURS, build
from mindspeed_rlxf.cluster.node_report import NodeReport, problems, report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def node(ours: NodeReport, host: str, **changes: object) -> NodeReport:
    return dataclasses.replace(ours, host=host, **changes)  # type: ignore[arg-type]


def test_a_like_node_has_no_problem(folder: Path) -> None:
    ours = report([str(folder)], str(folder / "config.json"))
    assert ours.sees_run and ours.versions[OURS] == build()
    assert not report([], str(folder / "nothing")).sees_run
    assert problems(ours, [node(ours, "a"), node(ours, "b")], {str(folder): "ref.load"}) == []


def test_a_node_without_the_folder_or_with_half_of_it_is_named(folder: Path) -> None:
    ours = report([str(folder)], None)
    keys = {str(folder): "ref.load"}
    (problem,) = problems(ours, [ours, node(ours, "b", files={str(folder): None})], keys)
    assert problem == (
        f"ref.load={folder} must be on every node; b has no such folder; copy the folder to b, "
        "or use one that every node shares"
    )
    half = {str(folder): {**(ours.files[str(folder)] or {}), "model.safetensors": "3 bytes"}}
    (problem,) = problems(ours, [node(ours, "b", files=half)], keys)
    assert "on b: model.safetensors (3 bytes there, 5 bytes here); copy" in problem
    (problem,) = problems(ours, [node(ours, "b", files={str(folder): {}})], keys)
    assert "model.safetensors (missing there, 5 bytes here)" in problem


RANK = "mp_rank_00/model_optim_rng.pt"
MEGATRON = {
    "legacy": {RANK: 5, "mp_rank_01/model_optim_rng.pt": 7},
    "torch_dist": {".metadata": 3, "__0_0.distcp": 9, "common.pt": 4},
}


def megatron(folder: Path, files: dict[str, int], iteration: str = "iter_0000001") -> Path:
    for name, size in files.items():
        file = folder / iteration / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(size))
    return folder


def told_of(driver: Path, there: Path, below: str = "") -> list[str]:
    """What is said of a host where `there` stands in the place of the driver's folder."""
    folder, other = str(driver / below), str(there / below)
    ours, theirs = report([folder], None), report([other], None)
    theirs = node(theirs, "b", files={folder: theirs.files[other]})
    return problems(ours, [ours, theirs], {folder: "ref.load"})


@pytest.mark.parametrize("kind", MEGATRON)
def test_every_file_of_megatrons_weights_counts(tmp_path: Path, kind: str) -> None:
    files = MEGATRON[kind]
    ours, same = (megatron(tmp_path / name, files) for name in ("ours", "same"))
    assert told_of(ours, same) == []
    for name, size in files.items():
        without = megatron(tmp_path / f"no-{name}", {k: v for k, v in files.items() if k != name})
        (problem,) = told_of(ours, without)
        assert f"iter_0000001/{name} (missing there, {size} bytes here)" in problem
        cut = megatron(tmp_path / f"cut-{name}", {**files, name: size - 1})
        (problem,) = told_of(ours, cut)
        assert (
            f"b: iter_0000001/{name} ({size - 1} bytes there, {size} bytes here); copy" in problem
        )


@pytest.mark.parametrize("kind", MEGATRON)
def test_an_iteration_that_a_host_lacks_is_named(tmp_path: Path, kind: str) -> None:
    ours = megatron(tmp_path / "ours", MEGATRON[kind])
    empty = tmp_path / "empty"
    empty.mkdir()
    (problem,) = told_of(ours, empty)
    form = "torch" if kind == "legacy" else kind
    assert f"b: weights (hf in . there, {form} in iter_0000001 here), iter_0000001/" in problem
    (problem,) = told_of(ours, empty, "iter_0000001")
    assert problem == (
        f"ref.load={ours}/iter_0000001 must be on every node; b has no such folder; copy the "
        "folder to b, or use one that every node shares"
    )


def test_a_host_with_another_iteration_or_several_is_named(tmp_path: Path) -> None:
    ours = megatron(tmp_path / "ours", {RANK: 5})
    second = megatron(tmp_path / "second", {RANK: 5}, "iter_0000002")
    (problem,) = told_of(ours, second)
    assert "weights (torch in iter_0000002 there, torch in iter_0000001 here)" in problem
    (problem,) = told_of(ours, megatron(second, {RANK: 5}))
    assert f"weights ({second} holds iter_0000001, iter_0000002 and no latest_" in problem


def test_optimizer_states_that_nobody_reads_do_not_count(tmp_path: Path, folder: Path) -> None:
    whole = megatron(tmp_path / "whole", {RANK: 5, "mp_rank_00/distrib_optim.pt": 50})
    assert told_of(whole, megatron(tmp_path / "weights", {RANK: 5})) == []
    (folder / "optimizer.pt").write_bytes(b"123")
    assert report([str(folder)], None).files[str(folder)] == {
        "config.json": "44136fa355b3",  # sha256 of {}
        "model.safetensors": "5 bytes",
        "weights": "hf in .",
    }


def test_a_folder_that_only_the_hub_has_is_not_compared(tmp_path: Path) -> None:
    name = str(tmp_path / "Qwen")
    assert report([name], None).files == {name: None}
    assert told_of(tmp_path / "Qwen", tmp_path) == []


def test_a_file_that_may_not_be_read_is_a_difference(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    ours = report([str(folder)], None)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    (problem,) = problems(ours, [report([str(folder)], None)], {str(folder): "ref.load"})
    assert "config.json (Permission denied there, 44136fa355b3 here)" in problem


def test_contents_of_small_files_count(folder: Path) -> None:
    before = report([str(folder)], None)
    (folder / "config.json").write_text("[]")
    assert problems(before, [report([str(folder)], None)], {str(folder): "ref.load"})


def test_other_sources_and_packages_are_named(folder: Path) -> None:
    ours = report([], None)
    other = {**ours.versions, OURS: "0.0.9, sources 0"}
    (problem,) = problems(ours, [ours, node(ours, "b", versions=other)], {})
    assert problem.startswith(f"mindspeed_rlxf on b must be that of the driver ({build()}), not 0.")
    older = {**ours.versions, "torch": "2.1.0"}
    (problem,) = problems(ours, [node(ours, "b", versions=older)], {})
    assert problem.startswith("torch on b must be that of the driver")
    local = {**ours.versions, "torch": ours.versions["torch"].split("+")[0] + "+other"}
    assert problems(ours, [node(ours, "b", versions=local)], {}) == []


def test_device_packages_are_compared_among_nodes_and_not_with_the_driver() -> None:
    ours = report([], None)
    newer, older = ({**ours.versions, "torch-npu": v} for v in ("2.7.1", "2.6.0"))
    a, b = node(ours, "a", versions=newer), node(ours, "b", versions=older)
    assert problems(ours, [a, node(a, "c")], {}) == []
    (problem,) = problems(ours, [a, b], {})
    assert problem.startswith("torch-npu on b must be that of the other nodes (2.7.1), not 2.6.0")
