"""A rank that trains adapters of chosen sizes, and compares generation's log-probs with its own."""

from typing import Any

import numpy as np
import torch

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Prompts, RoleOutput, Rollouts
from mindspeed_rlxf.engine.train_engine import MemoryKind
from mindspeed_rlxf.models.adapter_parameters import B
from mindspeed_rlxf.models.hf_adapters import is_adapter
from mindspeed_rlxf.roles.engines import train_engine
from mindspeed_rlxf.roles.requests import gather_rollouts, make_requests, sampling_settings
from mindspeed_rlxf.rollout.replica import build_replica, sent_tensors
from mindspeed_rlxf.weights.chunks import shard_chunks

DRAWN = 4  # responses to each prompt


def aligned(name: str, shape: tuple[int, ...], size: float) -> torch.Tensor:
    """Return an adapter whose B has elements of one size, and whose A sums its inputs.

    Inputs that share a direction then get an update that no rounding of single outputs hides.
    """
    generator = torch.Generator().manual_seed(sum(name.encode()))
    if f".{B}." in name:
        return size * torch.randn(shape, generator=generator).sign()
    return torch.full(shape, shape[1] ** -0.5)


class Gate:
    """Trains with the configuration's engine, and generates with its rollout engine."""

    def __init__(self, config: RunConfig, owns: bool = False) -> None:
        """`owns`: generate with weights that are sent instead of shared."""
        self.engine: Any = train_engine(config, Role.ACTOR_ROLLOUT)
        actor = config.actor_rollout
        self.settings = sampling_settings(actor, [], do_sample=True)
        if owns:  # the imports bring in Megatron, which FSDP's processes must not
            from mindspeed_rlxf.rollout.native import NativeRollout
            from mindspeed_rlxf.rollout.weights import OwnWeights

            dtype = torch.bfloat16 if actor.bf16 else torch.float32
            source = OwnWeights(actor.architecture, config.rollout_tp, dtype, 1, lora=actor.lora)
            self.rollout: Any = NativeRollout(source)
            self.take = lambda version, base: self.rollout.update_weights(
                sent_tensors(self.engine, base), version
            )
        else:
            replica = build_replica(config, self.engine, actor.load or "")
            self.rollout, self.take = replica.engine, replica.take_weights

    def set_adapters(self, size: float) -> None:
        """Set every element of B to +-size."""
        with self.engine.holding(MemoryKind.WEIGHTS), torch.no_grad():
            if hasattr(self.engine, "shards"):  # FSDP's, rows of each tensor
                for shard in self.engine.shards:
                    if is_adapter(shard.name):
                        rows = slice(shard.start, shard.start + len(shard.local))
                        shard.local.copy_(aligned(shard.name, shard.shape, size)[rows])
                return
            weights, tp = self.engine.weights, self.engine.groups.tp
            for adapter in weights.adapters:
                values = aligned(adapter.sources[0], adapter.shape, size)
                target = weights.tensors[adapter.name].data
                for part in shard_chunks(adapter, weights.architecture, tp.rank(), tp.size()):
                    target[part.place.slices] = values[part.chunk.slices].to(target)

    def log_probs(self, rollouts: Rollouts, sizes: list[float]) -> RoleOutput:
        """Report for each size of B the log-probs of responses that generation draws.

        Those of training, those of generation's steps, and those it scores in one pass.
        """
        asked = ask(rollouts)
        report = []
        for version, size in enumerate(sizes):
            self.set_adapters(size)
            self.take(version, version == 0)
            drawn, scored = self._draw(asked)
            trained = self.engine.log_probs(drawn, 1.0)
            if trained is not None:
                mask = drawn.trained_mask
                log_probs = trained.log_probs[mask], drawn.rollout_log_probs[mask]
                report.append((*(each.tolist() for each in log_probs), np.concatenate(scored)))
        return RoleOutput(report=report)

    def first_log_probs(self, rollouts: Rollouts) -> RoleOutput:
        """Report log-probs [prompt, drawn response] of first tokens: of training, of generation."""
        asked = ask(rollouts)
        self.take(0, True)
        drawn, _ = self._draw(asked)
        trained = self.engine.log_probs(drawn, 1.0)
        if trained is None:
            return RoleOutput(report=None)
        both = trained.log_probs, drawn.rollout_log_probs
        return RoleOutput(report=[each[:, 0].view(DRAWN, -1).t().tolist() for each in both])

    def _draw(self, asked: Prompts) -> tuple[Rollouts, list[Any]]:
        """Draw responses; also return their log-probs as the engine scores them in one pass."""
        self.rollout.wake()
        requests = make_requests(asked, self.settings, seed=5)
        drawn = gather_rollouts(asked, list(self.rollout.generate(requests)))
        scored = self.rollout.score(asked.token_ids, drawn.response_tokens())
        self.rollout.sleep()
        return drawn, scored


def ask(rollouts: Rollouts) -> Prompts:
    """Return the prompts, DRAWN times one after the other."""
    prompts = [np.asarray(tokens) for tokens in rollouts.prompt_tokens()] * DRAWN
    unscored = [""] * len(prompts)
    return Prompts(list(range(len(prompts))), prompts, unscored, unscored, [])
