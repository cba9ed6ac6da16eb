"""Rules about the division of samples among ranks, mini-batches and micro-batches."""

from collections.abc import Iterator
from math import gcd, lcm, prod

from mindspeed_rlxf.config.enums import LossNormalizer, Role, Stage
from mindspeed_rlxf.config.problems import (
    Problem,
    at_least,
    divisors,
    multiples_around,
    neighbours,
    ref,
    use,
)
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig

TITLES = {
    Role.ACTOR_ROLLOUT: "the actor",
    Role.REF: "the reference",
    Role.CRITIC: "the critic",
    Role.REWARD: "the reward model",
}
MINI_BATCHES = {Role.ACTOR_ROLLOUT: "ppo_mini_batch_size", Role.CRITIC: "critic_mini_batch_size"}
BATCH, SAMPLES = "training.global_batch_size", "actor_rollout.n_samples_per_prompt"


def check_batches(config: RunConfig) -> list[Problem]:
    """Return a problem for each broken rule of batch sizes.

    Call it only if the processes of every role are a multiple of TP x PP.
    """
    problems = list(_check_batch(config))
    for role in (role for role in MINI_BATCHES if role in config.roles):
        problems += _check_mini_batch(config, role)
    return problems


def check_token_budget(config: RunConfig, role: Role) -> Iterator[Problem]:
    """Yield a problem if `max_tokens_per_micro_batch` of a role is set and below `seq_length`."""
    limit, longest = config.role(role).max_tokens_per_micro_batch, config.training.seq_length
    if limit is not None:
        sample = f"{ref('training.seq_length')}={longest}, so that every sample fits"
        yield from at_least(f"{role.value}.max_tokens_per_micro_batch", limit, sample, longest)


