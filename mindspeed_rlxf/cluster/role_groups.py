"""Typed calls of the driver to all ranks of each role.

A method that returns `Pending` submits its call and does not wait. Its docstring gives the type of
the rows of `Pending.rows()` ("Rows") and of the reports of `Pending.result()` ("Reports").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf.cluster.balance import Lengths, balanced_steps, call_balanced
from mindspeed_rlxf.cluster.group import Pending, RoleGroup, Sharded, submit_together
from mindspeed_rlxf.cluster.protocol import Peer, Pool, PoolPart, Request
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.cluster.reward_group import RewardGroup
from mindspeed_rlxf.config.enums import KlPenalty, Role, Stage
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import ExperienceInputs, Prompts
from mindspeed_rlxf.data.mini_batches import mini_batch_order
from mindspeed_rlxf.engine.protocol import TrainEngine
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.roles.reference import ReferenceRole
from mindspeed_rlxf.roles.reports import SampleText
from mindspeed_rlxf.roles.rollout import RolloutRole, Sampling
from mindspeed_rlxf.roles.scorer import ScorerRole


class TrainedGroup:
    """Base of the groups of roles that learn: exports, saves and loads their training state."""

    learners: RoleGroup  # the ranks that hold the state

    def export(self, hf_folder: Path | None, megatron_folder: Path | None) -> Pending:
        """Submit writing the weights in each format that has a folder."""
        return self.learners.call_engine(TrainEngine.export, hf_folder, megatron_folder)

    def begin_save(self, folder: Path) -> Pending:
        """Submit a copy of the training state; files are written until `end_save`."""
        return self.learners.call_engine(TrainEngine.begin_save, folder)

    def end_save(self) -> Pending:
        """Submit the wait for the files of `begin_save`. Reports: Written, of all ranks."""
        return self.learners.call_engine(TrainEngine.end_save)

    def load_state(self, folder: Path) -> Pending:
        """Submit loading the role's state from a checkpoint. Reports: Loaded."""
        return self.learners.call_engine(TrainEngine.load_state, folder)


class ActorGroup(TrainedGroup):
    """The ranks of the actor, the policy that learns."""

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        layout = config.layout(Role.ACTOR_ROLLOUT)
        self.run, self.config, self.seed = config, config.actor_rollout, config.training.seed
        trains = PoolPart(pool, 0, config.parts[0]) if config.parts else pool
        self.train = self.learners = RoleGroup(Role.ACTOR_ROLLOUT, layout, trains)

    def build(self) -> Pending:
        return self.train.build(ActorRole, self.run)

    def prepare_send_weights(self) -> list[Request]:
        """Return the requests with which a split pool sends weights, for `submit_together`."""
        return self.train.prepare(ActorRole.send_weights)

    def log_probs(self, rollouts: RowsRef, lengths: Lengths) -> Pending:
        """Submit the actor's log-probs. Rows: LogProbs. Reports: LogProbReport.

        lengths: called, which waits for the responses, only if the work is balanced by length
        """
        return call_balanced(self.run, self.train, ActorRole.log_probs, rollouts, lengths)

    def sample_texts(self, rollouts: RowsRef, count: int) -> list[SampleText]:
        """Wait for the first `count` samples, at least 1; return their token ids."""
        rows = list(range(count))
        rows += [0] * (-count % self.train.layout.dp)  # replicas get equal parts
        pending = self.train.call(ActorRole.describe, rollouts.take(rows))
        return [text for report in pending.result() for text in report][:count]

    def make_experience(self, inputs: ExperienceInputs) -> Pending:
        """Submit rewards and advantages, without a critic. Rows: Experience."""
        return self.train.call(ActorRole.make_experience, inputs)

    def update_policy(
        self,
        rollouts: RowsRef,
        experience: RowsRef,
        lengths: Lengths,
        iteration: int,
        kl_coef: float,
    ) -> Pending:
        """Submit an optimizer step per mini-batch and epoch, then an advance of the learning rate.

        In online DPO the two responses of a pair stay together. Reports: UpdateReport.
        iteration: with the seed it determines the shuffle of the mini-batches
        """
        orders = mini_batch_order(
            rollouts.num_rows,
            self.config.ppo_epochs,
            self.config.shuffle_minibatch,
            self.seed,
            iteration,
            2 if self.run.training.stage is Stage.RAY_ONLINE_DPO else 1,
        )
        size = self.config.ppo_mini_batch_size
        steps = balanced_steps(self.run, Role.ACTOR_ROLLOUT, orders, size, lengths)
        return self.train.call(
            ActorRole.update_policy,
            Sharded([rollouts.take(share.rows) for share in steps]),
            Sharded([experience.take(share.rows) for share in steps]),
            Sharded([share.steps for share in steps]),
            kl_coef,
        )


