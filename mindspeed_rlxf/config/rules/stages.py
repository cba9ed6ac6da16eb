"""Rules between the stage, the estimator, rewards and samples. Nothing here looks at the host."""

from collections.abc import Iterator

from mindspeed_rlxf.config.enums import AdvantageWhiten, KlPenalty, RewardKind, Role, Stage
from mindspeed_rlxf.config.problems import Problem, at_most, ref
from mindspeed_rlxf.config.schema import RunConfig

ESTIMATOR, STAGE = "algorithm.adv_estimator", "training.stage"
SAMPLES, NEW_TOKENS = "actor_rollout.n_samples_per_prompt", "actor_rollout.max_new_tokens"
FILTER, PENALTY, KL_IN = "algorithm.filter_groups", "algorithm.kl_penalty", "algorithm.kl_in"


def check_stage(config: RunConfig) -> Iterator[Problem]:
    """Yield broken rules between the stage, the estimator, the rewards and the samples."""
    if config.training.stage is Stage.RAY_ONLINE_DPO:
        yield from _check_pairs(config)
    else:
        yield from _check_estimator(config)
        yield from _check_full_kl(config)
    yield from _check_vocabulary(config)
    yield from _check_samples_per_prompt(config)
    yield from _check_rewards(config)
    yield from _check_verifiers(config)
    whiten, actor = config.algorithm.advantage_whiten, config.actor_rollout
    sizes = {
        AdvantageWhiten.BATCH: config.samples_per_iteration,
        AdvantageWhiten.MINIBATCH: actor.ppo_mini_batch_size,
    }
    pairs = config.training.stage is Stage.RAY_ONLINE_DPO
    if not pairs and sizes.get(whiten, 2) * actor.max_new_tokens == 1:
        yield Problem(
            "algorithm.advantage_whiten",
            f"needs two tokens, and one sample with {ref(NEW_TOKENS)}=1 has one",
            whiten,
            "use none, or more samples",
        )
    iterations = config.training.train_iters
    limit = f"{iterations - 1}, as the actor learns after it ({ref('training.train_iters')})"
    yield from at_most("critic.warmup_iters", config.warmup_iters, limit, iterations - 1)


