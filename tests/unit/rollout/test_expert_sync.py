"""Ranks that share experts keep no memory of a rollout that sleeps."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_rlxf.models.grouped_experts import stack_experts
from mindspeed_rlxf.models.shared_experts import Exchange, SharedExperts
from mindspeed_rlxf.rollout import expert_sync


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(8, 16, bias=False)
        self.linear_fc2 = nn.Linear(8, 8, bias=False)


def test_weights_can_be_freed_after_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = nn.Module()
    experts.local_experts = nn.ModuleList([Expert(), Expert()])
    stack_experts(experts)
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    exchange = Exchange(group, group)
    layer = SharedExperts(SimpleNamespace(router=nn.Identity(), experts=experts), exchange)
    storages = [StorageWeakRef(weight.untyped_storage()) for weight in experts.parameters()]
    monkeypatch.setattr(
        expert_sync.dist, "all_gather", lambda sizes, own, group: sizes[0].copy_(own)
    )
    own = expert_sync.ExpertSync([layer], exchange, group)
    own.begin()
    assert own.finish() == 0
    for weight in experts.parameters():
        weight.data = weight.data.new_empty(0)
    assert all(storage.expired() for storage in storages)
