"""Nodes that do not answer, differ, or have sick devices are refused, or excluded."""

import dataclasses
import errno
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.cluster import nodes
from mindspeed_rlxf.cluster.nodes import (
    OURS,
    Node,
    NodeCheck,
    NodeReport,
    build_id,
    find_node_problems,
    hash_sources,
    report_node,
)
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.device import driver


def reporter(reports: Mapping[str, Any]) -> Callable[..., list[Any]]:
    """Ask nodes that give these reports; others do not answer."""
    silent = SimpleNamespace(cause="ModuleNotFoundError: no answer")

    def ask(nodes: Sequence[Node], function: Any, args: Any, timeout_s: float) -> list[Any]:
        assert function is report_node
        found = [reports.get(node.host, silent) for node in nodes]
        if args[-1] is None:  # devices are not asked for
            for i, report in enumerate(found):
                if report is not silent:
                    found[i] = dataclasses.replace(report, devices=None, sick=())
        return found

    return ask


NODES = [Node(name, name, f"10.0.0.{i}", 8, 8) for i, name in enumerate("abcde")]


def checked(probe: DeviceKind | None) -> tuple[Any, list[str]]:
    """The check, and the ids it lets pass: b does not answer, c has a sick device, d too few, e
    another build."""
    ours = dataclasses.replace(report_node([], None), devices=8)
    changes: dict[str, dict[str, Any]] = {
        "a": {}, "c": {"sick": ("device 3: Alarm",)}, "d": {"devices": 7},
        "e": {"versions": {**ours.versions, OURS: "0"}},
    }  # fmt: skip
    reports = {name: dataclasses.replace(ours, host=name, **changes[name]) for name in changes}
    check = NodeCheck(reporter(reports), {}, None, 1.0, probe)
    return check, [node.id for node in check.check(NODES)]


def test_bad_nodes_are_excluded_and_each_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    check, usable = checked(DeviceKind.NPU)
    assert usable == ["a"] and check.excluded == {"b", "c", "d", "e"}
    said = caplog.messages
    assert said[0].startswith("b (10.0.0.1) is excluded: mindspeed_rlxf on b (10.0.0.1) must be ")
    assert f"({build_id()}): ModuleNotFoundError: no answer; install the same there" in said[0]
    assert said[1:3] == [
        "c (10.0.0.2) is excluded: device 3: Alarm",
        "d (10.0.0.3) is excluded: its driver lists 7 of 8 devices",
    ]
    assert "mindspeed_rlxf on e must be that of the driver" in said[3]
    assert check.check(NODES) == [NODES[0]] and len(caplog.messages) == 4  # reported once


def test_nodes_that_do_not_answer_are_refused_by_default() -> None:
    with pytest.raises(UserError, match="no answer") as refused:
        checked(None)
    assert len(refused.value.problems) == 2  # b, and the build of e; devices were not asked for


def test_health_is_asked_of_the_drivers_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tuple(driver.DriverDevice(i, "x", "OK" if i else "Alarm", 1, 0) for i in range(2))
    monkeypatch.setattr(driver, "query_driver", lambda kind: driver.DriverView("t", "1", devices))
    seen = report_node([], None, DeviceKind.NPU)
    assert (seen.devices, seen.sick) == (2, ("device 0: Alarm",))
    view = driver.DriverView("t", "", (), "no tool")
    monkeypatch.setattr(driver, "query_driver", lambda kind: view)
    assert report_node([], None, DeviceKind.NPU).devices is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def node(ours: NodeReport, host: str, **changes: object) -> NodeReport:
    return dataclasses.replace(ours, host=host, **changes)  # type: ignore[arg-type]


def test_a_node_like_the_driver_has_no_problem_and_others_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "SEEN_WITHIN_S", 0.3)
    ours = report_node([str(folder)], str(folder / "config.json"))
    assert ours.sees_run and ours.versions[OURS] == build_id()
    assert not report_node([], str(folder / "nothing")).sees_run
    keys, files = {str(folder): "ref.load"}, ours.files[str(folder)] or {}

    def problems(**changes: object) -> list[str]:
        return find_node_problems(ours, node(ours, "b", **changes), keys)

    assert problems() == []
    (problem,) = problems(files={str(folder): None})
    assert problem == (
        f"ref.load={folder} must be on every node; b has no such folder; copy the folder to b, "
        "or use one that every node shares"
    )
    for there in ({**files, "model.safetensors": "3 bytes"}, {**files, "config.json": "0"}, {}):
        (problem,) = problems(files={str(folder): there})
        lacks = there.get("model.safetensors", "missing")
        assert f"model.safetensors ({lacks} there, 5 bytes here)" in problem or "config" in problem
    for name, version in ((OURS, "0.0.9, sources 0"), ("torch", "2.1.0")):
        (problem,) = problems(versions={**ours.versions, name: version})
        assert problem.startswith(f"{name} on b must be that of the driver")
    local = ours.versions["torch"].split("+")[0] + "+other"
    assert problems(versions={**ours.versions, "torch": local}) == []


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


def problems_between(driver: Path, there: Path, below: str = "") -> list[str]:
    """What is said of a host where `there` stands in the place of the driver's folder."""
    folder, other = str(driver / below), str(there / below)
    ours, theirs = report_node([folder], None), report_node([other], None)
    theirs = node(theirs, "b", files={folder: theirs.files[other]})
    return find_node_problems(ours, theirs, {folder: "ref.load"})


