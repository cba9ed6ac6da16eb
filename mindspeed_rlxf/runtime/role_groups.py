"""The roles as the driver sees them: one typed method for each call, over all ranks of a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rlxf.config.enums import KlPenalty, Role, Stage
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import ExperienceInputs, Prompts
from mindspeed_rlxf.data.mini_batches import mini_batch_order, rank_steps
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.roles.reference import ReferenceRole
from mindspeed_rlxf.roles.reports import SampleText
from mindspeed_rlxf.roles.reward import RewardRole
from mindspeed_rlxf.roles.rollout import RolloutRole
from mindspeed_rlxf.runtime.group import Pending, RoleGroup, Sharded, submit_together
from mindspeed_rlxf.runtime.protocol import Peer, Pool, PoolPart
from mindspeed_rlxf.runtime.refs import RowsRef
from mindspeed_rlxf.runtime.saved_group import SavedGroup


class ActorGroup(SavedGroup):
    """The policy; its rollout replicas are the tensor-parallel groups of the same ranks, or of the
    other part of a pool that is split."""

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        layout = config.layout(Role.ACTOR_ROLLOUT)
        self.run, self.config, self.seed = config, config.actor_rollout, config.training.seed
        self.pool, self.is_split = pool, config.parts is not None
        trains, generates = pool, pool
        if config.parts is not None:
            trains = PoolPart(pool, 0, config.parts[0])
            generates = PoolPart(pool, *config.parts)
        self.train = RoleGroup(Role.ACTOR_ROLLOUT, layout, trains)
        self.rollout = RoleGroup(Role.ACTOR_ROLLOUT, config.rollout_layout, generates)
        self.saved = self.train
        self._rollout_is_current = not self.is_split

    def build(self, eos_token_ids: Sequence[int]) -> Pending:
        arguments = self.run, tuple(eos_token_ids)
        if not self.is_split:
            return self.train.build(ActorRole, *arguments)
        trains = self.train.prepare_build(ActorRole, *arguments)
        generates = self.rollout.prepare_build(RolloutRole, *arguments)
        return submit_together(self.pool, trains, generates)

    def sync_weights(self) -> None:
        """Give the ranks that generate the weights as they are after the last update; waits.

        Nothing to do where the same ranks generate. Raises WorkerError, RuntimeTimeout.
        """
        if not self._rollout_is_current:
            send = self.train.prepare(ActorRole.send_weights)
            receive = self.rollout.prepare(RolloutRole.receive_weights)
            submit_together(self.pool, send, receive).result()
            self._rollout_is_current = True

    def generate(self, prompts: Prompts, seed: int, greedy: bool = False) -> Pending:
        """Rows: Rollouts in the order of the prompts. Reports: GenerateReport per replica."""
        self.sync_weights()
        parts = prompts.split(self.rollout.layout.dp)
        return self.rollout.call(ActorRole.generate, Sharded(parts), seed, greedy)

    def log_probs(self, rollouts: RowsRef) -> Pending:
        """Rows: LogProbs. Reports: LogProbReport per replica."""
        return self.train.call(ActorRole.log_probs, rollouts)

    def sample_texts(self, rollouts: RowsRef, count: int) -> list[SampleText]:
        """Token ids of the first `count` samples, for the sample log; waits for them."""
        rows = list(range(count))
        rows += [0] * (-count % self.train.layout.dp)  # replicas get equal parts
        pending = self.train.call(ActorRole.describe, rollouts.take(rows))
        return [text for report in pending.result() for text in report][:count]

    def make_experience(self, inputs: ExperienceInputs) -> Pending:
        """Where there is no critic. Rows: Experience. Reports: ExperienceReport per replica."""
        return self.train.call(ActorRole.make_experience, inputs)

    def update_policy(
        self, rollouts: RowsRef, experience: RowsRef, iteration: int, kl_coef: float
    ) -> Pending:
        """Reports: UpdateReport per replica, the same on each."""
        orders = mini_batch_order(
            rollouts.num_rows,
            self.config.ppo_epochs,
            self.config.shuffle_minibatch,
            self.seed,
            iteration,
            2 if self.run.training.stage is Stage.RAY_ONLINE_DPO else 1,
        )
        self._rollout_is_current = not self.is_split
        steps = rank_steps(orders, self.config.ppo_mini_batch_size, self.train.layout.dp)
        return self.train.call(
            ActorRole.update_policy,
            Sharded([rollouts.take(share.rows) for share in steps]),
            Sharded([experience.take(share.rows) for share in steps]),
            Sharded([share.steps for share in steps]),
            kl_coef,
        )


class ReferenceGroup:
    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run = config
        self.group = RoleGroup(Role.REF, config.layout(Role.REF), pool)

    def build(self) -> Pending:
        return self.group.build(ReferenceRole, self.run)

    def log_probs(self, rollouts: RowsRef) -> Pending:
        """Rows: LogProbs, or LogProbsWithKl where the KL is over the vocabulary."""
        if self.run.algorithm.kl_penalty is KlPenalty.FULL:
            actor = Peer(Role.ACTOR_ROLLOUT)
            return self.group.call(ReferenceRole.log_probs_with_kl, rollouts, actor)
        return self.group.call(ReferenceRole.log_probs, rollouts)


class CriticGroup(SavedGroup):
    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run, self.config, self.seed = config, config.value_model, config.training.seed
        self.group = self.saved = RoleGroup(Role.CRITIC, config.layout(Role.CRITIC), pool)

    def build(self) -> Pending:
        return self.group.build(CriticRole, self.run)

    def values(self, rollouts: RowsRef) -> Pending:
        """Rows: Values."""
        return self.group.call(CriticRole.values, rollouts)

    def make_experience(self, inputs: ExperienceInputs) -> Pending:
        """Rows: Experience. Reports: ExperienceReport per replica."""
        return self.group.call(CriticRole.make_experience, inputs)

    def update_critic(self, rollouts: RowsRef, experience: RowsRef, iteration: int) -> Pending:
        """Reports: UpdateReport per replica, the same on each."""
        orders = mini_batch_order(
            rollouts.num_rows,
            self.config.critic_update_epochs,
            self.config.shuffle_minibatch,
            self.seed,
            iteration,
        )
        steps = rank_steps(orders, self.config.critic_mini_batch_size, self.group.layout.dp)
        return self.group.call(
            CriticRole.update_critic,
            Sharded([rollouts.take(share.rows) for share in steps]),
            Sharded([experience.take(share.rows) for share in steps]),
            Sharded([share.steps for share in steps]),
        )


class RewardGroup:
    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run = config
        self.group = RoleGroup(Role.REWARD, config.layout(Role.REWARD), pool)

    def build(self) -> Pending:
        return self.group.build(RewardRole, self.run)

    def score(self, rollouts: RowsRef) -> Pending:
        """Rows: Scores. Reports: ScoreReport per replica."""
        return self.group.call(RewardRole.score, rollouts)

    def score_by_rule(self, rollouts: RowsRef) -> Pending:
        """As `score`, by the rules whatever the configured reward."""
        return self.group.call(RewardRole.score_by_rule, rollouts)


@dataclass(frozen=True)
class RoleGroups:
    """The roles of a run; `critic` is None where the stage has none."""

    actor: ActorGroup
    ref: ReferenceGroup
    critic: CriticGroup | None
    reward: RewardGroup

    @classmethod
    def build(
        cls, config: RunConfig, pools: Mapping[str, Pool], eos_token_ids: Sequence[int]
    ) -> RoleGroups:
        """Make every role in its pool's processes, those of different pools at the same time."""
        actor = ActorGroup(config, pools[config.pool_of(Role.ACTOR_ROLLOUT)])
        ref = ReferenceGroup(config, pools[config.pool_of(Role.REF)])
        critic = None
        if config.critic is not None:
            critic = CriticGroup(config, pools[config.pool_of(Role.CRITIC)])
        reward = RewardGroup(config, pools[config.pool_of(Role.REWARD)])
        builds = [actor.build(eos_token_ids), ref.build(), reward.build()]
        builds += [critic.build()] if critic else []
        for build in builds:
            build.result()
        return cls(actor, ref, critic, reward)
