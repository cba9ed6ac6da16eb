"""Rules about the division of samples among ranks, mini-batches and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm
from typing import NamedTuple

from mindspeed_rlxf.config.enums import LossNormalizer, Role, Stage
from mindspeed_rlxf.config.errors import Problem, divisors, multiples_around, neighbours, ref, use
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig

TITLES = {
    Role.ACTOR_ROLLOUT: "the actor",
    Role.REF: "the reference",
    Role.CRITIC: "the critic",
    Role.REWARD: "the reward model",
}
MINI_BATCHES = {
    Role.ACTOR_ROLLOUT: "ppo_mini_batch_size",
    Role.CRITIC: "critic_mini_batch_size",
}
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
    if limit is not None and limit < longest:
        yield Problem(
            f"{role.value}.max_tokens_per_micro_batch",
            f"must be at least {ref('training.seq_length')}={longest}, so that every sample fits",
            limit,
            f"use {longest} or more",
        )


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
    for share, role in sorted(_shares(config).items(), key=lambda item: -item[0].unit):
        implied = any(unit % share.unit == 0 for unit in broken)
        if config.samples_per_iteration % share.unit and not implied:
            times = f"x {ref(SAMPLES)}={per_prompt} " if per_prompt > 1 else ""
            yield Problem(
                BATCH, f"{times}must be a multiple of {TITLES[role]}'s {share}", prompts, remedy
            )
            broken.append(share.unit)
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
    per_prompt = config.actor_rollout.n_samples_per_prompt
    steps = [share.unit // gcd(share.unit, per_prompt) for share in _shares(config)]
    if config.samples_together > 1:
        steps.append(config.layout(_experience_role(config)).dp)
    if config.algorithm.estimator.reads_greedy:
        steps.append(config.layout(Role.REWARD).dp)
    return lcm(*steps)


def _experience_role(config: RunConfig) -> Role:
    return Role.ACTOR_ROLLOUT if config.critic is None else Role.CRITIC


class _Share(NamedTuple):
    """Factors that a role's number of samples must have; `unit` is their product.

    Only trained roles have to fill a virtual pipeline; a frozen role pads it.
    """

    dp: int
    stages: int  # of the virtual pipeline of a role that learns, else 1
    together: int  # 2 if the loss needs pairs of responses, else 1

    @property
    def unit(self) -> int:
        return self.dp * self.stages * self.together

    def __str__(self) -> str:
        text = f"data-parallel size {self.dp}"
        if self.stages > 1:
            text += f" x {self.stages} stages of its virtual pipeline"
        return text + (f" x {self.together} responses of a pair" if self.together > 1 else "")


def _share(config: RunConfig, role: Role) -> _Share:
    section = config.role(role)
    stages = section.micro_batch_multiple if isinstance(section, LearningConfig) else 1
    pairs = role is Role.ACTOR_ROLLOUT and config.training.stage is Stage.RAY_ONLINE_DPO
    return _Share(config.layout(role).dp, stages, 2 if pairs else 1)


def _shares(config: RunConfig) -> dict[_Share, Role]:
    """Map each set of factors to the first role, in the order of `Role`, that has it."""
    return {_share(config, role): role for role in reversed(config.roles)}


def _check_mini_batch(config: RunConfig, role: Role) -> Iterator[Problem]:
    """Yield at most one problem of the mini-batches of a role, the actor or the critic."""
    section, share = config.role(role), _share(config, role)
    per_prompt = config.actor_rollout.n_samples_per_prompt
    name, micro_key = MINI_BATCHES[role], f"{role.value}.micro_batch_size"
    key = f"{role.value}.{name}"
    size, by_tokens = getattr(section, name), section.max_tokens_per_micro_batch is not None
    micro, width = 1 if by_tokens else section.micro_batch_size, share.dp * share.stages
    prompts, step = config.training.global_batch_size, _prompt_step(config)
    is_legal = prompts % step == 0
    # The remedies of an illegal batch's mini-batches fit both sizes that its own remedy names.
    samples = (prompts if is_legal else gcd(*multiples_around(prompts, step))) * per_prompt

    def sizes(micro: int) -> list[int]:
        return [n for n in divisors(samples) if n % (width * micro) == 0]

    def micros() -> list[int]:
        return [n for n in divisors(samples // width) if n % share.together == 0]

    if not by_tokens and micro % share.together:  # `rules.stages` refuses a token limit for pairs
        near = sorted(micros(), key=lambda n: abs(n - micro))
        fitting = [n for n in near if size in sizes(n)]
        good = neighbours(size, sizes(near[0])) or [size]
        yield Problem(
            micro_key,
            f"must be even with {ref('training.stage')}=ray_online_dpo, whose loss needs both "
            "responses of a pair",
            micro,
            use(sorted(fitting[:2])) if fitting else f"use {near[0]}, and {ref(key)}={good[0]}",
        )
        return
    if is_legal and samples % size:
        rule = (
            f"must divide the {samples} samples of an iteration "
            f"({ref(BATCH)}={prompts} x {ref(SAMPLES)}={per_prompt})"
        )
    elif size % (unit := width * micro):
        factors = str(share._replace(together=1))
        factors += "" if by_tokens else f" x {ref(micro_key)}={micro}"
        rule = f"must be a multiple of {unit} ({factors})"
    else:
        return
    if good := sizes(micro):
        remedy = use(neighbours(size, good))
    else:
        fits = neighbours(micro, micros())[0]
        remedy = f"no size fits, so use {ref(micro_key)}={fits} and a mini-batch of {fits * width}"
    yield Problem(key, rule, size, remedy)
