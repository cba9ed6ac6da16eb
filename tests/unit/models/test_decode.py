"""Products of a decode step: grouped ones of experts, and those of a large weight."""

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

EXPERTS, HIDDEN, WIDTH, TOPK = 5, 8, 12, 2
grouped = pytest.mark.skipif(
    not hasattr(F, "grouped_mm"), reason=f"torch {torch.__version__} has no grouped GEMM"
)


class Layer(nn.Module):
    """What `routed_experts` reads of Megatron's layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        experts = [
            nn.ModuleDict(
                {
                    "linear_fc1": nn.Linear(HIDDEN, 2 * WIDTH, bias=False),
                    "linear_fc2": nn.Linear(WIDTH, HIDDEN, bias=False),
                }
            )
            for _ in range(EXPERTS)
        ]
        self.experts = nn.Module()
        self.experts.local_experts = nn.ModuleList(_Named(expert) for expert in experts)
        self.router = _Router()

    @property
    def weights(self) -> list[Tensor]:
        both = ("linear_fc1", "linear_fc2")
        return [getattr(e, name).weight for e in self.experts.local_experts for name in both]

    def one_by_one(self, hidden: Tensor) -> Tensor:
        """Each token through each of its experts."""
        probabilities, _ = self.router(hidden[:, None])
        rows = []
        for token, shares in zip(hidden, probabilities, strict=True):
            row = torch.zeros(HIDDEN)
            for number in shares.nonzero().flatten().tolist():
                widens, narrows = self.weights[2 * number], self.weights[2 * number + 1]
                gate, up = (widens @ token).chunk(2)
                row = row + shares[number] * (narrows @ (F.silu(gate) * up))
            rows.append(row)
        return torch.stack(rows)


class _Named(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = parts["linear_fc1"], parts["linear_fc2"]


class _Router(nn.Module):
    """Two experts of each token, never the third."""

    topk = TOPK

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        tokens = hidden.squeeze(1)
        generator = torch.Generator().manual_seed(7)
        scores = tokens @ torch.randn(HIDDEN, EXPERTS, generator=generator)
        scores[:, 2] = -torch.inf
        kept = scores < scores.topk(TOPK).values[:, -1:]
        return scores.masked_fill(kept, -torch.inf).softmax(-1), None


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(3)
    return Layer()


def in_buffer(layer: Layer, is_reversed: bool) -> None:
    """Put the weights into one buffer one after the other, as Megatron's optimizer does."""
    weights = layer.weights[::-1] if is_reversed else layer.weights
    buffer, start = torch.zeros(sum(w.numel() for w in weights)), 0
    for weight in weights:
        part = buffer[start : start + weight.numel()].view(weight.shape)
        part.copy_(weight.data)
        weight.data, start = part, start + weight.numel()


@grouped
@pytest.mark.parametrize("place", ["stack", "buffer", "reversed buffer"])
@torch.no_grad()
def test_grouped_products_are_those_of_one_expert_after_the_other(layer: Layer, place: str) -> None:
    numbers = [weight.clone() for weight in layer.weights]
    if place == "stack":
        stack_experts(layer)
        for weight, old in zip(layer.weights, numbers, strict=True):
            weight.copy_(old)
    else:
        in_buffer(layer, place == "reversed buffer")
    hidden = torch.randn(7, HIDDEN)
    weights = ExpertWeights.of(layer.experts.local_experts)
    assert weights is not None
    for rows in (hidden, hidden[:1]):
        assert_close(routed_experts(rows, layer.router, weights), layer.one_by_one(rows))


def test_experts_that_are_not_stacked_are_computed_by_megatron(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ExpertWeights.of(layer.experts.local_experts) is None  # each in a memory of its own
    stack_experts(layer)
    monkeypatch.setattr(module, "_GROUPED", None)
    assert ExpertWeights.of(layer.experts.local_experts) is None  # an older torch


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


class _Mlp(_Named):
    """One expert as Megatron's MLP computes it."""

    def forward(self, hidden: Tensor, scale: Tensor) -> tuple[Tensor, None]:
        gate, up = F.linear(hidden, self.linear_fc1.weight).chunk(2, dim=-1)
        inner = (F.silu(gate) * up * scale[:, None]).to(hidden.dtype)
        return F.linear(inner, self.linear_fc2.weight), None


@grouped
@pytest.mark.parametrize("place", ["stack", "buffer", "reversed buffer"])
@pytest.mark.parametrize("counts", [(3, 0, 1, 4, 2), (0, 0, 0, 0, 0)])
def test_experts_train_in_grouped_products_as_one_after_the_other(
    layer: Layer, place: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients of rows, probabilities and every expert's weights, bit by bit."""
    numbers = [weight.clone() for weight in layer.weights]
    stack_experts(layer) if place == "stack" else in_buffer(layer, place == "reversed buffer")
    for weight, old in zip(layer.weights, numbers, strict=True):
        weight.data.copy_(old)
    experts = grouped_mlp(layer)
    assert module.ExpertWeights.of(list(experts.local_experts)) is not None
    given = torch.randn(sum(counts), HIDDEN), torch.rand(sum(counts))
    upstream = torch.randn(sum(counts), HIDDEN)

    def computed() -> list[Tensor]:
        hidden, probabilities = (each.clone().requires_grad_() for each in given)
        layer.zero_grad()
        out, _ = experts(hidden, torch.tensor(counts), probabilities)
        out.backward(upstream)
        return [out, hidden.grad, probabilities.grad, *(w.grad.clone() for w in layer.weights)]

    grouped_numbers = computed()
    monkeypatch.setattr(module.ExpertWeights, "of", lambda _: None)
    assert all(map(torch.equal, grouped_numbers, computed()))


def grouped_mlp(layer: Layer) -> module.GroupedMLP:
    """Make the module of the experts of `layer`, without what Megatron's constructor needs."""
    made = module.GroupedMLP.__new__(module.GroupedMLP)
    nn.Module.__init__(made)
    made.local_experts = nn.ModuleList(
        _Mlp({"linear_fc1": e.linear_fc1, "linear_fc2": e.linear_fc2})
        for e in layer.experts.local_experts
    )
    made.num_local_experts, made.add_bias = EXPERTS, False
    made.config = SimpleNamespace(moe_apply_probs_on_input=False, fp8=None, fp4=None)
    return made


def test_rows_that_no_grouped_product_takes_are_left_to_megatron(layer: Layer) -> None:
    """Rows of the weights in bf16 with 12 numbers begin at multiples of 8 bytes, not 16."""
    layer.bfloat16()
    stack_experts(layer)
    assert ExpertWeights.of(layer.experts.local_experts) is None
