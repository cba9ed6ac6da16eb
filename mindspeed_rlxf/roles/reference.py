"""The frozen policy that the KL penalty is measured against."""

from __future__ import annotations

from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.log_probs import log_probs_with_kl, response_log_probs


class ReferenceRole:
    def __init__(self, config: RunConfig) -> None:
        training = config.training
        self.engine = MegatronEngine(
            config.ref, Head.LANGUAGE_MODEL, training.seed, deterministic=training.deterministic
        )
        actor = config.actor_rollout
        self.temperature = actor.temperature if actor.do_sample else 1.0

    def log_probs(self, rollouts: Rollouts) -> RoleOutput:
        """Log-probs of the response tokens at the actor's temperature."""
        return RoleOutput(response_log_probs(self.engine, rollouts, self.temperature))

    def log_probs_with_kl(self, rollouts: Rollouts, actor: ActorRole) -> RoleOutput:
        """The same, and the KL over the vocabulary to the actor's present policy."""
        return RoleOutput(log_probs_with_kl(self.engine, actor.engine, rollouts, self.temperature))
