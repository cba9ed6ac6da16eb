"""The section `algorithm`: advantages, KL, token rewards, loss normalization, old log-probs."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from mindspeed_rlxf.config.enums import (
    AdvantageWhiten,
    AdvEstimator,
    KlPenalty,
    LossNormalizer,
    OldLogProbs,
    Rejection,
    Verifier,
)
from mindspeed_rlxf.config.estimator_traits import TRAITS, EstimatorTraits
from mindspeed_rlxf.config.fields import NOT_DPO, Section, Word, free, key
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.config.registry import Choice


class KlControlConfig(Section):
    """The KL penalty's coefficient."""

    type: Literal["fixed", "adaptive"] = key(
        "fixed", "fixed or adaptive coefficient", used_if="kl_coef>0", only_if=NOT_DPO
    )
    kl_coef: float = key(0.05, "coefficient; adaptive: its initial value", ge=0, only_if=NOT_DPO)
    target_kl: float = key(
        0.1,
        "adaptive: KL per token",
        gt=0,
        used_if="kl_coef>0",
        only_if=f"{NOT_DPO}; type=adaptive",
    )
    horizon: int = key(
        10000,
        "adaptive: samples over which the coefficient is corrected",
        ge=1,
        used_if="kl_coef>0",
        only_if=f"{NOT_DPO}; type=adaptive",
    )


