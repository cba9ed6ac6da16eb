"""The reference role: the frozen policy that the KL penalty compares with."""

from contextlib import nullcontext

from mindspeed_rlxf.cluster.group import RoleFuture, RoleGroup
from mindspeed_rlxf.cluster.interface import ColocatedRole, Pool, SubPool
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import KlPenalty, Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.balance import Lengths, call_balanced
from mindspeed_rlxf.roles.engines import EngineFactory, train_engine
from mindspeed_rlxf.roles.own_roles import role_factory


class ReferenceGroup:
    """The frozen reference policy's ranks; the actor's if it trains adapters."""

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run = config
        trains = config.shares_reference and config.train_rollout_split
        shared = SubPool(pool, 0, trains[0]) if trains else pool
        self.group = RoleGroup(Role.REF, config.layout(Role.REF), shared)

    def build(self) -> RoleFuture:
        """Submit the role's construction and weight loading, after the actor's."""
        shared = [ColocatedRole(Role.ACTOR_ROLLOUT)] if self.run.shares_reference else []
        return self.group.build(role_factory(Role.REF, ReferenceRole), self.run, *shared)

    def log_probs(self, rollouts: RowsRef, lengths: Lengths) -> RoleFuture:
        """Submit the reference's log-probs.

        Rows: LogProbs; with `algorithm.kl_penalty: full` LogProbsWithKl with the KL to the actor
        (in the same processes) over the whole vocabulary.
        """
        group = self.run, self.group
        if self.run.algorithm.kl_penalty is KlPenalty.FULL:
            method, actor = ReferenceRole.log_probs_with_kl, ColocatedRole(Role.ACTOR_ROLLOUT)
            return call_balanced(*group, method, rollouts, lengths, actor)
        return call_balanced(*group, ReferenceRole.log_probs, rollouts, lengths)


class ReferenceRole:
    """The frozen policy; computes log-probs."""

    def __init__(
        self,
        config: RunConfig,
        actor: ActorRole | None = None,
        build_engine: EngineFactory = train_engine,
    ) -> None:
        """Load the weights, or compute with the actor's engine without its adapters."""
        self.engine = actor.engine if actor else build_engine(config, Role.REF)
        self.loaded = self.engine.without_adapters if actor else nullcontext
        self.temperature = config.actor_rollout.logit_temperature

    def log_probs(self, rollouts: Rollouts) -> RoleOutput:
        """Compute trained tokens' reference log-probs at the actor's temperature.

        Rows: LogProbs, only on replica leaders.
        """
        with self.loaded():
            return RoleOutput(self.engine.log_probs(rollouts, self.temperature))

    def log_probs_with_kl(self, rollouts: Rollouts, actor: ActorRole) -> RoleOutput:
        """Compute log-probs, and each token's full-vocabulary KL(actor || reference).

        Rows: LogProbsWithKl, only on replica leaders.
        """
        policy = actor.engine
        return RoleOutput(self.engine.log_probs_with_kl(rollouts, self.temperature, policy))
