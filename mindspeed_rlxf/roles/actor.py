"""The policy: recomputes its log-probs, learns, and generates or sends its weights to who does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.advantages import length_mask
from mindspeed_rlxf.algorithms.kl import kl_per_token
from mindspeed_rlxf.algorithms.losses import (
    ClipRange,
    TokenLoss,
    clipped_policy_loss,
    sequence_policy_loss,
    truncated_importance,
)
from mindspeed_rlxf.algorithms.masked import masked_whiten
from mindspeed_rlxf.config.enums import AdvantageWhiten, KlIn, PolicyLoss, Stage
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import (
    Experience,
    LogProbs,
    Prompts,
    RoleOutput,
    Rollouts,
    Scores,
    fit_columns,
)
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.engine.engine import LossOutput, MegatronEngine
from mindspeed_rlxf.engine.finite import SkippedSteps
from mindspeed_rlxf.engine.losses import normalised_loss
from mindspeed_rlxf.engine.micro_batch import MicroBatch
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.roles.experience import ExperienceMaker
from mindspeed_rlxf.roles.generation import Generation, generated
from mindspeed_rlxf.roles.log_probs import read_log_probs, response_log_probs
from mindspeed_rlxf.roles.preference import preference_loss_step
from mindspeed_rlxf.roles.reports import (
    LogProbReport,
    SampleText,
    Summary,
    UpdateReport,
)
from mindspeed_rlxf.roles.saved import SavedRole
from mindspeed_rlxf.rollout.hybrid import HybridModel
from mindspeed_rlxf.rollout.transfer import WeightSender
from mindspeed_rlxf.rollout.transfer_plan import plan_of


class ActorRole(SavedRole):
    """The policy; actor and rollout as one (hybrid), unless the rollout has ranks of its own."""

    def __init__(self, config: RunConfig, eos_token_ids: Sequence[int]) -> None:
        actor = config.actor_rollout
        self.config, self.algorithm = actor, config.algorithm
        training = config.training
        self.engine = MegatronEngine(
            actor,
            Head.LANGUAGE_MODEL,
            training.seed,
            actor.optimizer,
            training.train_iters,
            SkippedSteps(training.nan_policy, training.max_skipped, "actor"),
            training.deterministic,
            training.tokenizer_name_or_path,
        )
        self.hybrid: HybridModel | None = None
        self.sender: WeightSender | None = None
        if config.parts is None:
            self.hybrid = HybridModel(self.engine, config.training.seed)
        else:
            self.sender = WeightSender(
                self.engine.weights.tensors, plan_of(config), worlds.whole_pool(), config.parts[0]
            )
        self.experience = ExperienceMaker(config, self.engine.sum_over_replicas)
        self.prefers = config.training.stage is Stage.RAY_ONLINE_DPO
        low, high = actor.clip_ratio_low, actor.clip_ratio_high
        self.clip = ClipRange(
            actor.clip_ratio if low is None else low,
            actor.clip_ratio if high is None else high,
            actor.clip_ratio_c,
        )
        self.generation = Generation(config, eos_token_ids)
        self.sampling = self.generation.sampling

    def generate(self, prompts: Prompts, seed: int, greedy: bool = False) -> RoleOutput:
        """Responses to the prompts of this rollout replica: generated, or those that come along.

        seed: of this call; with the sample ids it determines every sampled token.
        greedy: most likely tokens whatever `do_sample` says (validation).
        """
        assert self.hybrid is not None, "other ranks generate"
        with self.hybrid.ready() as model:
            rows, stats = self.generation.respond(model, prompts, seed, greedy)
        if self.hybrid.groups.tp.rank() != 0:
            return RoleOutput()
        return generated(prompts, rows, stats, self.hybrid.sync_s)

    def send_weights(self) -> RoleOutput:
        """To the ranks that generate, which run `RolloutRole.receive_weights` at the same time."""
        assert self.sender is not None, "these ranks generate themselves"
        self.sender.send()
        return RoleOutput()

    def log_probs(self, rollouts: Rollouts) -> RoleOutput:
        """Log-probs under the training model, before any update of the iteration."""
        result = response_log_probs(self.engine, rollouts, self.sampling.logit_temperature)
        if result is None:
            return RoleOutput()
        gaps = _gaps(rollouts, result)
        if self.algorithm.max_log_prob_gap is not None:
            _check_gaps(gaps, rollouts, self.algorithm.max_log_prob_gap)
        mask = length_mask(rollouts.response_lengths, gaps.size(1))
        weight = None
        if (threshold := self.algorithm.rollout_is_threshold) is not None:
            ratio = truncated_importance(result.log_probs, rollouts.rollout_log_probs, threshold)
            weight = Summary.of(ratio[mask])
        return RoleOutput(result, LogProbReport(Summary.of(gaps[mask]), weight))

    def describe(self, rollouts: Rollouts) -> RoleOutput:
        """Token ids of a few samples, for the sample log."""
        texts = [
            SampleText(
                rollouts.sample_ids[row],
                rollouts.prompt_ids[row, : rollouts.prompt_lengths[row]].tolist(),
                rollouts.response_ids[row, : rollouts.response_lengths[row]].tolist(),
            )
            for row in range(rollouts.num_rows)
        ]
        return RoleOutput(report=texts)

    def make_experience(
        self,
        rollouts: Rollouts,
        old: LogProbs | None,
        ref: LogProbs,
        scores: Scores,
        greedy: Rollouts | None,
        greedy_scores: Scores | None,
        kl_coef: float,
        slot_limit: int,
    ) -> RoleOutput:
        """Advantages where there is no critic; a collective over replicas."""
        return self.experience.without_critic(
            rollouts, old, ref, scores, greedy, greedy_scores, kl_coef, slot_limit
        )

    def update_policy(
        self,
        rollouts: Rollouts,
        experience: Experience,
        steps: list[list[int]],
        kl_coef: float = 0.0,
    ) -> RoleOutput:
        """One optimizer step for each entry of `steps`: this rank's rows of a mini-batch.

        kl_coef: weight of the KL where it is part of the loss
        """
        metrics = []
        for rows in steps:
            if self.prefers:
                loss_step = partial(
                    preference_loss_step, self.config, self.sampling.logit_temperature, experience
                )
            else:
                advantages = self._step_advantages(rollouts, experience, rows)
                loss_step = partial(self.policy_loss_step, experience, advantages, kl_coef)
            batches = self.engine.micro_batches(rollouts, rows)
            metrics.append(self.engine.train_step(batches, loss_step))
        return RoleOutput(report=UpdateReport(metrics, self.engine.end_iteration()))

    def policy_loss_step(
        self,
        experience: Experience,
        advantages: Tensor,
        kl_coef: float,
        model: TransformerModel,
        batch: MicroBatch,
        hidden: Tensor,
    ) -> LossOutput:
        """Loss of one micro-batch on the last stage, inside Megatron's schedule."""
        log_probs, entropy = read_log_probs(model, batch, hidden, self.sampling.logit_temperature)
        mask = experience.response_mask[batch.rows]
        old = experience.old_log_probs[batch.rows][mask].to(log_probs.device)
        advantage = advantages[batch.rows][mask].to(log_probs.device)
        token = self._clipped_loss(log_probs, old, advantage, batch.response_lengths)
        loss, parts = token.loss, {"pg_loss": token.loss}
        if self.config.entropy_coeff:
            loss = loss - self.config.entropy_coeff * entropy
        if self.algorithm.kl_in is KlIn.LOSS:
            ref = experience.ref_log_probs[batch.rows][mask].to(log_probs.device)
            parts["kl_loss"] = kl_per_token(log_probs, ref, self.algorithm.kl_penalty)
            loss = loss + kl_coef * parts["kl_loss"]
        per_token = {"pg_clipfrac": token.clipped, "ppo_kl": old - log_probs, "entropy": entropy}
        return normalised_loss(
            loss, batch.response_lengths, self.algorithm.loss_normalizer, parts, per_token
        )

    def _clipped_loss(
        self, log_probs: Tensor, old: Tensor, advantages: Tensor, lengths: Tensor
    ) -> TokenLoss:
        if self.config.policy_loss is PolicyLoss.GSPO:
            return sequence_policy_loss(log_probs, old, advantages, self.clip, lengths)
        return clipped_policy_loss(log_probs, old, advantages, self.clip)

    def _step_advantages(
        self, rollouts: Rollouts, experience: Experience, rows: list[int]
    ) -> Tensor:
        """[all rows, response]; whitened over this mini-batch where that is asked for.

        Times what each token weighs for having been sampled by the rollout: the clipped loss is
        proportional to its advantage.
        """
        advantages = experience.advantages
        if self.algorithm.advantage_whiten is AdvantageWhiten.MINIBATCH:
            advantages = torch.zeros_like(advantages)
            advantages[rows] = masked_whiten(
                experience.advantages[rows],
                experience.response_mask[rows],
                self.engine.sum_over_replicas,
            )
        if (threshold := self.algorithm.rollout_is_threshold) is not None:
            rollout = fit_columns(rollouts.rollout_log_probs, advantages.size(1))
            ratio = truncated_importance(experience.old_log_probs, rollout, threshold)
            advantages = advantages * ratio
        return advantages


def _gaps(rollouts: Rollouts, recomputed: LogProbs) -> Tensor:
    """[batch, response] |log-prob of training - of generation|, 0 beyond a response."""
    width = rollouts.response_ids.size(1)
    gaps = (recomputed.log_probs - rollouts.rollout_log_probs).abs()
    return gaps * length_mask(rollouts.response_lengths, width)


def _check_gaps(gaps: Tensor, rollouts: Rollouts, limit: float) -> None:
    """Raise ValueError that names the worst token; a gap that is no number counts as over."""
    if bool((gaps <= limit).all()):
        return
    row, token = divmod(int(gaps.nan_to_num(nan=float("inf")).argmax()), gaps.size(1))
    raise ValueError(
        f"log-probs of generation and training differ by {gaps[row, token]:.3g} at response token "
        f"{token} (id {rollouts.response_ids[row, token]}) of sample {rollouts.sample_ids[row]}, "
        f"over algorithm.max_log_prob_gap={limit:g}; compare precision and layout, or raise it"
    )
