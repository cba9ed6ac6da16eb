"""Keys that the chosen stage or estimator does not read: refused where they say something."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from mindspeed_rlxf.config.enums import KlControl, Stage
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.schema import RunConfig

OF_PAIRS = ("dpo_beta", "dpo_loss_type")
OF_POLICY_LOSS = (
    "policy_loss", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c",
    "entropy_coeff",
)  # fmt: skip
OF_ADVANTAGES = (
    "adv_estimator", "lam", "advantage_whiten", "loss_normalizer", "kl_in", "kl_penalty", "kl_ctrl",
    "rollout_is_threshold",
)  # fmt: skip
OF_TOKEN_REWARDS = ("gamma", "whiten_rewards")
OF_PLACES = ("score_position", "score_slot_limit")  # no place in the total of a response
OF_ADAPTIVE_KL = ("target_kl", "horizon")


def without_effect(config: RunConfig) -> Iterator[Problem]:
    """A problem for each such key that differs from its default."""
    stage, algorithm, actor = config.training.stage, config.algorithm, config.actor_rollout
    named, estimator = f"{ref('training.stage')}={stage.value}", algorithm.estimator
    if stage is Stage.RAY_ONLINE_DPO:
        keys = (*OF_ADVANTAGES, *OF_TOKEN_REWARDS, *OF_PLACES)
        yield from _unread(config, "algorithm", keys, named)
        yield from _unread(config, "actor_rollout", OF_POLICY_LOSS, named)
    else:
        yield from _unread(config, "actor_rollout", OF_PAIRS, named)
        named = f"{ref('algorithm.adv_estimator')}={algorithm.adv_estimator}"
        if not estimator.needs_critic:
            yield from _unread(config, "algorithm", ("lam",), named)
        if not estimator.discounts:
            yield from _unread(config, "algorithm", OF_PLACES, named)
        if algorithm.kl_ctrl.type is KlControl.FIXED:
            named_kl = f"{ref('algorithm.kl_ctrl.type')}=fixed"
            yield from _unread(config, "algorithm.kl_ctrl", OF_ADAPTIVE_KL, named_kl)
        # A greedy response has a plain score: it fits no discounted and no rescaled return.
        if not estimator.discounts or estimator.reads_greedy:
            yield from _unread(config, "algorithm", OF_TOKEN_REWARDS, named)
        if actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
            named = f"both {ref('actor_rollout.clip_ratio_low')} and clip_ratio_high"
            yield from _unread(config, "actor_rollout", ("clip_ratio",), named)
    if not algorithm.filter_groups:
        reader = f"{ref('algorithm.filter_groups')}=false"
        yield from _unread(config, "algorithm", ("max_num_gen_batches",), reader)
    if not algorithm.overlong_buffer_len:
        reader = f"{ref('algorithm.overlong_buffer_len')}=0"
        yield from _unread(config, "algorithm", ("overlong_penalty_factor",), reader)


def _unread(
    config: RunConfig, section: str, keys: tuple[str, ...], reader: str
) -> Iterator[Problem]:
    values = attrgetter(section)(config)
    for key in keys:
        value = getattr(values, key)
        if value != type(values).model_fields[key].default:
            shown = None if key == "kl_ctrl" else value
            yield Problem(f"{section}.{key}", f"has no effect with {reader}", shown, "remove it")
