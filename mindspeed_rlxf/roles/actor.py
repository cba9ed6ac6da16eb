"""The actor role: trains the policy, recomputes log-probs, and sends weights to the rollout."""

from dataclasses import replace

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.kl import kl_per_token
from mindspeed_rlxf.algorithms.losses import (
    LossOutput,
    Mean,
    PolicyLoss,
    copy_beside,
    truncated_importance,
)
from mindspeed_rlxf.cluster.group import RoleFuture, RoleGroup, Sharded
from mindspeed_rlxf.cluster.interface import Pool, SubPool
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import KlPenalty, OldLogProbs, Role, Stage
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.agent_record import find_record
from mindspeed_rlxf.data.batch import (
    Experience,
    ExperienceInputs,
    RoleOutput,
    Rollouts,
    fit_columns,
)
from mindspeed_rlxf.data.mini_batches import mini_batch_order
from mindspeed_rlxf.engine.train_engine import PolicyStep, TokenLogProbs
from mindspeed_rlxf.roles.balance import Lengths, balanced_steps, call_balanced
from mindspeed_rlxf.roles.engines import EngineFactory, train_engine
from mindspeed_rlxf.roles.objectives import AdvantageComputer, ClippedObjective, make_objective
from mindspeed_rlxf.roles.own_roles import role_factory
from mindspeed_rlxf.roles.reports import (
    LogProbReport,
    SampleText,
    Summary,
    UpdateReport,
)
from mindspeed_rlxf.roles.weights_probe import ChangedWeights


