"""The frozen policy that the KL penalty is measured against."""

from __future__ import annotations

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.engines import EngineFactory, megatron_engine


class ReferenceRole:
    def __init__(self, config: RunConfig, build_engine: EngineFactory = megatron_engine) -> None:
        self.engine = build_engine(config, Role.REF)
        self.temperature = config.actor_rollout.logit_temperature

    def log_probs(self, rollouts: Rollouts) -> RoleOutput:
        """Log-probs of the trained tokens at the actor's temperature."""
        return RoleOutput(self.engine.log_probs(rollouts, self.temperature))

    def log_probs_with_kl(self, rollouts: Rollouts, actor: ActorRole) -> RoleOutput:
        """The same, and the KL over the vocabulary to the actor's present policy."""
        policy = actor.engine
        return RoleOutput(self.engine.log_probs_with_kl(rollouts, self.temperature, policy))
