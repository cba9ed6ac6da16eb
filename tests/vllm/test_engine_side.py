"""What vLLM's workers report of loaded weights, without vLLM: a module in its place."""

import runpy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_rlxf.rollout import bit_sums
from mindspeed_rlxf.rollout.bit_sums import bit_sum
from mindspeed_rlxf.rollout.receipts import SyncError, compare_receipts
from mindspeed_rlxf.rollout.vllm.server import ENGINE_SIDE

Look = Callable[[Any, dict[str, Tensor]], dict[str, int]]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """`look_at_layers` of the model for tensors that arrived."""

    class Base:
        def __class_getitem__(cls, _: Any) -> type:
            return cls

    class Factory:
        register_engine = staticmethod(lambda *_: None)

    base, factory = (
        "vllm.distributed.weight_transfer.base",
        "vllm.distributed.weight_transfer.factory",
    )
    model, utils = "vllm.lora.lora_model", "vllm.lora.utils"
    packages = "vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.lora"
    for name in (*packages, base, factory, model, utils):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    kinds = "WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"
    for kind in kinds:
        setattr(sys.modules[base], kind, Base)
    sys.modules[factory].WeightTransferEngineFactory = Factory  # type: ignore[attr-defined]
    adapter = type("LoRAModel", (), {"from_lora_tensors": classmethod(lambda *_: None)})
    sys.modules[model].LoRAModel = adapter  # type: ignore[attr-defined]
    sys.modules[utils].parse_fine_tuned_lora_name = None  # type: ignore[attr-defined]
    serve = ModuleType("rlxf_serve")
    serve.end_with = lambda _: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlxf_serve", serve)
    monkeypatch.setenv("RLXF_BIT_SUMS", bit_sums.__file__)
    monkeypatch.setenv("RLXF_TRANSPORT", "shared_memory")
    side = runpy.run_path(str(ENGINE_SIDE / "rlxf_vllm.py"))

    def looked(model: Any, sent: dict[str, Tensor]) -> dict[str, int]:
        arrived = {name: [bit_sum(tensor)] for name, tensor in sent.items()}
        forms = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in sent.items()}
        found: dict[str, int] = side["look_at_layers"](model, arrived, forms)
        return found

    return looked


class Model(torch.nn.Module):
    """A model with these parameters, by names without dots in a module `layer`."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        for name, tensor in parameters.items():
            parameter = torch.nn.Parameter(tensor.clone(), requires_grad=False)
            self.layer.register_parameter(name, parameter)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as sent": lambda sent: sent,
    "in fp32": lambda sent: sent.float(),
    "transposed": lambda sent: sent.t(),
    "with rows that pad": lambda sent: torch.cat((sent, sent[:2])),
    "with another dimension": lambda sent: sent[:, None],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(6, 6), (6, 4)])
def test_the_form_that_vllm_stores_is_no_difference(look: Look, form: str, shape: Any) -> None:
    sent = {"layer.weight": torch.randn(shape).bfloat16()}
    stored = FORMS[form](sent["layer.weight"])
    same = {"layer.weight": bit_sum(sent["layer.weight"])}
    assert look(Model(weight=stored), sent) == same
    changed = stored.clone()
    changed[1, 0] += 1
    found = look(Model(weight=changed), sent)
    assert found.keys() == same.keys() and found != same


def test_what_vllm_narrows_or_reshapes_is_not_compared(look: Look) -> None:
    sent = {"layer.A_log": torch.randn(6), "layer.weight": torch.randn(6, 4)}
    assert look(Model(A_log=sent["layer.A_log"].bfloat16(), weight=torch.randn(3, 8)), sent) == {}


def test_a_tensor_that_was_never_sent_is_named() -> None:
    worker = {
        "received": {"a": [1], "b": [2]},
        "loaded": {"a": 1, "b": 2},
        "stale": [],
        "version": "1",
    }
    with pytest.raises(SyncError, match="b: received, but never sent"):
        compare_receipts({"a": 1}, {"a": 1}, [worker], 1)
    worker["received"] = {"a": [1]}
    with pytest.raises(SyncError, match="b: loaded, but never sent"):
        compare_receipts({"a": 1}, {"a": 1}, [worker], 1)
