"""Roles whose adapters start as noise, and which report tensors."""

from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.engine.hf_stream import trained_tensors
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.rollout.replica import sent_tensors
from mindspeed_rlxf.weights import stage_loader
from tests.adapter_noise import noise


class Adapted:
    """Starts with adapters that are noise, and reports tensors."""

    engine: Any

    def trained(self) -> RoleOutput:
        engine = self.engine
        stream = trained_tensors(engine.weights, engine.groups, engine.role.model_chunks)
        return RoleOutput(report={name: tensor.tolist() for name, tensor in stream})

    def sent(self) -> RoleOutput:
        """Report what generation gets first."""
        return RoleOutput(report={n: t.tolist() for n, t in sent_tensors(self.engine, True)})

    def merged(self) -> RoleOutput:
        """Report the weights as they are exported, without a pipeline."""
        weights, found = self.engine.weights, dict[str, Any]()
        with torch.no_grad():
            for parameter in weights.table:
                found |= weights.gather_merged(parameter)
        return RoleOutput(report={name: tensor.tolist() for name, tensor in found.items()})


class BatchedProducts(TorchDispatchMode):
    """Counts the products of many small matrices."""

    num_found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        self.num_found += function is torch.ops.aten.bmm.default
        return function(*args, **(kwargs or {}))


class Actor(Adapted, ActorRole):
    def batched_products(self, rollouts: Rollouts) -> RoleOutput:
        """Report how many a forward pass makes."""
        with BatchedProducts() as products:
            self.engine.log_probs(rollouts, 1.0)
        return RoleOutput(report=products.num_found)

    def loaded(self, rollouts: Rollouts) -> RoleOutput:
        """Report the log-probs without adapters, of `log_probs` and of `log_probs_with_kl`."""
        engine = self.engine
        with engine.without_adapters():
            base = engine.log_probs(rollouts, 1.0)
        kl = engine.log_probs_with_kl(rollouts, 1.0, engine)
        return RoleOutput(report=base and (base.log_probs.tolist(), kl.log_probs.tolist()))

    def __init__(self, *arguments: Any) -> None:
        with patch.object(stage_loader, "initial_values", noise):
            super().__init__(*arguments)


class Critic(Adapted, CriticRole):
    def __init__(self, *arguments: Any) -> None:
        with patch.object(stage_loader, "initial_values", noise):
            super().__init__(*arguments)
