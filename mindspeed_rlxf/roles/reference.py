"""The reference role: the frozen policy that the KL penalty compares with."""

from __future__ import annotations

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.engines import EngineFactory, megatron_engine


class ReferenceRole:
    """The frozen policy; computes log-probs."""

    def __init__(self, config: RunConfig, build_engine: EngineFactory = megatron_engine) -> None:
        self.engine = build_engine(config, Role.REF)
        self.temperature = config.actor_rollout.logit_temperature

    def log_probs(self, rollouts: Rollouts) -> RoleOutput:
        """Compute log-probs of the trained tokens by the reference, at the actor's temperature.

        Rows: LogProbs, only on the leader of a replica.
        """
        return RoleOutput(self.engine.log_probs(rollouts, self.temperature))

    def log_probs_with_kl(self, rollouts: Rollouts, actor: ActorRole) -> RoleOutput:
        """Compute log-probs as `log_probs` does, and the KL between actor and reference.

        KL(actor || reference) of each token, summed over the whole vocabulary.
        actor: role of the same process, with the current policy
        Rows: LogProbsWithKl, only on the leader of a replica.
        """
        policy = actor.engine
        return RoleOutput(self.engine.log_probs_with_kl(rollouts, self.temperature, policy))