class RolloutGroup:
    """The ranks that generate: those of the actor, or the other part of a split pool.

    A replica is a tensor-parallel group of these ranks.
    """

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run, self.pool = config, pool
        generates = PoolPart(pool, *config.parts) if config.parts else pool
        self.group = RoleGroup(Role.ROLLOUT, config.rollout_layout, generates)
        self._version: int | None = None  # of the weights that the ranks have

    def build(self, eos_token_ids: Sequence[int], scored: bool = False) -> Pending:
        """Submit the building of the rollout; call it after that of actor and scorers.

        It shares the processes and weights of the actor, unless the pool is split.
        scored: responses go to the scorers in the same processes
        """
        actor = None if self.run.parts else Peer(Role.ACTOR_ROLLOUT)
        scorer = Peer(Role.SCORER) if scored else None
        return self.group.build(RolloutRole, self.run, tuple(eos_token_ids), actor, scorer)

    def update_weights(self, actor: ActorGroup, version: int) -> None:
        """Give the rollout the weights of the actor after `version` updates, and wait."""
        if version == self._version:
            return
        parts = [self.group.prepare(RolloutRole.update_weights, version)]
        if self.run.parts:
            parts.insert(0, actor.prepare_send_weights())
        submit_together(self.pool, *parts).result()
        self._version = version

    def generate(
        self, prompts: Prompts, seed: int, sampling: Sampling = Sampling.TRAINING
    ) -> Pending:
        """Submit a response to each prompt. Rows: Rollouts. Reports: GenerateReport."""
        parts = Sharded(prompts.split(self.group.layout.dp))
        return self.group.call(RolloutRole.generate, parts, seed, sampling)


class ReferenceGroup:
    """The ranks of the frozen reference policy."""

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run = config
        self.group = RoleGroup(Role.REF, config.layout(Role.REF), pool)

    def build(self) -> Pending:
        return self.group.build(ReferenceRole, self.run)

    def log_probs(self, rollouts: RowsRef, lengths: Lengths) -> Pending:
        """Submit the reference's log-probs.

        Rows: LogProbs; with `algorithm.kl_penalty: full` LogProbsWithKl, whose KL to the actor
        (of the same processes) is over the whole vocabulary.
        """
        group = self.run, self.group
        if self.run.algorithm.kl_penalty is KlPenalty.FULL:
            method, actor = ReferenceRole.log_probs_with_kl, Peer(Role.ACTOR_ROLLOUT)
            return call_balanced(*group, method, rollouts, lengths, actor)
        return call_balanced(*group, ReferenceRole.log_probs, rollouts, lengths)


class CriticGroup(TrainedGroup):
    """The ranks of the critic."""

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run, self.config, self.seed = config, config.value_model, config.training.seed
        self.group = self.learners = RoleGroup(Role.CRITIC, config.layout(Role.CRITIC), pool)

    def build(self) -> Pending:
        return self.group.build(CriticRole, self.run)

    def values(self, rollouts: RowsRef, lengths: Lengths) -> Pending:
        """Submit the critic's values. Rows: Values."""
        return call_balanced(self.run, self.group, CriticRole.values, rollouts, lengths)

    def make_experience(self, inputs: ExperienceInputs) -> Pending:
        """Submit rewards and advantages. Rows: Experience. Reports: ExperienceReport."""
        return self.group.call(CriticRole.make_experience, inputs)

    def update_critic(
        self, rollouts: RowsRef, experience: RowsRef, lengths: Lengths, iteration: int
    ) -> Pending:
        """Submit an optimizer step per mini-batch and epoch, as `ActorGroup.update_policy`."""
        orders = mini_batch_order(
            rollouts.num_rows,
            self.config.critic_update_epochs,
            self.config.shuffle_minibatch,
            self.seed,
            iteration,
        )
        size = self.config.critic_mini_batch_size
        steps = balanced_steps(self.run, Role.CRITIC, orders, size, lengths)
        return self.group.call(
            CriticRole.update_critic,
            Sharded([rollouts.take(share.rows) for share in steps]),
            Sharded([experience.take(share.rows) for share in steps]),
            Sharded([share.steps for share in steps]),
        )


@dataclass(frozen=True)
class RoleGroups:
    """The groups of all roles of a run; `ref` and `critic` are None where the run has none."""

    actor: ActorGroup
    rollout: RolloutGroup
    ref: ReferenceGroup | None
    critic: CriticGroup | None
    reward: RewardGroup

    @classmethod
    def build(
        cls,
        config: RunConfig,
        pools: Mapping[str, Pool],
        eos_token_ids: Sequence[int],
        scores_in_processes: bool = False,
    ) -> RoleGroups:
        """Build every role in its pool's processes, all pools at the same time, and wait.

        scores_in_processes: functions or rules score in processes of their own, during generation
        """
        policy = pools[config.pool_of(Role.ACTOR_ROLLOUT)]
        actor, rollout = ActorGroup(config, policy), RolloutGroup(config, policy)
        ref = critic = None
        if Role.REF in config.roles:
            ref = ReferenceGroup(config, pools[config.pool_of(Role.REF)])
        if config.critic is not None:
            critic = CriticGroup(config, pools[config.pool_of(Role.CRITIC)])
        beside = rollout.group if scores_in_processes else None
        reward = RewardGroup(config, pools[config.pool_of(Role.REWARD)], beside)
        count = 3 + bool(ref) + bool(critic)
        with phase("loading the weights of the roles", count) as loaded:
            builds = [actor.build()]
            builds += [reward.scorers.build(ScorerRole, config)] if reward.scorers else []
            builds += [rollout.build(eos_token_ids, reward.scorers is not None), *reward.build()]
            builds += [group.build() for group in (ref, critic) if group]
            loaded.total = len(builds)
            for build in builds:
                build.result()
                loaded.advance()
        return cls(actor, rollout, ref, critic, reward)
