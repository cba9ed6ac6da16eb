"""Rules of stages and estimators: which keys go together. Nothing here looks at the host."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_rlxf.config.enums import (
    AdvantageWhiten,
    AdvEstimator,
    KlIn,
    KlPenalty,
    OldLogProbs,
    RewardKind,
    Role,
    Stage,
)
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.without_effect import without_effect


def check_stage(config: RunConfig) -> Iterator[str]:
    """Every such rule that the configuration breaks, each `rule, value, remedy`."""
    if config.training.stage is Stage.RAY_ONLINE_DPO:
        yield from [*_pairs(config), *_pairs_by_tokens(config)]
    else:
        yield from _estimator(config)
        yield from [*_kl(config), *_full_kl(config)]
    yield from _one_vocabulary(config)
    yield from without_effect(config)
    yield from _samples_per_prompt(config)
    yield from [*_rewards(config), *_verifiers(config)]
    yield from _whitening(config)
    yield from _log_probs(config)


def _estimator(config: RunConfig) -> Iterator[str]:
    algorithm, stage = config.algorithm, config.training.stage
    estimator = algorithm.adv_estimator
    if stage is Stage.RAY_PPO and estimator is not AdvEstimator.GAE:
        yield (
            f"algorithm.adv_estimator={estimator.value} works without the critic of "
            "training.stage=ray_ppo; use gae, or training.stage=ray_grpo"
        )
    if stage is not Stage.RAY_PPO and estimator is AdvEstimator.GAE:
        yield (
            f"algorithm.adv_estimator=gae needs a critic, which training.stage={stage.value} has "
            "not; use grpo, or training.stage=ray_ppo"
        )


def _kl(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_in is KlIn.LOSS and algorithm.kl_penalty is KlPenalty.KL:
        yield (
            "algorithm.kl_penalty=kl teaches nothing with algorithm.kl_in=loss, where its gradient "
            "is 0 on average; use low_var_kl or mse"
        )


def _full_kl(config: RunConfig) -> Iterator[str]:
    """Both distributions have to be in one process, split in the same way."""
    if config.algorithm.kl_penalty is not KlPenalty.FULL:
        return
    shown, actor, ref = "algorithm.kl_penalty=full", config.actor_rollout, config.ref
    if config.algorithm.kl_in is KlIn.LOSS:
        yield f"{shown} needs algorithm.kl_in=reward; use that, or low_var_kl"
    pools = [config.pool_of(role) for role in (Role.ACTOR_ROLLOUT, Role.REF)]
    if pools[0] != pools[1]:
        yield (
            f"{shown} compares all of the vocabulary and needs actor and reference in one pool, "
            f"they are in {pools[0]} and {pools[1]}; use placement.ref={pools[0]}, or low_var_kl"
        )
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        mine, theirs = getattr(actor, key), getattr(ref, key)
        if mine != theirs:
            yield (
                f"ref.{key}={theirs} must be the actor's {mine} with {shown}, which compares "
                f"vocabularies part by part; use {mine}, or low_var_kl"
            )


def _one_vocabulary(config: RunConfig) -> Iterator[str]:
    actor, ref = config.actor_rollout.architecture, config.ref.architecture
    if actor.vocab_size != ref.vocab_size:
        yield (
            f"ref: vocab_size={ref.vocab_size} must be the actor's {actor.vocab_size}, whose "
            "tokens it judges; give folder and model of the policy that training starts from"
        )


def _samples_per_prompt(config: RunConfig) -> Iterator[str]:
    samples, algorithm = config.actor_rollout.n_samples_per_prompt, config.algorithm
    needs = {
        f"algorithm.adv_estimator={algorithm.adv_estimator.value}": (
            algorithm.adv_estimator.compares_group
        ),
        "algorithm.filter_groups=true": algorithm.filter_groups,
    }
    for name, needed in needs.items():
        if needed and samples < 2 and config.training.stage is not Stage.RAY_ONLINE_DPO:
            yield (
                f"actor_rollout.n_samples_per_prompt={samples} must be 2 or more with {name}, "
                "which compares the responses to a prompt; use 4 or 8"
            )


def _pairs(config: RunConfig) -> Iterator[str]:
    actor = config.actor_rollout
    if actor.n_samples_per_prompt != 2:
        yield (
            f"actor_rollout.n_samples_per_prompt={actor.n_samples_per_prompt} must be 2 with "
            "training.stage=ray_online_dpo, which prefers one of two responses; use 2"
        )


def _pairs_by_tokens(config: RunConfig) -> Iterator[str]:
    limit = config.actor_rollout.max_tokens_per_micro_batch
    if limit is not None:
        yield (
            f"actor_rollout.max_tokens_per_micro_batch={limit} may part the responses of a pair "
            "with training.stage=ray_online_dpo; use null, and micro_batch_size"
        )


def _rewards(config: RunConfig) -> Iterator[str]:
    actor, buffer = config.actor_rollout, config.algorithm.overlong_buffer_len
    if buffer > actor.max_new_tokens:
        yield (
            f"algorithm.overlong_buffer_len={buffer} must be at most actor_rollout.max_new_tokens="
            f"{actor.max_new_tokens}; use {actor.max_new_tokens} or less"
        )
    if config.algorithm.filter_groups and actor.fixed_responses is not None:
        yield (
            "algorithm.filter_groups=true draws prompts that actor_rollout.fixed_responses has no "
            "responses for; remove one of them"
        )
    compares = config.algorithm.adv_estimator.compares_group
    if config.algorithm.filter_groups and not (
        compares or config.training.stage is Stage.RAY_ONLINE_DPO
    ):
        yield (
            "algorithm.filter_groups=true drops prompts that "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator.value} learns from; remove "
            "it, or use grpo, dr_grpo, rloo or reinforce_plus_plus_baseline"
        )
    if config.algorithm.filter_groups and config.reward.kind is RewardKind.MODEL:
        yield (
            "algorithm.filter_groups=true needs reward.kind=rule, because the scores of a reward "
            "model always differ; remove one of them"
        )


def _verifiers(config: RunConfig) -> Iterator[str]:
    reward, algorithm = config.reward, config.algorithm
    rules, weights = algorithm.verifier_function, algorithm.verifier_weight
    if not reward.verifier:
        for name in ("verifier_function", "verifier_weight"):
            if getattr(algorithm, name):
                yield (
                    f"algorithm.{name} has no effect with reward.verifier=false; remove it, or use "
                    "reward.verifier=true"
                )
        return
    if reward.kind is RewardKind.MODEL:
        yield (
            "reward.verifier=true scores by rule, reward.kind=model by a model; remove one of them"
        )
    if reward.rules:
        yield (
            "reward.rules choose a rule by data source, reward.verifier=true scores all alike; "
            "remove one of them"
        )
    if len(set(rules)) < len(rules):
        yield "algorithm.verifier_function must name each function once; add up their weights"
    if weights and len(weights) != len(rules or (None,)):
        yield (
            f"algorithm.verifier_weight={list(weights)} must have a weight for each of the "
            f"{len(rules or (None,))} algorithm.verifier_function; give as many"
        )


def _whitening(config: RunConfig) -> Iterator[str]:
    """Variance needs two tokens; a response has one at least."""
    whiten, actor = config.algorithm.advantage_whiten, config.actor_rollout
    sizes = {
        AdvantageWhiten.BATCH: config.samples_per_iteration,
        AdvantageWhiten.MINIBATCH: actor.ppo_mini_batch_size,
    }
    pairs = config.training.stage is Stage.RAY_ONLINE_DPO
    if not pairs and sizes.get(whiten, 2) * actor.max_new_tokens == 1:
        yield (
            f"algorithm.advantage_whiten={whiten.value} needs two tokens, and one sample with "
            "actor_rollout.max_new_tokens=1 has one; use none, or more samples"
        )


def _log_probs(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.old_log_probs is OldLogProbs.RECOMPUTE:
        return
    for name in ("max_log_prob_gap", "rollout_is_threshold"):
        value = getattr(algorithm, name)
        if value is not None:
            yield (
                f"algorithm.{name}={value:g} needs algorithm.old_log_probs=recompute, which is "
                "what it compares; remove one of them"
            )