class AlgorithmConfig(Section):
    """Rewards, advantages and losses."""

    objective: Choice | None = key(
        None, "a plugin's advantages and loss; null = those of the stage"
    )
    adv_estimator: str = key(
        AdvEstimator.GAE.value, "absent = gae, or grpo in stage ray_grpo", only_if=NOT_DPO
    )
    gamma: float = key(
        1.0, "discount", ge=0, le=1, only_if=f"{NOT_DPO}; estimator.reads_token_rewards"
    )
    lam: float = key(
        0.95, "lambda of GAE", ge=0, le=1, only_if=f"{NOT_DPO}; estimator.needs_critic; reads_lam"
    )
    critic_lam: float | None = key(
        None,
        "lambda of the critic's returns; null = lam",
        ge=0,
        le=1,
        only_if=f"{NOT_DPO}; estimator.needs_critic",
    )
    lam_alpha: float | None = key(
        None,
        "lambda of the advantages is 1 - 1 / (lam_alpha x tokens); null = lam",
        gt=0,
        only_if=f"{NOT_DPO}; estimator.needs_critic",
    )
    kl_penalty: Annotated[KlPenalty, Word] = key(
        KlPenalty.KL, "KL estimate; absent = kl, or low_var_kl in the loss", only_if=NOT_DPO
    )
    kl_in: Literal["reward", "loss"] = key(
        "reward",
        "where the KL penalty acts; absent = reward, loss for grpo, dr_grpo, "
        "reinforce_plus_plus_baseline, opo, gpg and grpo_batch",
        only_if=NOT_DPO,
    )
    kl_ctrl: KlControlConfig = key(KlControlConfig(), "KL coefficient")
    reward_scale: float = key(1.0, "scores are multiplied by it")
    reward_clip: float | None = key(None, "scaled scores are clipped to +- this value", gt=0)
    turn_rewards: bool = key(
        False,
        "the rewards of an agent stand at the last token of their turn; false = their sum at the "
        "end of the response",
        only_if=f"{NOT_DPO}; estimator.discounts; rollout.runs_agents; reward.scores_by_agent; "
        "!reward_clip",
    )
    whiten_rewards: bool = key(
        False,
        "scale token rewards to variance 1; the mean stays",
        only_if=f"{NOT_DPO}; estimator.reads_token_rewards",
    )
    verifier_function: Annotated[tuple[Annotated[Verifier, Word], ...], Word] = key(
        (), "acc, base_acc, format, strict_format, step; absent = acc", only_if="reward.verifier"
    )
    verifier_weight: Annotated[tuple[float, ...], Word] = key(
        (), "weights of the functions' scores; absent = 1 each", only_if="reward.verifier"
    )
    missing_eos_penalty: float = key(0.0, "subtracted from the score without EOS; null = 0")
    overlong_buffer_len: int = key(
        0, "number of tokens before max_new_tokens in which a response is penalised", ge=0
    )
    overlong_penalty_factor: float = key(
        1.0, "penalty of a response of max_new_tokens", ge=0, only_if="overlong_buffer_len"
    )
    mask_truncated: bool = key(
        False, "responses without EOS are not trained, but count in their groups", only_if=NOT_DPO
    )
    filter_groups: bool = key(
        False,
        "drop prompts whose responses all score the same, and draw others",
        only_if="!actor_rollout.fixed_responses; reward.kind=rule; compares_responses",
    )
    max_num_gen_batches: Annotated[int, Field(ge=1)] | None = key(
        10, "filter_groups: batches generated at most; null = no limit", only_if="filter_groups"
    )
    skip_zero_advantages: bool = key(
        False,
        "responses whose advantages are all 0 are not computed in the update, nor counted in its "
        "means",
        only_if=f"{NOT_DPO}; !kl_ctrl.kl_coef; advantage_whiten!=minibatch; "
        "!actor_rollout.entropy_coeff; actor_rollout.policy_loss!=clip_cov; "
        "actor_rollout.policy_loss!=kl_cov; !actor_rollout.architecture.balances_experts",
    )
    score_position: Literal["after_eos", "eos"] = key(
        "after_eos",
        "position that gets the score of a response that ended: after_eos or eos",
        only_if=f"{NOT_DPO}; estimator.discounts",
    )
    score_slot_limit: Literal["max_new_tokens", "batch_width"] = key(
        "max_new_tokens",
        "length from which a response has no position after EOS",
        used_if="score_position=after_eos",
        only_if=f"{NOT_DPO}; estimator.discounts",
    )
    advantage_whiten: Annotated[AdvantageWhiten, Word] = key(
        AdvantageWhiten.BATCH,
        "tokens over which advantages are whitened; absent = batch for gae, reinforce_plus_plus "
        "and reinforce_plus_plus_baseline, else none",
        only_if=NOT_DPO,
    )
    loss_normalizer: Annotated[LossNormalizer, Word] = key(
        LossNormalizer.MINIBATCH_TOKENS,
        "what token losses are divided by; absent = minibatch_tokens, sequence_sums (responses, "
        "each its sum / max_new_tokens) for dr_grpo, sequence_means for gspo and geo_mean; "
        "sequence_totals = responses, each its sum",
        only_if=NOT_DPO,
    )
    old_log_probs: Annotated[OldLogProbs, Word] = free(
        OldLogProbs.AUTO,
        "log-probs of the behaviour policy: auto = those of the update itself if an iteration is "
        "one optimizer step and nothing else reads them, and in online DPO, else recompute",
    )
    rollout_is_threshold: float | None = key(
        None,
        "cap of the weight training / rollout probability of a token; null = weight 1; absent = "
        "2.0 with rollout.max_staleness, where null is an error",
        gt=0,
        only_if=f"{NOT_DPO}; old_log_probs!=rollout",
    )
    rollout_is_low: float | None = key(
        None,
        "tokens whose training / rollout probability is below this have weight 0; null = none",
        gt=0,
        lt=1,
        only_if=f"{NOT_DPO}; rollout_is_threshold",
    )
    rollout_rejection: dict[Rejection, Annotated[tuple[PositiveFloat, ...], Word]] = key(
        {},
        "statistic of training / rollout probability -> its bounds, outside of which tokens are "
        "not trained: `seq_mean_k1: [0.999, 1.001]`",
        only_if=f"{NOT_DPO}; old_log_probs!=rollout",
    )
    max_log_prob_gap: float | None = free(
        None,
        "stop where a token's log-probs of generation and training differ by more",
        gt=0,
        only_if="old_log_probs!=rollout; rollout.max_staleness=0",
    )

    @property
    def estimator(self) -> EstimatorTraits:
        """Traits of the chosen `adv_estimator`."""
        return TRAITS[self.adv_estimator]

    @property
    def reads_lam(self) -> bool:
        """Whether `critic_lam` and `lam_alpha` do not both replace `lam`."""
        return None in (self.critic_lam, self.lam_alpha)

    @field_validator("adv_estimator")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in TRAITS:
            raise PydanticCustomError("enum", "no such estimator", {"expected": ", ".join(TRAITS)})
        return str(name)

    @field_validator("verifier_function", "verifier_weight", "missing_eos_penalty", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: ValidationInfo) -> Any:
        return cls.model_fields[str(info.field_name)].default if value is None else value

    def _broken_rules(self) -> Iterator[Problem]:
        names = self.verifier_function
        if len(set(names)) < len(names):
            yield Problem(
                "verifier_function", "must name each function once", remedy="add up their weights"
            )
        for name, bounds in self.rollout_rejection.items():
            is_ratio = name.endswith("k1")
            if len(bounds) != 1 + is_ratio or bounds[0] > bounds[-1]:
                rule = "must be the least and the largest ratio" if is_ratio else "must be a limit"
                remedy = "use [0.5, 2.0]" if is_ratio else "use [0.01]"
                yield Problem(f"rollout_rejection.{name}", rule, list(bounds), remedy)