class ActorGroup:
    """The actor's ranks."""

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        layout = config.layout(Role.ACTOR_ROLLOUT)
        self.run, self.config, self.seed = config, config.actor_rollout, config.training.seed
        split = config.train_rollout_split
        trains = SubPool(pool, 0, split[0]) if split else pool
        self.group = RoleGroup(Role.ACTOR_ROLLOUT, layout, trains)

    def build(self) -> RoleFuture:
        """Submit the role's construction and weight loading."""
        return self.group.build(role_factory(Role.ACTOR_ROLLOUT, ActorRole), self.run)

    def log_probs(self, rollouts: RowsRef, lengths: Lengths) -> RoleFuture:
        """Submit the actor's log-probs. Rows: LogProbs. Reports: LogProbReport.

        `lengths` is called, and waits for the responses, only if work is balanced by length.
        """
        return call_balanced(self.run, self.group, ActorRole.log_probs, rollouts, lengths)

    def sample_texts(self, rollouts: RowsRef, count: int) -> list[SampleText]:
        """Wait for the first `count` samples (at least 1) and return their token ids."""
        rows = list(range(count))
        rows += [0] * (-count % self.group.layout.dp)  # replicas get equal parts
        pending = self.group.call(ActorRole.describe, rollouts.take(rows))
        return [text for report in pending.result() for text in report][:count]

    def make_experience(self, inputs: ExperienceInputs) -> RoleFuture:
        """Submit rewards and advantages without a critic. Rows: Experience."""
        return self.group.call(ActorRole.make_experience, inputs)

    def update_policy(
        self,
        rollouts: RowsRef,
        experience: RowsRef,
        lengths: Lengths,
        iteration: int,
        kl_coef: float,
    ) -> RoleFuture:
        """Submit an optimizer step per mini-batch and epoch, then a learning-rate update.

        In online DPO a pair's two responses stay together. The seed and `iteration` determine how
        mini-batches are shuffled. Reports: UpdateReport.
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
        return self.group.call(
            ActorRole.update_policy,
            Sharded([rollouts.take(share.rows) for share in steps]),
            Sharded([experience.take(share.rows) for share in steps]),
            Sharded([share.steps for share in steps]),
            kl_coef,
        )


class ActorRole:
    """The trained policy; `RolloutRole` generates with its weights.

    A subclass may have a method `loss` with the arguments of `sequence_policy_loss`, which replaces
    the loss of PPO and GSPO.
    """

    loss: PolicyLoss | None = None

    def __init__(self, config: RunConfig, build_engine: EngineFactory = train_engine) -> None:
        actor = config.actor_rollout
        self.run, self.config, self.algorithm = config, actor, config.algorithm
        self.engine = build_engine(config, Role.ACTOR_ROLLOUT)
        replicas = self.engine.sum_over_replicas
        self.objective = make_objective(config, replicas)
        if self.loss is not None and isinstance(self.objective, ClippedObjective):
            self.objective.policy_loss = self.loss
        self.experience = AdvantageComputer(config, self.objective, replicas)
        self.measures = config.old_log_probs is OldLogProbs.AUTO
        self._changed: ChangedWeights | None = None  # during a probe

    def send_weights(self, with_base: bool) -> RoleOutput:
        """Send the weights to generating ranks in disaggregated placement.

        They call `RolloutRole.update_weights` with the same `with_base`.
        """
        from mindspeed_rlxf.rollout.replica import send_weights  # brings in Megatron

        send_weights(self.run, self.engine, with_base)
        return RoleOutput()

    def begin_probe(self, rows: Rollouts) -> RoleOutput:
        """Change all weights strongly. Report: ProbeReport, for the rollout to equal it."""
        dtype = torch.bfloat16 if self.config.bf16 else torch.float32
        self._changed = ChangedWeights(self.engine, dtype)
        return RoleOutput(report=self._changed.change(rows))

    def end_probe(self) -> RoleOutput:
        """Put the weights back."""
        assert self._changed is not None, "a probe has begun"
        self._changed.restore()
        self._changed = None
        return RoleOutput()

    def log_probs(self, rollouts: Rollouts) -> RoleOutput:
        """Compute log-probs under the training model, and their gaps to the rollout's.

        Rows: LogProbs. Report: LogProbReport, with importance weights if `rollout_is_threshold` is
        set. Both only on replica leaders.

        Raises:
            ValueError: A token's gap exceeds `max_log_prob_gap` or is NaN.
        """
        result = self.engine.log_probs(rollouts, self.config.logit_temperature)
        if result is None:
            return RoleOutput()
        mask, weight = rollouts.trained_mask, None
        gaps = (result.log_probs - rollouts.rollout_log_probs).abs() * mask
        limit = self.algorithm.max_log_prob_gap
        if limit is not None and not bool((gaps <= limit).all()):  # also for nan
            row, token = divmod(int(gaps.nan_to_num(nan=float("inf")).argmax()), gaps.size(1))
            raise ValueError(
                f"log-probs of generation and training differ by {gaps[row, token]:.3g} at "
                f"response token {token} (id {rollouts.response_ids[row, token]}) of sample "
                f"{rollouts.sample_ids[row]}, over algorithm.max_log_prob_gap={limit:g}; compare "
                "precision and layout, or raise it"
            )
        if (threshold := self.algorithm.rollout_is_threshold) is not None:
            low = self.algorithm.rollout_is_low
            rollout = rollouts.rollout_log_probs
            ratio = truncated_importance(result.log_probs, rollout, threshold, low)
            weight = Summary.of(ratio[mask])
        return RoleOutput(result, LogProbReport(Summary.of(gaps[mask]), weight))

    def describe(self, rollouts: Rollouts) -> RoleOutput:
        """Report what the sample log needs from each row (`SampleText`)."""
        prompts, responses = rollouts.prompt_tokens(), rollouts.response_tokens()
        texts = []
        for row, sample_id in enumerate(rollouts.sample_ids):
            versions = rollouts.weights_version[row, : len(responses[row])]
            span = int(versions.min()), int(versions.max())
            record = find_record(rollouts.extra_infos[row])
            texts.append(SampleText(sample_id, prompts[row], responses[row], span, record))
        return RoleOutput(report=texts)

    def make_experience(self, inputs: ExperienceInputs) -> RoleOutput:
        """Compute rewards and advantages (`AdvantageComputer.make`)."""
        return self.experience.make(inputs)

    def update_policy(
        self,
        rollouts: Rollouts,
        experience: Experience,
        steps: list[list[int]],
        kl_coef: float = 0.0,
    ) -> RoleOutput:
        """Take one optimizer step per entry in `steps`, then advance the learning rate.

        `steps` are this replica's rows in each mini-batch, and `kl_coef` weighs the KL if it
        belongs to the loss. Report: UpdateReport; with `old_log_probs: auto` its first step
        includes the `measure_differences` metrics.

        Raises:
            FloatingPointError: A loss or gradient is not finite, subject to `nan_policy`.
        """
        # Responses that could not be scored have no trained token in the experience.
        trained = fit_columns(experience.trained_mask, rollouts.response_mask.size(1))
        rollouts = replace(rollouts, trained_mask=trained)
        metrics: list[dict[str, float]] = []
        for rows in steps:
            step_rollouts, step_experience, step_rows = rollouts, experience, rows
            if self.algorithm.skip_zero_advantages:
                step_rows, trained = self._skip_zero_advantages(experience, rows)
                step_experience = replace(experience, trained_mask=trained)
                trained = fit_columns(trained, rollouts.response_mask.size(1))
                step_rollouts = replace(rollouts, trained_mask=trained)
            step = self.objective.step(step_rollouts, step_experience, step_rows, kl_coef)
            if self.measures and not metrics:  # later steps have other weights than generation
                kind = self.algorithm.kl_penalty
                step = measure_differences(step, step_rollouts, step_experience, kind)
            batches = self.engine.micro_batches(step_rollouts, step_rows)
            metrics.append(self.engine.train_step(batches, step))
        return RoleOutput(report=UpdateReport(metrics, self.engine.end_iteration()))

    def _skip_zero_advantages(
        self, experience: Experience, rows: list[int]
    ) -> tuple[list[int], Tensor]:
        """Return the rows to compute and the mask of trained tokens; a collective over replicas.

        All replicas get equally many rows: some may have rows that are computed, but not trained.
        """
        has_gradient = experience.advantages.any(1)
        counts = torch.zeros(len(rows) + 1)
        counts[int(has_gradient[rows].sum())] = 1
        largest = int(self.engine.sum_over_replicas(counts).nonzero().max())
        if largest == 0:  # on all replicas; a step with no token would have no mean
            return rows, experience.trained_mask
        largest += -largest % self.config.micro_batch_multiple
        in_order = sorted(rows, key=lambda row: not has_gradient[row])
        return in_order[:largest], experience.trained_mask & has_gradient[:, None]


def measure_differences(
    step: PolicyStep, rollouts: Rollouts, experience: Experience, kl_penalty: KlPenalty
) -> PolicyStep:
    """Return a copy of the step whose loss also reports two metrics; its value is unchanged.

    `rollout/log_prob_gap_mean` is the mean |log-prob - rollout log-prob| over trained tokens.
    `critic/kl` is the KL to the reference, averaged per sample and then over samples; omitted if
    the experience has no reference log-probs. Log-probs are those before the optimizer step.
    """

    def loss(rows: list[int], tokens: TokenLogProbs) -> LossOutput:
        output = step.loss(rows, tokens)
        mask = experience.trained_mask[rows]
        log_probs = tokens.log_probs.detach().float()
        rollout = fit_columns(rollouts.rollout_log_probs, mask.size(1))[rows][mask]
        gaps = (log_probs - copy_beside(log_probs, rollout)).abs()
        found = {"rollout/log_prob_gap_mean": Mean.of(gaps, gaps.numel())}
        if experience.ref_log_probs.size(1):
            ref = copy_beside(log_probs, experience.ref_log_probs[rows][mask])
            kl = kl_per_token(log_probs, ref, kl_penalty)
            mask = mask[mask.any(1)]
            places = copy_beside(kl, mask.flatten().nonzero()[:, 0])
            placed = kl.new_zeros(mask.numel()).index_copy(0, places, kl).view(mask.shape)
            means = placed.sum(1) / copy_beside(kl, mask.sum(1))
            found["critic/kl"] = Mean.of(means, len(means))
        return replace(output, metrics=output.metrics | found)

    return replace(step, loss=loss)
