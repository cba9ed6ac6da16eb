"""A layer of experts with the attributes of Megatron's, without what its constructors need."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_rlxf.models.grouped_experts import stack_experts


class Expert(nn.Module):
    """A gated MLP as Megatron's."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden, 2 * width, bias=False, dtype=dtype)
        self.linear_fc2 = nn.Linear(width, hidden, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor, shares: Tensor) -> tuple[Tensor, None]:
        gate, up = self.linear_fc1(hidden).chunk(2, dim=-1)
        inner = (F.silu(gate) * up * shares[:, None]).to(hidden.dtype)
        return self.linear_fc2(inner), None


class Experts(nn.Module):
    """One expert after the other, as Megatron's module."""

    def __init__(self, experts: list[Expert]) -> None:
        super().__init__()
        self.local_experts = nn.ModuleList(experts)

    def forward(self, hidden: Tensor, counts: Tensor, shares: Tensor) -> tuple[Tensor, None]:
        parts = zip(
            self.local_experts,
            hidden.split(counts.tolist()),
            shares.split(counts.tolist()),
            strict=True,
        )
        return torch.cat([expert(rows, weights)[0] for expert, rows, weights in parts]), None


class Router(nn.Module):
    """Several experts of each token, some never; probabilities that need not add up to 1."""

    def __init__(self, hidden: int, experts: int, topk: int, never: int) -> None:
        super().__init__()
        self.topk, self.never = topk, never
        self.weight = torch.randn(hidden, experts, generator=torch.Generator().manual_seed(3)) / 4

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        scores = (hidden.flatten(0, -2).float() @ self.weight).exp()
        scores[:, self.never] = 0
        least = scores.topk(self.topk).values[:, -1:]
        return scores.masked_fill(scores < least, 0.0), None


def one_by_one(token: Tensor, shares: Tensor, weights: list[list[Tensor]]) -> Tensor:
    """Sum what each expert makes of a token, fp32; weights: of each expert's two layers."""
    total = torch.zeros(len(token))
    for share, (widens, narrows) in zip(shares, weights, strict=True):
        gate, up = (widens @ token.float()).chunk(2)
        total += share * (narrows @ (F.silu(gate) * up))
    return total


def place_weights(experts: Experts, place: str) -> None:
    """Move the weights: as `stack_experts` does, or into a "buffer" as Megatron's optimizer does.

    In a "reversed buffer" the last weight comes first.
    """
    weights = list(experts.parameters())
    numbers = [weight.detach().clone() for weight in weights]
    if place == "stack":
        stack_experts(experts)
    else:
        ordered = weights if place == "buffer" else weights[::-1]
        buffer = numbers[0].new_zeros(sum(weight.numel() for weight in weights))
        for weight, part in zip(ordered, buffer.split([w.numel() for w in ordered]), strict=True):
            weight.data = part.view(weight.shape)
    for weight, values in zip(weights, numbers, strict=True):
        weight.data.copy_(values)