def _check_estimator(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if only one of stage and estimator has a critic."""
    algorithm, stage = config.algorithm, config.training.stage
    estimator, needs_critic = algorithm.adv_estimator, algorithm.estimator.needs_critic
    if stage is Stage.RAY_PPO and not needs_critic:
        yield Problem(
            ESTIMATOR,
            f"needs no critic, and {ref(STAGE)}=ray_ppo trains one",
            estimator,
            f"use gae, or {ref(STAGE)}=ray_grpo",
        )
    if stage is not Stage.RAY_PPO and needs_critic:
        yield Problem(
            ESTIMATOR,
            f"needs a critic, and {ref(STAGE)}={stage.value} has none",
            estimator,
            f"use grpo, or {ref(STAGE)}=ray_ppo",
        )
    if algorithm.kl_in == "loss" and algorithm.kl_penalty is KlPenalty.KL:
        yield Problem(
            PENALTY,
            f"must not be kl with {ref(KL_IN)}=loss, where its gradient is 0 on average",
            algorithm.kl_penalty,
            "use low_var_kl or mse",
        )


def _check_full_kl(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each broken rule of `kl_penalty: full`; none without reference."""
    if config.algorithm.kl_penalty is not KlPenalty.FULL or Role.REF not in config.roles:
        return
    if config.algorithm.kl_in == "loss":
        yield Problem(PENALTY, f"needs {ref(KL_IN)}=reward", "full", "use that, or low_var_kl")
    pools = [config.pool_of(role) for role in (Role.ACTOR_ROLLOUT, Role.REF)]
    if pools[0] != pools[1]:
        yield Problem(
            PENALTY,
            "compares the whole vocabulary and needs actor and reference in one pool, they are "
            f"in {pools[0]} and {pools[1]}",
            "full",
            f"use {ref('placement.ref')}={pools[0]}, or low_var_kl",
        )
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        mine, theirs = getattr(config.actor_rollout, key), getattr(config.ref, key)
        if mine != theirs:
            yield Problem(
                f"ref.{key}",
                f"must be the actor's {mine} with {ref(PENALTY)}=full, which compares "
                "vocabularies part by part",
                theirs,
                f"use {mine}, or low_var_kl",
            )


def _check_vocabulary(config: RunConfig) -> Iterator[Problem]:
    sections = config.actor_rollout, config.ref
    if Role.REF not in config.roles:
        return
    mine, theirs = (section.architecture.vocab_size for section in sections)
    if mine != theirs:
        yield Problem(
            "ref",
            f"vocab_size={theirs} must be the actor's {mine}, whose tokens it scores",
            remedy="give folder and model of the policy that training starts from",
            colon=True,
        )


def _check_samples_per_prompt(config: RunConfig) -> Iterator[Problem]:
    samples, algorithm = config.actor_rollout.n_samples_per_prompt, config.algorithm
    if samples > 1 or config.training.stage is Stage.RAY_ONLINE_DPO:
        return
    needs = {
        f"{ref(ESTIMATOR)}={algorithm.adv_estimator}": algorithm.estimator.compares_group,
        f"{ref(FILTER)}=true": algorithm.filter_groups,
    }
    for name in (name for name, needed in needs.items() if needed):
        yield Problem(
            SAMPLES,
            f"must be 2 or more with {name}, which compares the responses to a prompt",
            samples,
            "use 4 or 8",
        )


def _check_pairs(config: RunConfig) -> Iterator[Problem]:
    samples = config.actor_rollout.n_samples_per_prompt
    limit = config.actor_rollout.max_tokens_per_micro_batch
    if samples != 2:
        yield Problem(
            SAMPLES,
            f"must be 2 with {ref(STAGE)}=ray_online_dpo, which prefers one of two responses",
            samples,
            "use 2",
        )
    if limit is not None:
        yield Problem(
            "actor_rollout.max_tokens_per_micro_batch",
            f"may separate the responses of a pair with {ref(STAGE)}=ray_online_dpo",
            limit,
            "use null, and micro_batch_size",
        )


def _check_rewards(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each broken rule of the overlong buffer and of `filter_groups`."""
    actor, algorithm = config.actor_rollout, config.algorithm
    longest, buffer = actor.max_new_tokens, "algorithm.overlong_buffer_len"
    limit = f"{ref(NEW_TOKENS)}={longest}"
    yield from at_most(buffer, algorithm.overlong_buffer_len, limit, longest)
    if not algorithm.filter_groups:
        return
    if actor.fixed_responses is not None:
        responses = ref("actor_rollout.fixed_responses")
        yield Problem(
            FILTER,
            f"must be false with {responses}, which answers no more prompts than the batch",
            True,
            "remove one of them",
        )
    pairs = config.training.stage is Stage.RAY_ONLINE_DPO
    if not (algorithm.estimator.compares_group or pairs):
        yield Problem(
            FILTER,
            f"must be false with {ref(ESTIMATOR)}={algorithm.adv_estimator}, which learns from "
            "every prompt",
            True,
            "remove it, or use grpo, dr_grpo, rloo or reinforce_plus_plus_baseline",
        )
    if config.reward.kind is not RewardKind.RULE:
        yield Problem(
            FILTER,
            f"needs {ref('reward.kind')}=rule, because the scores of a reward model always differ",
            True,
            "remove one of them",
        )


def _check_verifiers(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of `verifier_function` and `verifier_weight`."""
    algorithm = config.algorithm
    rules, weights = algorithm.verifier_function, algorithm.verifier_weight
    if not config.reward.verifier:
        for name in ("verifier_function", "verifier_weight"):
            if getattr(algorithm, name):
                yield Problem(
                    f"algorithm.{name}",
                    f"has no effect with {ref('reward.verifier')}=false",
                    remedy=f"remove it, or use {ref('reward.verifier')}=true",
                )
    elif weights and len(weights) != len(rules or (None,)):
        functions = ref("algorithm.verifier_function")
        yield Problem(
            "algorithm.verifier_weight",
            f"must have a weight for each of the {len(rules or (None,))} {functions}",
            list(weights),
            "give as many",
        )
