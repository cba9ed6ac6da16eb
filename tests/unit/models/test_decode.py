"""Products of a decode step and of experts: grouped GEMMs, and those of a large weight."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from mindspeed_rlxf.models import grouped_experts as module
from mindspeed_rlxf.models.decode import linear
from mindspeed_rlxf.models.grouped_experts import (
    ExpertWeights,
    routed_experts,
    stack_experts,
    view_as_stack,
)
from tests.unit.models.moe import Expert, Experts, Router, one_by_one, place_weights

EXPERTS, HIDDEN, WIDTH, TOPK = 5, 8, 12, 2
PLACES = ("stack", "buffer", "reversed buffer")
grouped = pytest.mark.skipif(
    not hasattr(F, "grouped_mm"), reason=f"torch {torch.__version__} has no grouped GEMM"
)


@pytest.fixture
def experts() -> Experts:
    torch.manual_seed(3)
    return Experts([Expert(HIDDEN, WIDTH) for _ in range(EXPERTS)])


def viewed(experts: Experts) -> ExpertWeights | None:
    return ExpertWeights.of(list(experts.local_experts))


@grouped
@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_grouped_products_are_those_of_one_expert_after_the_other(
    experts: Experts, place: str
) -> None:
    place_weights(experts, place)
    views, router = viewed(experts), Router(HIDDEN, EXPERTS, TOPK, 2)
    hidden = torch.randn(7, HIDDEN)
    assert views is not None
    weights = [list(expert.parameters()) for expert in experts.local_experts]
    tokens = zip(hidden, router(hidden)[0], strict=True)
    expected = torch.stack([one_by_one(token, shares, weights) for token, shares in tokens])
    assert_close(routed_experts(hidden, router, views), expected)
    assert_close(routed_experts(hidden[:1], router, views), expected[:1])


def test_weights_that_no_grouped_product_takes_are_left_to_megatron(
    experts: Experts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert viewed(experts) is None  # each in a memory of its own
    experts.bfloat16()
    stack_experts(experts)
    assert viewed(experts) is None  # rows of 12 numbers begin at multiples of 8 bytes, not 16
    experts.float()
    stack_experts(experts)
    monkeypatch.setattr(module, "_GROUPED", None)
    assert viewed(experts) is None  # an older torch


def test_weights_at_equal_distances_are_one_tensor() -> None:
    memory = torch.arange(60.0)

    def at(*starts: int) -> Any:
        return view_as_stack([memory[start : start + 6].view(2, 3) for start in starts])

    assert at(1, 21, 41).tolist() == [memory[i : i + 6].view(2, 3).tolist() for i in (1, 21, 41)]
    assert torch.equal(at(41, 21, 1), at(1, 21, 41))  # in the order of their places
    assert at(7).tolist() == [memory[7:13].view(2, 3).tolist()]
    assert at(1, 21, 42) is None and at(21, 1, 41) is None and at(1, 1) is None


@pytest.mark.parametrize("sizes", [(700, 128), (20, 16)])
def test_a_row_of_a_product_is_that_of_the_definition(sizes: tuple[int, int]) -> None:
    """Large weights take a product of their own on a CPU."""
    weight, bias = torch.randn(sizes), torch.randn(sizes[0])
    hidden = torch.randn(37, sizes[1])
    assert_close(linear(hidden, weight, bias), hidden @ weight.T + bias)
    assert_close(linear(hidden[:1], weight), hidden[:1] @ weight.T)


@grouped
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("counts", [(3, 0, 1, 4, 2), (0, 0, 0, 0, 0)])
def test_experts_train_in_grouped_products_as_one_after_the_other(
    experts: Experts, place: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients of rows, probabilities and every expert's weights, bit by bit."""
    place_weights(experts, place)
    assert viewed(experts) is not None
    grouped_mlp = module.GroupedMLP.__new__(module.GroupedMLP)
    nn.Module.__init__(grouped_mlp)
    grouped_mlp.local_experts = experts.local_experts
    grouped_mlp.num_local_experts, grouped_mlp.add_bias = EXPERTS, False
    grouped_mlp.config = SimpleNamespace(moe_apply_probs_on_input=False, fp8=None, fp4=None)
    given = torch.randn(sum(counts), HIDDEN), torch.rand(sum(counts))
    upstream = torch.randn(sum(counts), HIDDEN)

    def computed() -> list[Tensor]:
        hidden, probabilities = (each.clone().requires_grad_() for each in given)
        experts.zero_grad()
        out, _ = grouped_mlp(hidden, torch.tensor(counts), probabilities)
        out.backward(upstream)
        gradients = [weight.grad.clone() for weight in experts.parameters()]
        return [out, hidden.grad, probabilities.grad, *gradients]

    grouped_numbers = computed()
    monkeypatch.setattr(module.ExpertWeights, "of", lambda _: None)
    assert all(map(torch.equal, grouped_numbers, computed()))
