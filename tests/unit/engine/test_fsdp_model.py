"""Models of transformers as FSDP's engine builds them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from mindspeed_rlxf.engine import head_outputs
from mindspeed_rlxf.engine.fsdp import model as built
from mindspeed_rlxf.engine.fsdp.attention import Layout
from mindspeed_rlxf.models.parameters import Head
from tests.distributed.fsdp_models import make_family


@torch.no_grad()
def test_no_dropout_is_left_in_updates(tmp_path: Path) -> None:
    lm, _, _ = make_family(tmp_path, "opt")
    model = built.build(str(lm), Head.LANGUAGE_MODEL, torch.float32)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    ids = torch.arange(9)[None]
    one, other = (
        built._run(model.train(mode), ids, ids, Layout((9,)), torch.clone) for mode in (True, False)
    )
    assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.parametrize(("name", "packs"), [("phi3", False), ("opt", True)])
def test_longest_positions_keep_rows_apart(tmp_path: Path, name: str, packs: bool) -> None:
    lm, _, _ = make_family(tmp_path, name)
    model = built.build(str(lm), Head.LANGUAGE_MODEL, torch.float32)
    assert built.packs(model) is packs and built.runs_rows_alone(model) is not packs


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_longest_positions_are_seen_by_either_name(name: str) -> None:
    """transformers 4 has the first, 5 the second, there also by kind of layer."""
    settings: dict[str, Any] = {"type": "longrope", "original_max_position_embeddings": 11}
    if name == "rope_parameters":
        settings = {"full_attention": settings, "sliding_attention": {"rope_type": "default"}}
    config: Any = SimpleNamespace(**{name: settings}, max_position_embeddings=128)
    assert built.runs_rows_alone(SimpleNamespace(config=config))
    assert built.original_length(config) == 11


def test_angles_that_follow_other_rows_are_refused(tmp_path: Path) -> None:
    lm, _, _ = make_family(tmp_path, "dynamic")
    with pytest.raises(ValueError, match="rope_type=dynamic"):
        built.build(str(lm), Head.LANGUAGE_MODEL, torch.float32)


def test_the_states_of_a_policy_wait_on_the_host() -> None:
    batch: Any = SimpleNamespace(
        trained_mask=None, prediction_places=lambda _: torch.arange(5), cp=None
    )
    head: Any = SimpleNamespace(full_hidden=lambda hidden, partial_gradient: hidden)
    with FakeTensorMode():
        states = head_outputs.read_states(head, batch, torch.zeros(5, 3, device="cuda"))
    assert states.device.type == "cpu"


class Experts(nn.Module):
    """Chooses the first of two experts for all tokens, as modules of transformers 4 can."""

    def __init__(self, routes: bool) -> None:
        super().__init__()
        self.experts, self.routes = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), routes

    def forward(self, inputs: Tensor) -> Any:
        found = self.experts[0](inputs)
        return (found, inputs) if self.routes else found


@pytest.mark.parametrize("routes", [False, True])
def test_experts_without_tokens_have_gradients(routes: bool) -> None:
    module, inputs = Experts(routes), torch.ones(2, 3)
    before = module(inputs)
    built.reach_experts(nn.Sequential(module))
    found = module(inputs)
    assert isinstance(found, tuple) is routes
    (found, before) = (found[0], before[0]) if routes else (found, before)
    assert torch.equal(found, before)
    found.sum().backward()
    grads = [parameter.grad for parameter in module.experts[1].parameters()]
    assert all(grad is not None and not grad.any() for grad in grads)