def check_loss_normalizer(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each of actor and critic that has `max_tokens_per_micro_batch`.

    Its micro-batches have unequal numbers of samples. Only for `loss_normalizer: micro_batch_mean`.
    """
    if config.algorithm.loss_normalizer is not LossNormalizer.MICRO_BATCH_MEAN:
        return
    for role in (role for role in MINI_BATCHES if role in config.roles):
        limit = config.role(role).max_tokens_per_micro_batch
        if limit is not None:
            key = ref(f"{role.value}.max_tokens_per_micro_batch")
            yield Problem(
                "algorithm.loss_normalizer",
                f"needs micro-batches of one size, which {key}={limit} does not make",
                LossNormalizer.MICRO_BATCH_MEAN,
                f"use null there, or {ref('algorithm.loss_normalizer')}=minibatch_tokens",
            )


def _check_batch(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of `global_batch_size`, which all roles' ranks must divide equally."""
    prompts = config.training.global_batch_size
    per_prompt = config.actor_rollout.n_samples_per_prompt
    remedy = use(multiples_around(prompts, _prompt_step(config)))
    broken: list[int] = []
    units = {role: prod(_factors(config, role).values()) for role in config.roles}
    for role, unit in sorted(units.items(), key=lambda item: -item[1]):
        implied = any(other % unit == 0 for other in broken)
        if config.samples_per_iteration % unit and not implied:
            times = f"x {ref(SAMPLES)}={per_prompt} " if per_prompt > 1 else ""
            factors = " x ".join(_factors(config, role))
            rule = f"{times}must be a multiple of {TITLES[role]}'s {factors}"
            yield Problem(BATCH, rule, prompts, remedy)
            broken.append(unit)
    role = _experience_role(config)
    dp, replicas = config.layout(role).dp, config.layout(Role.REWARD).dp
    if config.samples_together > 1 and prompts % dp and not broken:
        yield Problem(
            BATCH,
            f"must be a multiple of {TITLES[role]}'s data-parallel size {dp}, so that the "
            "responses to a prompt, which are compared, are on one rank",
            prompts,
            remedy,
        )
    if config.algorithm.estimator.reads_greedy and prompts % replicas:
        estimator = f"{ref('algorithm.adv_estimator')}={config.algorithm.adv_estimator}"
        yield Problem(
            BATCH,
            f"must be a multiple of the reward's data-parallel size {replicas} with {estimator}, "
            "which scores one more response to each prompt",
            prompts,
            remedy,
        )


def _prompt_step(config: RunConfig) -> int:
    """Return the number of which every legal number of prompts is a multiple."""
    per_prompt = config.actor_rollout.n_samples_per_prompt
    units = [prod(_factors(config, role).values()) for role in config.roles]
    steps = [unit // gcd(unit, per_prompt) for unit in units]
    if config.samples_together > 1:
        steps.append(config.layout(_experience_role(config)).dp)
    if config.algorithm.estimator.reads_greedy:
        steps.append(config.layout(Role.REWARD).dp)
    return lcm(*steps)


def _experience_role(config: RunConfig) -> Role:
    return Role.ACTOR_ROLLOUT if config.critic is None else Role.CRITIC


def _factors(config: RunConfig, role: Role, pairs: bool = True) -> dict[str, int]:
    """Return the factors, by name, that a role's number of samples must have.

    Only trained roles have to fill a virtual pipeline; a frozen role pads it.
    pairs: with the 2 responses of a pair, which the actor's loss needs in online DPO
    """
    section, dp = config.role(role), config.layout(role).dp
    found = {f"data-parallel size {dp}": dp}
    if isinstance(section, LearningConfig) and (stages := section.micro_batch_multiple) > 1:
        found[f"{stages} stages of its virtual pipeline"] = stages
    if pairs and role is Role.ACTOR_ROLLOUT and config.training.stage is Stage.RAY_ONLINE_DPO:
        found["2 responses of a pair"] = 2
    return found


def _check_mini_batch(config: RunConfig, role: Role) -> Iterator[Problem]:
    """Yield at most one problem of the mini-batches of a role, the actor or the critic."""
    section, factors = config.role(role), _factors(config, role, pairs=False)
    per_prompt = config.actor_rollout.n_samples_per_prompt
    key, micro_key = f"{role.value}.{MINI_BATCHES[role]}", f"{role.value}.micro_batch_size"
    size: int = getattr(section, MINI_BATCHES[role])
    by_tokens = section.max_tokens_per_micro_batch is not None
    micro, width = 1 if by_tokens else section.micro_batch_size, prod(factors.values())
    prompts, step = config.training.global_batch_size, _prompt_step(config)
    is_legal = prompts % step == 0
    # The remedies of an illegal batch's mini-batches fit both sizes that its own remedy names.
    samples = (prompts if is_legal else gcd(*multiples_around(prompts, step))) * per_prompt
    together = prod(_factors(config, role).values()) // width
    micros = [n for n in divisors(samples // width) if n % together == 0]
    good = [n for n in divisors(samples) if n % (width * micro) == 0]
    if not by_tokens and micro % together:  # `rules.stages` refuses a token limit for pairs
        yield Problem(
            micro_key,
            f"must be even with {ref('training.stage')}=ray_online_dpo, whose loss needs both "
            "responses of a pair",
            micro,
            f"use {min(micros, key=lambda n: abs(n - micro))}",
        )
        return
    fits = next(iter(neighbours(micro, micros)), micro)
    other = f"no size fits, so use {ref(micro_key)}={fits} and a mini-batch of {fits * width}"
    remedy = use(neighbours(size, good)) if good else other
    if is_legal and samples % size:
        rule = f"({ref(BATCH)}={prompts} x {ref(SAMPLES)}={per_prompt})"
        rule = f"must divide the {samples} samples of an iteration {rule}"
        yield Problem(key, rule, size, remedy)
    elif size % (width * micro):
        names = " x ".join((*factors, *([] if by_tokens else [f"{ref(micro_key)}={micro}"])))
        yield Problem(key, f"must be a multiple of {width * micro} ({names})", size, remedy)