@pytest.mark.parametrize("kind", MEGATRON)
def test_every_file_of_megatrons_weights_counts(tmp_path: Path, kind: str) -> None:
    files = MEGATRON[kind]
    ours, same = (megatron(tmp_path / name, files) for name in ("ours", "same"))
    assert problems_between(ours, same) == []
    for name, size in files.items():
        without = megatron(tmp_path / f"no-{name}", {k: v for k, v in files.items() if k != name})
        (problem,) = problems_between(ours, without)
        assert f"iter_0000001/{name} (missing there, {size} bytes here)" in problem
        cut = megatron(tmp_path / f"cut-{name}", {**files, name: size - 1})
        (problem,) = problems_between(ours, cut)
        assert (
            f"b: iter_0000001/{name} ({size - 1} bytes there, {size} bytes here); copy" in problem
        )


@pytest.mark.parametrize("kind", MEGATRON)
def test_an_iteration_that_a_host_lacks_is_named(tmp_path: Path, kind: str) -> None:
    ours = megatron(tmp_path / "ours", MEGATRON[kind])
    empty = tmp_path / "empty"
    empty.mkdir()
    (problem,) = problems_between(ours, empty)
    form = "torch" if kind == "legacy" else kind
    assert f"b: weights (hf in . there, {form} in iter_0000001 here), iter_0000001/" in problem
    (problem,) = problems_between(ours, empty, "iter_0000001")
    assert problem == (
        f"ref.load={ours}/iter_0000001 must be on every node; b has no such folder; copy the "
        "folder to b, or use one that every node shares"
    )


def test_a_host_with_another_iteration_or_several_is_named(tmp_path: Path) -> None:
    ours = megatron(tmp_path / "ours", {RANK: 5})
    second = megatron(tmp_path / "second", {RANK: 5}, "iter_0000002")
    (problem,) = problems_between(ours, second)
    assert "weights (torch in iter_0000002 there, torch in iter_0000001 here)" in problem
    (problem,) = problems_between(ours, megatron(second, {RANK: 5}))
    assert f"weights ({second} holds iter_0000001, iter_0000002 and no latest_" in problem


def test_optimizer_states_that_nobody_reads_do_not_count(tmp_path: Path, folder: Path) -> None:
    whole = megatron(tmp_path / "whole", {RANK: 5, "mp_rank_00/distrib_optim.pt": 50})
    assert problems_between(whole, megatron(tmp_path / "weights", {RANK: 5})) == []
    (folder / "optimizer.pt").write_bytes(b"123")
    assert report_node([str(folder)], None).files[str(folder)] == {
        "config.json": "44136fa355b3",  # sha256 of {}
        "model.safetensors": "5 bytes",
        "weights": "hf in .",
    }


def test_a_folder_that_only_the_hub_has_is_not_compared(tmp_path: Path) -> None:
    name = str(tmp_path / "Qwen")
    assert report_node([name], None).files == {name: None}
    assert problems_between(tmp_path / "Qwen", tmp_path) == []


def test_a_file_that_may_not_be_read_is_a_difference(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    ours = report_node([str(folder)], None)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    (problem,) = find_node_problems(
        ours, report_node([str(folder)], None), {str(folder): "ref.load"}
    )
    assert "config.json (Permission denied there, 44136fa355b3 here)" in problem


def test_names_and_contents_of_sources_decide(tmp_path: Path) -> None:
    def made(folder: str, **files: str) -> str:
        for name, text in files.items():
            path = tmp_path / folder / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return hash_sources(tmp_path / folder)

    first = made("a", one="x", two="y")
    assert made("b", two="y", one="x") == first
    (tmp_path / "b" / "one.pyc").write_text("compiled")
    assert hash_sources(tmp_path / "b") == first
    assert len({first, made("c", one="x", two="z"), made("d", one="x", tw="oy")}) == 3


@pytest.mark.parametrize("probe", [DeviceKind.NPU, None])
def test_nodes_that_are_gone_do_not_count_and_those_that_came_first_are_compared_again(
    probe: DeviceKind | None, caplog: pytest.LogCaptureFixture
) -> None:
    ours = dataclasses.replace(report_node([], None), devices=8)
    of = {name: node(ours, name, versions={**ours.versions, "torch-npu": v})
          for name, v in {"a": "2.6.0", "b": "2.7.1", "c": "2.7.1"}.items()}  # fmt: skip
    check = NodeCheck(reporter(of), {}, None, 1.0, probe)
    a, b, c = NODES[:3]
    assert check.check([a]) == [a]
    said = "torch-npu on a must be that of the other nodes (2.7.1), not 2.6.0"
    if probe is None:
        with pytest.raises(UserError, match=re.escape(said)):
            check.check([a, b, c])
    else:
        assert check.check([a, b, c]) == [b, c] and said in caplog.text
    of["a"] = node(ours, "a", versions=of["b"].versions)  # installed, and Ray started again
    again = dataclasses.replace(a, id="another id")
    assert check.check([again, b, c]) == [again, b, c]


def test_nodes_with_other_faults_have_no_vote() -> None:
    """A node with a wrong torch mostly has a wrong torch-npu too."""
    ours = dataclasses.replace(report_node([], None), devices=8)
    right = {**ours.versions, "torch-npu": "2.7.1"}
    wrong = {**right, "torch": "2.1", "torch-npu": "2.1"}
    of = {name: node(ours, name, versions=wrong if name in "ab" else right) for name in "abc"}
    check = NodeCheck(reporter(of), {}, None, 1.0, DeviceKind.NPU)
    assert check.check(NODES[:3]) == [NODES[2]]
