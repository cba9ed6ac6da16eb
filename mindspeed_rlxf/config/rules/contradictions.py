"""Refuse keys that have no effect with the chosen stage, estimator or loss.

A key that has its default value is never reported. Keys that another key merely switches off are
legal, see `idle_keys`.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_rlxf.config.enums import KlControl, Stage
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.rules.idle_keys import Idle, value_and_default
from mindspeed_rlxf.config.schema import RunConfig

OF_TOKEN_REWARDS = ("gamma", "whiten_rewards")
OF_SCORE_SLOTS = ("score_position", "score_slot_limit")  # of estimators that read token rewards
LAMBDAS = ("lam", "critic_lam", "lam_alpha")
OF_ADVANTAGES = (
    "adv_estimator", *LAMBDAS, "advantage_whiten", "loss_normalizer", "kl_in", "kl_penalty",
    "kl_ctrl", "rollout_is_threshold", *OF_TOKEN_REWARDS, *OF_SCORE_SLOTS,
)  # fmt: skip
OF_POLICY_LOSS = (
    "policy_loss", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c",
    "entropy_coeff",
)  # fmt: skip


def refuse_contradictions(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each key of `_contradictions` whose value is not its default."""
    for idle in _contradictions(config):
        for key in idle.keys:
            value, default = value_and_default(config, idle.section, key)
            if value != default:
                yield Problem(
                    f"{idle.section}.{key}",
                    f"has no effect {idle.reason}",
                    None if key == "kl_ctrl" else value,
                    "remove it",
                )


def _contradictions(config: RunConfig) -> Iterator[Idle]:
    """Yield the keys that nothing reads, with the reason, also those with their default value.

    In online DPO they are the keys of advantages and policy loss; in other stages those of DPO and
    `_find_idle_of_estimator`; without group filtering also `max_num_gen_batches`, and with an
    overlong buffer of 0 `overlong_penalty_factor`.
    """
    stage = f"with {ref('training.stage')}={config.training.stage.value}"
    if config.training.stage is Stage.RAY_ONLINE_DPO:
        yield Idle("algorithm", OF_ADVANTAGES, stage)
        yield Idle("actor_rollout", OF_POLICY_LOSS, stage)
    else:
        yield Idle("actor_rollout", ("dpo_beta", "dpo_loss_type"), stage)
        yield from _find_idle_of_estimator(config)
    if not config.algorithm.filter_groups:
        filters = f"with {ref('algorithm.filter_groups')}=false"
        yield Idle("algorithm", ("max_num_gen_batches",), filters)
    if not config.algorithm.overlong_buffer_len:
        buffer = f"with {ref('algorithm.overlong_buffer_len')}=0"
        yield Idle("algorithm", ("overlong_penalty_factor",), buffer)


def _find_idle_of_estimator(config: RunConfig) -> Iterator[Idle]:
    """Yield the keys that nothing reads, with the reason, whatever their values.

    The lambdas without a critic, `lam` if `critic_lam` and `lam_alpha` replace it, OF_SCORE_SLOTS
    if the estimator does not discount, OF_TOKEN_REWARDS if it does not discount or reads greedy
    scores, the target and horizon of a fixed KL coefficient, `clip_ratio` if `clip_ratio_low` and
    `clip_ratio_high` replace it.
    """
    algorithm, actor = config.algorithm, config.actor_rollout
    traits = algorithm.estimator
    estimator = f"with {ref('algorithm.adv_estimator')}={algorithm.adv_estimator}"
    if not traits.needs_critic:
        yield Idle("algorithm", LAMBDAS, estimator)
    if None not in (algorithm.critic_lam, algorithm.lam_alpha):
        both = f"with both {ref('algorithm.critic_lam')} and lam_alpha"
        yield Idle("algorithm", ("lam",), both)
    if not traits.discounts:
        yield Idle("algorithm", OF_SCORE_SLOTS, estimator)
    if algorithm.kl_ctrl.type is KlControl.FIXED:
        control = f"with {ref('algorithm.kl_ctrl.type')}=fixed"
        yield Idle("algorithm.kl_ctrl", ("target_kl", "horizon"), control)
    if traits.reads_greedy or not traits.discounts:
        # They read total scores, or subtract a greedy score, which is not discounted or whitened.
        yield Idle("algorithm", OF_TOKEN_REWARDS, estimator)
    if None not in (actor.clip_ratio_low, actor.clip_ratio_high):
        both = f"with both {ref('actor_rollout.clip_ratio_low')} and clip_ratio_high"
        yield Idle("actor_rollout", ("clip_ratio",), both)
