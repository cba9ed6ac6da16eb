"""The critic role: computes values, makes experience from them, and trains the value model."""

from functools import partial

from torch import Tensor

from mindspeed_rlxf.algorithms.losses import (
    LossOutput,
    clipped_value_loss,
    copy_beside,
    normalised_loss,
)
from mindspeed_rlxf.cluster.group import RoleFuture, RoleGroup, Sharded
from mindspeed_rlxf.cluster.interface import Pool
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Experience, ExperienceInputs, RoleOutput, Rollouts
from mindspeed_rlxf.data.mini_batches import mini_batch_order
from mindspeed_rlxf.engine.train_engine import ValueStep
from mindspeed_rlxf.roles.balance import Lengths, balanced_steps, call_balanced
from mindspeed_rlxf.roles.engines import EngineFactory, train_engine
from mindspeed_rlxf.roles.objectives import AdvantageComputer, make_objective
from mindspeed_rlxf.roles.own_roles import role_factory
from mindspeed_rlxf.roles.reports import UpdateReport


class CriticGroup:
    """The critic's ranks."""

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run, self.config, self.seed = config, config.value_model, config.training.seed
        self.group = RoleGroup(Role.CRITIC, config.layout(Role.CRITIC), pool)

    def build(self) -> RoleFuture:
        """Submit the role's construction and weight loading."""
        return self.group.build(role_factory(Role.CRITIC, CriticRole), self.run)

    def values(self, rollouts: RowsRef, lengths: Lengths) -> RoleFuture:
        """Submit the critic's values. Rows: Values."""
        return call_balanced(self.run, self.group, CriticRole.values, rollouts, lengths)

    def make_experience(self, inputs: ExperienceInputs) -> RoleFuture:
        """Submit rewards and advantages. Rows: Experience. Reports: ExperienceReport."""
        return self.group.call(CriticRole.make_experience, inputs)

    def update_critic(
        self, rollouts: RowsRef, experience: RowsRef, lengths: Lengths, iteration: int
    ) -> RoleFuture:
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


class CriticRole:
    """The value model, its experience and its updates."""

    def __init__(self, config: RunConfig, build_engine: EngineFactory = train_engine) -> None:
        critic = config.value_model
        self.run, self.config = config, critic
        self.engine = build_engine(config, Role.CRITIC)
        replicas = self.engine.sum_over_replicas
        self.experience = AdvantageComputer(config, make_objective(config, replicas), replicas)

    def values(self, rollouts: Rollouts) -> RoleOutput:
        """Compute the response values, 0 in slots that are not read.

        Slot t is the state before token t; slot n follows the last one among n tokens. Rows:
        Values, [batch, response + 1], only on replica leaders.
        """
        return RoleOutput(self.engine.values(rollouts))

    def make_experience(self, inputs: ExperienceInputs) -> RoleOutput:
        """Compute rewards, advantages and returns (`AdvantageComputer.make`)."""
        return self.experience.make(inputs)

    def update_critic(
        self, rollouts: Rollouts, experience: Experience, steps: list[list[int]]
    ) -> RoleOutput:
        """Take one optimizer step per entry in `steps`, then advance the learning rate.

        `steps` are this replica's rows in each mini-batch. Report: UpdateReport.

        Raises:
            FloatingPointError: A loss or gradient is not finite, subject to `nan_policy`.
        """
        step = ValueStep(partial(self.loss, experience), experience.value_mask)
        metrics = []
        for rows in steps:
            batches = self.engine.micro_batches(rollouts, rows)
            metrics.append(self.engine.train_step(batches, step))
        return RoleOutput(report=UpdateReport(metrics, self.engine.end_iteration()))

    def loss(self, experience: Experience, rows: list[int], values: Tensor) -> LossOutput:
        """Compute a micro-batch's clipped value loss, times `vf_coef`, and its metrics.

        `values` [slots] fp32 have a gradient and follow `value_mask` for the micro-batch's `rows`,
        row after row.
        """
        mask = experience.value_mask[rows]
        old = copy_beside(values, experience.values[rows][mask])
        returns = copy_beside(values, experience.returns[rows][mask])
        token = clipped_value_loss(values, old, returns, self.config.cliprange_value)
        return normalised_loss(
            token.loss,
            mask.sum(1),
            self.run.algorithm.loss_normalizer,
            self.run.actor_rollout.max_new_tokens,
            {"vf_loss": token.loss},
            {"vf_clipfrac": token.clipped, "vpred_mean": values},
            self.config.vf_coef,
        )
