"""Versions of an NPU installation that go together pass; others are refused or warned about."""

import re
from pathlib import Path

import pytest

from mindspeed_rlxf.device import npu_versions
from mindspeed_rlxf.device.findings import Status
from mindspeed_rlxf.device.npu_versions import DEFAULT, SETS, Installed
from tests.unit.device import npu_recorder

GOOD = Installed("2.7.1+cpu", "2.7.1.post8", "0.12.1", "0.12.1", "9.1.0")
OLDER = Installed("2.7.1", "2.7.1", "0.12.1", "0.12.1", "8.3.RC1")  # verl's choice of 2025
NEWER = Installed("2.9.0", "2.9.0.post2", "0.16.0", "0.16.0", "9.0.0")
CONSTRAINTS = Path(__file__).parents[3] / "constraints"
PUBLISHED = [
    Installed(each.torch[0], each.torch_npu, each.megatron_core, each.mindspeed, each.cann)
    for each in SETS
]


def problems(there: Installed, status: Status) -> list[str]:
    found = npu_versions.pair_problems(there)
    return [f"{each.value}; {each.remedy}" for each in found if each.status is status]


@pytest.mark.parametrize("there", [GOOD, OLDER, NEWER, *PUBLISHED])
def test_a_set_as_published_gives_no_warning(there):
    assert list(npu_versions.pair_problems(there)) == []


@pytest.mark.parametrize(("there", "message"), [
    (Installed("2.7.1", "2.6.0.post5", "0.12.1", "0.12.1", None),
     r"torch_npu 2\.6\.0\.post5 must have the number of torch.*torch_npu==2\.7\.1\.\*"),
    (Installed("2.7.1", "2.7.1", "0.16.1", "0.12.1", None),
     r"MindSpeed 0\.12\.1 must pair with Megatron-LM 0\.16\.1; check out .*core_r0\.16\.0"),
    (Installed("2.7.1", "2.7.1", "0.13.0", "0.12.1", None),
     r"must pair with Megatron-LM 0\.13\.0; use a whole checkout of .*core_v0\.12\.1 or"),
])  # fmt: skip
def test_versions_that_cannot_work_are_refused_with_a_remedy(there, message):
    (problem,) = problems(there, Status.ERROR)
    assert re.search(message, problem)


@pytest.mark.parametrize(("there", "warning"), [
    (Installed("2.7.1", "2.7.1.post2", "0.12.1", "0.12.1", "9.0.0"),
     r"not in torch_npu's own table of pairs; install torch_npu 2\.7\.1\.post4 or"),
    (Installed("2.7.1", "2.7.1", "0.12.1", "0.12.1", "7.0.1"),
     r"table of pairs; use CANN 8\.3, 8\.5, 9\.0, 9\.1"),
    (Installed("2.6.0", "2.6.0.post5", "0.12.1", "0.12.1", "8.5.0"),
     r"torch 2\.6\.0 is not that of npu-core0\.12\.1; use torch 2\.7\.1"),
    (Installed("2.7.1", "2.7.1.post2", "0.12.1", None, "8.5.0"), "its version is not known"),
    (Installed("2.7.1", "2.7.1.post2", None, "0.12.1", "8.5.0"),
     "^Megatron-LM, whose version is not known, is in no set of constraints"),
    (Installed("2.7.1", "2.7.1.post2", "0.14.0", None, "8.5.0"), "in no set of constraints"),
])  # fmt: skip
def test_versions_that_were_never_tried_are_warned_about(there, warning):
    assert problems(there, Status.ERROR) == []
    warnings = problems(there, Status.WARNING)
    assert any(re.search(warning, text) for text in warnings), warnings


def test_the_default_set_is_that_of_make():
    text = (CONSTRAINTS.parent / "Makefile").read_text(encoding="utf-8")
    assert f"$(if $(filter npu,$(DEVICE)),{DEFAULT.name},cpu)" in text


@pytest.mark.parametrize(("file", "text", "message"), [
    ("__init__.py", "import megatron_adaptor\n", r"needs MegatronAdaptor.*26\.1\.0_core"),
    ("megatron_adaptor.py", "def patch_features(): ...\n", "must have .*repatch"),
])  # fmt: skip
def test_a_mindspeed_that_cannot_work_is_refused(monkeypatch, tmp_path, file, text, message):
    npu_recorder.install(monkeypatch, tmp_path)
    npu_versions.require_versions()
    (tmp_path / "MindSpeed" / "mindspeed" / file).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        npu_versions.require_versions()


@pytest.mark.parametrize("each", SETS, ids=lambda each: each.name)
def test_every_set_has_its_constraints_with_its_megatron(each):
    text = (CONSTRAINTS / f"{each.name}.txt").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("megatron-core==")]
    assert npu_versions.find_set(line.removeprefix("megatron-core=="), each.torch[-1]) is each
    assert npu_versions.find_set(each.megatron_core, f"{each.torch[0]}+cpu") is each


def test_servers_of_another_minor_version_are_named() -> None:
    own = npu_versions.Installed("2.10.0", "2.10.0.post4", "0.16.1", "0.16.0", "9.1.0")
    fit, other = (
        own._replace(vllm="0.23.0", vllm_ascend="0.23.0.post1"),
        own._replace(vllm="0.32.0"),
    )
    assert [*npu_versions.pair_problems(own)] == [*npu_versions.pair_problems(fit)] == []
    assert [*npu_versions.pair_problems(other)] == [], "no servers on NPU"
    (found,) = npu_versions.pair_problems(other._replace(vllm_ascend="0.23.0"))
    assert "vllm 0.32.0 is not that of npu-vllm" in found.value


@pytest.mark.parametrize(("folders", "message"), [
    (["wheel", "MindSpeed"], r"megatron\.training.*core_v0\.12\.1.*`ray start`"),
    (["wheel", "Megatron-LM", "MindSpeed"], "must come from one Megatron-LM checkout"),
    (["Megatron-LM"], r"needs MindSpeed.*26\.1\.0_core_r0\.12\.1"),
])  # fmt: skip
def test_incomplete_installations_are_refused(monkeypatch, tmp_path, folders, message):
    """wheel: megatron.core without megatron.training"""
    npu_recorder.install(monkeypatch, tmp_path)
    npu_versions.require_versions()
    npu_recorder.checkout(tmp_path / "wheel", ["core"], (0, 16, 1))
    npu_recorder.look_in(monkeypatch, [tmp_path / name for name in folders])
    with pytest.raises(ValueError, match=message):
        npu_versions.require_versions()
