"""The actor role: it trains the policy, recomputes log-probs, and sends weights to the rollout."""

from dataclasses import replace

from mindspeed_rlxf.algorithms.losses import truncated_importance
from mindspeed_rlxf.cluster.group import Pending, RoleGroup, Sharded
from mindspeed_rlxf.cluster.interface import Pool, PoolPart
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import OldLogProbs, Role, Stage
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import (
    Experience,
    ExperienceInputs,
    RoleOutput,
    Rollouts,
    fit_columns,
)
from mindspeed_rlxf.data.mini_batches import mini_batch_order
from mindspeed_rlxf.roles.balance import Lengths, balanced_steps, call_balanced
from mindspeed_rlxf.roles.engines import EngineFactory, megatron_engine
from mindspeed_rlxf.roles.experience import ExperienceMaker
from mindspeed_rlxf.roles.objectives import make_objective
from mindspeed_rlxf.roles.reports import (
    LogProbReport,
    SampleText,
    Summary,
    UpdateReport,
    measure_differences,
)


class ActorGroup:
    """The ranks of the actor, the policy that learns."""

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        layout = config.layout(Role.ACTOR_ROLLOUT)
        self.run, self.config, self.seed = config, config.actor_rollout, config.training.seed
        trains = PoolPart(pool, 0, config.parts[0]) if config.parts else pool
        self.group = RoleGroup(Role.ACTOR_ROLLOUT, layout, trains)

    def build(self) -> Pending:
        return self.group.build(ActorRole, self.run)

    def log_probs(self, rollouts: RowsRef, lengths: Lengths) -> Pending:
        """Submit the actor's log-probs. Rows: LogProbs. Reports: LogProbReport.

        lengths: called, which waits for the responses, only if the work is balanced by length
        """
        return call_balanced(self.run, self.group, ActorRole.log_probs, rollouts, lengths)

    def sample_texts(self, rollouts: RowsRef, count: int) -> list[SampleText]:
        """Wait for the first `count` samples, at least 1; return their token ids."""
        rows = list(range(count))
        rows += [0] * (-count % self.group.layout.dp)  # replicas get equal parts
        pending = self.group.call(ActorRole.describe, rollouts.take(rows))
        return [text for report in pending.result() for text in report][:count]

    def make_experience(self, inputs: ExperienceInputs) -> Pending:
        """Submit rewards and advantages, without a critic. Rows: Experience."""
        return self.group.call(ActorRole.make_experience, inputs)

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
        return self.group.call(
            ActorRole.update_policy,
            Sharded([rollouts.take(share.rows) for share in steps]),
            Sharded([experience.take(share.rows) for share in steps]),
            Sharded([share.steps for share in steps]),
            kl_coef,
        )


class ActorRole:
    """The policy that learns; `RolloutRole` generates with its weights."""

    def __init__(self, config: RunConfig, build_engine: EngineFactory = megatron_engine) -> None:
        actor = config.actor_rollout
        self.run, self.config, self.algorithm = config, actor, config.algorithm
        self.engine = build_engine(config, Role.ACTOR_ROLLOUT)
        replicas = self.engine.sum_over_replicas
        self.objective = make_objective(config, replicas)
        self.experience = ExperienceMaker(config, self.objective, replicas)
        self.measures = config.old_log_probs is OldLogProbs.AUTO

    def send_weights(self) -> RoleOutput:
        """Send the weights to the ranks that generate, which call `RolloutRole.update_weights`.

        Only for a disaggregated pool.
        """
        from mindspeed_rlxf.rollout.replica import send_weights  # brings in Megatron

        send_weights(self.run, self.engine)
        return RoleOutput()

    def log_probs(self, rollouts: Rollouts) -> RoleOutput:
        """Compute log-probs under the training model, and report their gaps to those of generation.

        Rows: LogProbs. Report: LogProbReport, with the importance weights too if
        `rollout_is_threshold` is set. Both only on the leader of a replica.
        Errors: ValueError for a token's gap over `max_log_prob_gap` or NaN, if that key is set.
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
            ratio = truncated_importance(result.log_probs, rollouts.rollout_log_probs, threshold)
            weight = Summary.of(ratio[mask])
        return RoleOutput(result, LogProbReport(Summary.of(gaps[mask]), weight))

    def describe(self, rollouts: Rollouts) -> RoleOutput:
        """Report what the sample log needs of each row (`SampleText`)."""
        prompts, responses = rollouts.prompt_tokens(), rollouts.response_tokens()
        texts = []
        for row, sample_id in enumerate(rollouts.sample_ids):
            versions = rollouts.weights_version[row, : len(responses[row])]
            span = int(versions.min()), int(versions.max())
            texts.append(SampleText(sample_id, prompts[row], responses[row], span))
        return RoleOutput(report=texts)

    def make_experience(self, inputs: ExperienceInputs) -> RoleOutput:
        return self.experience.make(inputs)

    def update_policy(
        self,
        rollouts: Rollouts,
        experience: Experience,
        steps: list[list[int]],
        kl_coef: float = 0.0,
    ) -> RoleOutput:
        """Take one optimizer step for each entry of `steps`, then advance the learning rate.

        steps:   this replica's rows of each mini-batch
        kl_coef: weight of the KL where it is part of the loss
        Report: UpdateReport, whose first step has the metrics of `measure_differences` if
        `old_log_probs` is auto; no rows.
        Errors: FloatingPointError for a loss or gradient that is not finite, by `nan_policy`.
        """
        # Responses that could not be scored have no trained token in the experience.
        trained = fit_columns(experience.trained_mask, rollouts.response_mask.size(1))
        rollouts = replace(rollouts, trained_mask=trained)
        metrics: list[dict[str, float]] = []
        for rows in steps:
            step = self.objective.step(rollouts, experience, rows, kl_coef)
            if self.measures and not metrics:  # later steps have other weights than generation
                kind = self.algorithm.kl_penalty
                step = measure_differences(step, rollouts, experience, kind)
            batches = self.engine.micro_batches(rollouts, rows)
            metrics.append(self.engine.train_step(batches, step))
        return RoleOutput(report=UpdateReport(metrics, self.engine.end_iteration()))
