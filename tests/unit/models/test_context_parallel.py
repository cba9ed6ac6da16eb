"""What ranks compute at their own tokens is the same on all of them, whoever has the tokens."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf.models.context_parallel import (
    compute_at,
    exchange_for_heads,
    exchange_for_tokens,
)


class Rank:
    """A group of threads with a rank each; `dist`'s functions take it in place of a group."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
        self.rank, self.size = self.gloo.rank, self.gloo.size


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    def all_to_all(received: Tensor, sent: Tensor, group: Rank) -> None:
        group.gloo.alltoall_base(received, sent, [], []).wait()

    def all_gather(received: list[Tensor], sent: Tensor, group: Rank) -> None:
        group.gloo.allgather([received], [sent]).wait()

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: Rank(store, rank, 2), range(2)))


@pytest.mark.parametrize(
    "places",
    [[5, 0, 3, 3, 7], [1, 2, 2], [6], []],
    ids=["both ranks", "the last has none", "one token", "no token"],
)
def test_each_rank_gets_all_results_and_the_gradient_of_its_tokens(
    two_ranks: list[Rank], places: list[int]
) -> None:
    hidden = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    factors = torch.arange(1.0, len(places) + 1)  # differ, so that an order counts

    def gradient(rank: int) -> tuple[Tensor, Tensor]:
        own = hidden.chunk(2)[rank].clone().requires_grad_()
        found = compute_at(
            own,
            torch.tensor(places, dtype=torch.long),
            two_ranks[rank],  # type: ignore[arg-type]
            lambda states, numbers: states.square().sum(-1) * factors[numbers],
        )
        (grad,) = torch.autograd.grad(found.square().sum(), own)
        return found.detach(), grad

    whole = hidden.clone().requires_grad_()
    expected = whole[places].square().sum(-1) * factors
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), whole)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(gradient, range(2)))
    for found, _ in results:
        torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), expected_grad)


def test_repeated_key_heads_sum_their_gradients(two_ranks: list[Rank]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(6, heads, 2, generator=generator) for heads in (4, 1, 1)]

    def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query * (key + value).mean(0)

    def gradients(rank: int) -> tuple[Tensor, ...]:
        group = two_ranks[rank]
        own = [each.chunk(2)[rank].clone().requires_grad_() for each in inputs]
        exchanged = exchange_for_heads(*own, group, tokens=0, heads=1)  # type: ignore[arg-type]
        assert [each.shape[:2] for each in exchanged] == [(6, 2), (6, 1), (6, 1)]
        mixed = exchange_for_tokens(mix(*exchanged), group, 0, 1)  # type: ignore[arg-type]
        return mixed.detach(), *torch.autograd.grad(mixed.square().sum(), own)

    whole = [each.clone().requires_grad_() for each in inputs]
    mixed = mix(*whole)
    expected = mixed.detach(), *torch.autograd.grad(mixed.square().sum(), whole)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(gradients, range(2)))
    for parts, wanted in zip(zip(*results, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), wanted)
