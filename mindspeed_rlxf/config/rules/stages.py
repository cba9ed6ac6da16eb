"""Rules between the stage, the estimator, rewards and samples. Nothing here looks at the host."""

from collections.abc import Iterator

from mindspeed_rlxf.config.enums import AdvantageWhiten, KlPenalty, Role, Stage
from mindspeed_rlxf.config.problems import Problem, at_most, ref
from mindspeed_rlxf.config.schema import RunConfig

ESTIMATOR, STAGE = "algorithm.adv_estimator", "training.stage"
SAMPLES = "actor_rollout.n_samples_per_prompt"
FILTER, PENALTY, KL_IN = "algorithm.filter_groups", "algorithm.kl_penalty", "algorithm.kl_in"


def check_stage(config: RunConfig) -> Iterator[Problem]:
    """Yield broken rules between the stage, the estimator, the rewards and the samples."""
    algorithm, actor, pairs = config.algorithm, config.actor_rollout, config.compares_pairs
    yield from _check_pairs(config) if pairs else _check_estimator(config)
    theirs, mine = config.ref.architecture.vocab_size, actor.architecture.vocab_size
    if Role.REF in config.roles and mine != theirs:
        rule = f"vocab_size={theirs} must be the actor's {mine}, whose tokens it scores"
        yield Problem("ref", rule, remedy="use the folder and model of the actor", colon=True)
    sizes = {
        AdvantageWhiten.BATCH: config.samples_per_iteration,
        AdvantageWhiten.MINIBATCH: actor.ppo_mini_batch_size,
    }
    whiten, longest = algorithm.advantage_whiten, actor.max_new_tokens
    if not pairs and sizes.get(whiten, 2) * longest == 1:
        yield Problem(
            "algorithm.advantage_whiten", "needs two tokens", whiten, "use none, or more samples"
        )
    iterations = config.training.train_iters
    limit = f"{iterations - 1}, as the actor learns after it ({ref('training.train_iters')})"
    yield from at_most("critic.warmup_iters", config.warmup_iters, limit, iterations - 1)
    limit = f"{ref('actor_rollout.max_new_tokens')}={longest}"
    buffer = algorithm.overlong_buffer_len
    yield from at_most("algorithm.overlong_buffer_len", buffer, limit, longest)
    rules, weights = algorithm.verifier_function, algorithm.verifier_weight
    if config.reward.verifier and weights and len(weights) != len(rules or (None,)):
        rule = f"must have as many as {ref('algorithm.verifier_function')}"
        yield Problem("algorithm.verifier_weight", rule, list(weights), "add or remove weights")


def _check_pairs(config: RunConfig) -> Iterator[Problem]:
    """Yield broken rules of online DPO, which prefers one of two responses."""
    samples = config.actor_rollout.n_samples_per_prompt
    limit, dpo = config.actor_rollout.max_tokens_per_micro_batch, f"{ref(STAGE)}=ray_online_dpo"
    if samples != 2:
        yield Problem(SAMPLES, f"must be 2 with {dpo}", samples, "use 2")
    if limit is not None:
        key = "actor_rollout.max_tokens_per_micro_batch"
        rule = f"may separate the responses of a pair with {dpo}"
        yield Problem(key, rule, limit, "use null, and micro_batch_size")


def _check_estimator(config: RunConfig) -> Iterator[Problem]:
    """Yield broken rules of the estimator, its stage and its KL penalty."""
    algorithm, stage = config.algorithm, config.training.stage
    name, needs_critic = algorithm.adv_estimator, algorithm.estimator.needs_critic
    if stage is Stage.RAY_PPO and not needs_critic:
        rule = f"needs no critic, and {ref(STAGE)}=ray_ppo trains one"
        yield Problem(ESTIMATOR, rule, name, f"use gae, or {ref(STAGE)}=ray_grpo")
    if stage is not Stage.RAY_PPO and needs_critic:
        rule = f"needs a critic, and {ref(STAGE)}={stage.value} has none"
        yield Problem(ESTIMATOR, rule, name, f"use grpo, or {ref(STAGE)}=ray_ppo")
    samples = config.actor_rollout.n_samples_per_prompt
    needs = {
        f"{ref(ESTIMATOR)}={name}": algorithm.estimator.compares_group,
        f"{ref(FILTER)}=true": algorithm.filter_groups,
    }
    for cause in (cause for cause, needed in needs.items() if needed and samples == 1):
        rule = f"must be 2 or more with {cause}, which compares the responses to a prompt"
        yield Problem(SAMPLES, rule, samples, "use 4 or 8")
    penalty, in_loss = algorithm.kl_penalty, algorithm.kl_in == "loss"
    if in_loss and penalty is KlPenalty.KL:
        rule = f"must not be kl with {ref(KL_IN)}=loss, where its gradient is 0 on average"
        yield Problem(PENALTY, rule, penalty, "use low_var_kl or mse")
    if penalty is not KlPenalty.FULL or Role.REF not in config.roles:
        return
    if in_loss:
        yield Problem(PENALTY, f"needs {ref(KL_IN)}=reward", "full", "use that, or low_var_kl")
    pool, other = config.placement[Role.ACTOR_ROLLOUT], config.placement[Role.REF]
    if pool != other:
        rule = f"needs the reference in the actor's pool, and not in {other}"
        yield Problem(PENALTY, rule, "full", f"use {ref('placement.ref')}={pool}, or low_var_kl")
    # The vocabularies are compared part by part.
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        mine, theirs = getattr(config.actor_rollout, key), getattr(config.ref, key)
        if mine != theirs:
            rule = f"must be the actor's {mine} with {ref(PENALTY)}=full"
            yield Problem(f"ref.{key}", rule, theirs, f"use {mine}, or low_var_kl")
