"""The reference role: the frozen policy that the KL penalty compares with."""

from mindspeed_rlxf.cluster.group import Pending, RoleGroup
from mindspeed_rlxf.cluster.interface import Peer, Pool
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import KlPenalty, Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.balance import Lengths, call_balanced
from mindspeed_rlxf.roles.engines import EngineFactory, train_engine


class ReferenceGroup:
    """The frozen reference policy's ranks."""

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run = config
        self.group = RoleGroup(Role.REF, config.layout(Role.REF), pool)

    def build(self) -> Pending:
        """Submit the role's construction and weight loading."""
        return self.group.build(ReferenceRole, self.run)

    def log_probs(self, rollouts: RowsRef, lengths: Lengths) -> Pending:
        """Submit the reference's log-probs.

        Rows: LogProbs; with `algorithm.kl_penalty: full` LogProbsWithKl with the KL to the actor
        (in the same processes) over the whole vocabulary.
        """
        group = self.run, self.group
        if self.run.algorithm.kl_penalty is KlPenalty.FULL:
            method, actor = ReferenceRole.log_probs_with_kl, Peer(Role.ACTOR_ROLLOUT)
            return call_balanced(*group, method, rollouts, lengths, actor)
        return call_balanced(*group, ReferenceRole.log_probs, rollouts, lengths)


class ReferenceRole:
    """The frozen policy; computes log-probs."""

    def __init__(self, config: RunConfig, build_engine: EngineFactory = train_engine) -> None:
        self.engine = build_engine(config, Role.REF)
        self.temperature = config.actor_rollout.logit_temperature

    def log_probs(self, rollouts: Rollouts) -> RoleOutput:
        """Compute trained tokens' reference log-probs at the actor's temperature.

        Rows: LogProbs, only on replica leaders.
        """
        return RoleOutput(self.engine.log_probs(rollouts, self.temperature))

    def log_probs_with_kl(self, rollouts: Rollouts, actor: ActorRole) -> RoleOutput:
        """Compute log-probs, and each token's full-vocabulary KL(actor || reference).

        Rows: LogProbsWithKl, only on replica leaders.
        """
        policy = actor.engine
        return RoleOutput(self.engine.log_probs_with_kl(rollouts, self.temperature, policy))
