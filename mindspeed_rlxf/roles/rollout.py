"""The policy on devices of its own: generates with the weights that the actor's ranks send."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from mindspeed_rlxf import device
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Prompts, RoleOutput
from mindspeed_rlxf.device import megatron_versions, worlds
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.roles.generation import Generation, generated
from mindspeed_rlxf.rollout.hybrid import rollout_module
from mindspeed_rlxf.rollout.transfer import WeightReceiver
from mindspeed_rlxf.rollout.transfer_plan import plan_of


class RolloutRole:
    """A tensor-parallel replica of the whole model, without gradients or optimizer."""

    def __init__(self, config: RunConfig, eos_token_ids: Sequence[int]) -> None:
        """A collective over the ranks that generate."""
        megatron_versions.mend()
        device.set_deterministic(config.training.deterministic)
        assert config.parts is not None, "a rollout of its own needs ranks of its own"
        actor = config.actor_rollout
        dtype = torch.bfloat16 if actor.bf16 else torch.float32
        self.generation = Generation(config, eos_token_ids)
        self.groups = ParallelGroups(config.rollout_layout.tp, 1, config.training.seed)
        with self.groups.active():
            module = rollout_module(actor.architecture, self.groups.tp.size(), dtype)
        self.module = module.to(device=device.current_device(), dtype=dtype)
        for parameter in self.module.parameters():
            parameter.data.zero_()  # the vocabulary's padding, which nobody sends
        tensors = dict(self.module.named_parameters())
        self.receiver = WeightReceiver(
            tensors, plan_of(config), worlds.whole_pool(), config.parts[0]
        )
        self.is_current = False  # weights have arrived whole
        self.sync_s = 0.0  # spent on weights since the last report

    def receive_weights(self) -> RoleOutput:
        """Takes what `ActorRole.send_weights` sends at the same time."""
        started = time.monotonic()
        self.is_current = False
        self.receiver.receive()
        self.is_current = True
        self.sync_s += time.monotonic() - started
        return RoleOutput()

    def generate(self, prompts: Prompts, seed: int, greedy: bool = False) -> RoleOutput:
        """As `ActorRole.generate`."""
        assert self.is_current, "the rollout has not received its weights"
        with self.groups.active():
            rows, stats = self.generation.respond(self.module, prompts, seed, greedy)
        sync_s, self.sync_s = self.sync_s, 0.0
        if self.groups.tp.rank() != 0:
            return RoleOutput()
        return generated(prompts, rows, stats, sync_s)
