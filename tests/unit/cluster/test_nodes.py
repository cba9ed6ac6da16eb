"""What is compared between nodes: versions, and files that workers read; the order of ranks."""

import dataclasses
import random
from pathlib import Path

import pytest

from mindspeed_rlxf.cluster import nodes
from mindspeed_rlxf.cluster.nodes import (
    OURS,
    NodeReport,
    Place,
    build_id,
    describe_places,
    find_node_problems,
    order_ranks,
    report_node,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def node(ours: NodeReport, host: str, **changes: object) -> NodeReport:
    return dataclasses.replace(ours, host=host, **changes)  # type: ignore[arg-type]


def test_a_node_like_the_driver_has_no_problem_and_others_are_named(folder, monkeypatch):
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
    alone = dataclasses.replace(ours, versions={**ours.versions, "torch-npu": "none"})
    device = {**ours.versions, "torch-npu": "2.7.1"}
    assert find_node_problems(alone, node(ours, "b", versions=device), keys) == []
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
def test_every_file_of_megatrons_weights_counts(tmp_path, kind):
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


def test_optimizer_states_that_nobody_reads_do_not_count(tmp_path, folder):
    whole = megatron(tmp_path / "whole", {RANK: 5, "mp_rank_00/distrib_optim.pt": 50})
    assert problems_between(whole, megatron(tmp_path / "weights", {RANK: 5})) == []
    (folder / "optimizer.pt").write_bytes(b"123")
    assert report_node([str(folder)], None).files[str(folder)] == {
        "config.json": "44136fa355b3",  # sha256 of {}
        "model.safetensors": "5 bytes",
    }


def test_a_folder_that_only_the_hub_has_is_not_compared(tmp_path):
    name = str(tmp_path / "Qwen")
    assert report_node([name], None).files == {name: None}
    assert problems_between(tmp_path / "Qwen", tmp_path) == []


def test_ranks_go_by_node_then_device_whatever_the_order_of_start() -> None:
    started = [
        ("c", Place("b", "10.0.0.10", 0, (2,))),
        ("b", Place("a", "10.0.0.9", 1, (10,))),  # as numbers: 9 before 10, device 2 before 10
        ("a", Place("a", "10.0.0.9", 1, (2,))),
        ("d", Place("b", "10.0.0.10", 0, (3,))),
        ("f", Place("c", "fd00::1", 2, (1,))),
        ("e", Place("c", "fd00::1", 2, (0,))),
    ]
    for seed in range(5):
        random.Random(seed).shuffle(started)
        processes, places = order_ranks(started)
        assert "".join(processes) == "abcdef"
        assert [place.host for place in places] == ["a", "a", "b", "b", "c", "c"]


def test_entries_of_other_sizes_keep_the_order_of_the_list() -> None:
    """`[2, 1, 1]`: the plan shows two ranks on the first node, whatever its address."""
    started = [
        ("c", Place("y", "10.0.0.2", 2, (0,))),
        ("b", Place("z", "10.0.0.3", 0, (1,))),
        ("d", Place("x", "10.0.0.9", 1, (0,))),
        ("a", Place("z", "10.0.0.3", 0, (0,))),
    ]
    processes, places = order_ranks(started)
    assert "".join(processes) == "abcd"
    assert describe_places(places) == (
        "ranks 0-1 on z (10.0.0.3), rank 2 on y (10.0.0.2), rank 3 on x (10.0.0.9)"
    )
