"""The stand-in raises an error that names it for every name that it does not have."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from tests.npu_standin import FOLDER


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package, imported without claiming the device name for this process."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.utils, "rename_privateuse1_backend", lambda name: None)
    monkeypatch.setattr(torch, "_register_device_module", lambda name, module: None)
    monkeypatch.setattr(torch.Tensor, "npu", None, raising=False)
    monkeypatch.setattr(torch, "_fused_adamw_", torch._fused_adamw_)
    monkeypatch.setattr(cpp_extension, "load", cpp_extension.load)
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_npu"]:
        monkeypatch.delitem(sys.modules, name)
    found = importlib.import_module("torch_npu")
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_npu"]:
        module = sys.modules.pop(name)
        monkeypatch.setitem(sys.modules, name, module)  # gone again afterwards
    return found


@pytest.mark.parametrize(
    ("module", "name"), [("", "npu_fused_infer_attention_score"), ("npu", "memory_reserved")]
)
def test_an_unknown_attribute_is_an_error_that_names_it(
    standin: Any, module: str, name: str
) -> None:
    place = getattr(standin, module) if module else standin
    assert not hasattr(place, name)
    said = f"the stand-in for {place.__name__} has no '{name}'"
    with pytest.raises(AttributeError, match=said):
        getattr(place, name)


def test_an_unknown_compiled_operator_is_an_error_that_names_it(standin: Any) -> None:
    with pytest.raises(AttributeError, match="no compiled operator 'npu_ring_attention_update'"):
        standin.compiled.load("npu_ring_attention_update", ["a.cpp"])


def test_a_device_beyond_those_that_are_seen_is_refused(
    standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5,6")
    standin.npu.set_device(1)
    with pytest.raises(AssertionError, match="the stand-in shows 2 devices, not 2"):
        standin.npu.set_device(2)
