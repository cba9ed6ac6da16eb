"""Rules of how samples are divided among ranks, mini-batches and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, lcm

from mindspeed_rlxf.config.enums import LossNormalizer, Role, Stage
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig
from mindspeed_rlxf.config.suggest import divisors, multiples_around, neighbours, use

TITLES = {
    Role.ACTOR_ROLLOUT: "the actor",
    Role.REF: "the reference",
    Role.CRITIC: "the critic",
    Role.REWARD: "the reward model",
}
BATCH, SAMPLES = "training.global_batch_size", "actor_rollout.n_samples_per_prompt"


def check_batches(config: RunConfig) -> list[Problem]:
    """Find every rule of batch sizes that is broken. All roles must have whole replicas."""
    return [*_batch(config), *_mini_batches(config)]


def check_token_budget(config: RunConfig, role: Role) -> Iterator[Problem]:
    """Check that `max_tokens_per_micro_batch` of a role holds the longest sample."""
    limit, longest = config.role(role).max_tokens_per_micro_batch, config.training.seq_length
    if limit is not None and limit < longest:
        yield Problem(
            f"{role.value}.max_tokens_per_micro_batch",
            f"must be at least {ref('training.seq_length')}={longest}, so that every sample fits",
            limit,
            f"use {longest} or more",
        )


def check_loss_normalizer(config: RunConfig) -> Iterator[Problem]:
    """Report a limit of tokens per micro-batch where `loss_normalizer` is micro_batch_mean.

    A mean of micro-batch means needs micro-batches with the same number of rows.
    """
    if config.algorithm.loss_normalizer is not LossNormalizer.MICRO_BATCH_MEAN:
        return
    for role in (r for r in config.roles if r in (Role.ACTOR_ROLLOUT, Role.CRITIC)):
        limit = config.role(role).max_tokens_per_micro_batch
        if limit is not None:
            key = ref(f"{role.value}.max_tokens_per_micro_batch")
            yield Problem(
                "algorithm.loss_normalizer",
                f"needs micro-batches of one size, which {key}={limit} does not make",
                LossNormalizer.MICRO_BATCH_MEAN,
                f"use null there, or {ref('algorithm.loss_normalizer')}=minibatch_tokens",
            )


def _batch(config: RunConfig) -> Iterator[Problem]:
    """Check that all ranks take equally many samples, those of a prompt together if compared."""
    prompts, per_prompt = (
        config.training.global_batch_size,
        config.actor_rollout.n_samples_per_prompt,
    )
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
    dp, replicas = config.layout(Role.ACTOR_ROLLOUT).dp, config.layout(Role.REWARD).dp
    if config.samples_together > 1 and prompts % dp and not broken:
        yield Problem(
            BATCH,
            f"must be a multiple of the actor's data-parallel size {dp}, so that the responses to "
            "a prompt, which are compared, are on one rank",
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
    """Return the smallest number of prompts that `_batch` accepts; so are its multiples."""
    per_prompt = config.actor_rollout.n_samples_per_prompt
    steps = [share.unit // gcd(share.unit, per_prompt) for share in _shares(config)]
    if config.samples_together > 1:
        steps.append(config.layout(Role.ACTOR_ROLLOUT).dp)
    if config.algorithm.estimator.reads_greedy:
        steps.append(config.layout(Role.REWARD).dp)
    return lcm(*steps)


@dataclass(frozen=True)
class _Share:
    """Factors of the number of samples of a role.

    Only roles that learn have to fill a virtual pipeline; the others can pad it.
    """

    dp: int
    stages: int  # of the virtual pipeline of a role that learns, else 1
    together: int  # 2 where the loss needs pairs of responses, else 1

    @classmethod
    def of(cls, config: RunConfig, role: Role) -> _Share:
        """Read from the configuration how a role's samples are divided."""
        section = config.role(role)
        learns = isinstance(section, LearningConfig)
        stages = section.micro_batch_multiple if learns else 1
        pairs = role is Role.ACTOR_ROLLOUT and config.training.stage is Stage.RAY_ONLINE_DPO
        return cls(config.layout(role).dp, stages, 2 if pairs else 1)

    @property
    def unit(self) -> int:
        return self.dp * self.stages * self.together

    def __str__(self) -> str:
        text = f"data-parallel size {self.dp}"
        if self.stages > 1:
            text += f" x {self.stages} stages of its virtual pipeline"
        return text + (f" x {self.together} responses of a pair" if self.together > 1 else "")


def _shares(config: RunConfig) -> dict[_Share, Role]:
    """Return each share with the first role that has it."""
    return {_Share.of(config, role): role for role in reversed(config.roles)}


def _legal_samples(config: RunConfig) -> int:
    """Count the samples of an iteration.

    Where the batch is illegal, return a common divisor of what both remedies make.
    """
    prompts, step = config.training.global_batch_size, _prompt_step(config)
    if prompts % step:
        prompts = gcd(*multiples_around(prompts, step))
    return prompts * config.actor_rollout.n_samples_per_prompt


def _mini_batches(config: RunConfig) -> Iterator[Problem]:
    """Check the mini-batches of actor and critic."""
    sizes = [(Role.ACTOR_ROLLOUT, "ppo_mini_batch_size"), (Role.CRITIC, "critic_mini_batch_size")]
    for role, key in sizes:
        if role in config.roles:
            step, size = _Step.of(config, role), getattr(config.role(role), key)
            if step.splits_pairs:
                yield _odd_micro_batch(step, key, size)
            else:
                yield from _mini_batch(config, step, f"{role.value}.{key}", size)


@dataclass(frozen=True)
class _Step:
    """Factors of the number of samples of an optimizer step."""

    role: Role
    samples: int  # `_legal_samples`
    is_legal: bool  # that is the iteration's number of samples
    share: int  # data-parallel size, with a virtual pipeline times its stages
    micro: int  # micro_batch_size, 1 where tokens are counted
    together: int  # 2 where the loss needs pairs of responses, else 1
    by_tokens: bool
    factors: str

    @classmethod
    def of(cls, config: RunConfig, role: Role) -> _Step:
        """Read from the configuration how a role divides an iteration into optimizer steps."""
        section, share = config.role(role), _Share.of(config, role)
        micro, factors = 1, str(replace(share, together=1))
        by_tokens = section.max_tokens_per_micro_batch is not None
        if not by_tokens:
            micro = section.micro_batch_size
            factors += f" x {ref(f'{role.value}.micro_batch_size')}={micro}"
        samples, width = _legal_samples(config), share.dp * share.stages
        is_legal = samples == config.samples_per_iteration
        return cls(role, samples, is_legal, width, micro, share.together, by_tokens, factors)

    @property
    def splits_pairs(self) -> bool:
        """Whether micro-batches hold half a pair.

        Where tokens are counted, `rules.stages` refuses it.
        """
        return not self.by_tokens and self.micro % self.together > 0

    def sizes(self, micro: int) -> list[int]:
        """List the legal mini-batches with micro-batches of `micro` samples."""
        return [n for n in divisors(self.samples) if n % (self.share * micro) == 0]

    def micros(self) -> list[int]:
        """List the sizes of micro-batches for which there is a legal mini-batch."""
        return [n for n in divisors(self.samples // self.share) if n % self.together == 0]

    def remedy(self, size: int) -> str:
        """Say which legal mini-batches are next to `size`, or which micro-batch makes one legal."""
        if good := self.sizes(self.micro):
            return use(neighbours(size, good))
        fits = neighbours(self.micro, self.micros())[0]
        return (
            f"no size fits, so use {ref(f'{self.role.value}.micro_batch_size')}={fits} and a "
            f"mini-batch of {fits * self.share}"
        )


def _odd_micro_batch(step: _Step, key: str, size: int) -> Problem:
    """Make the problem of a micro-batch that splits pairs; propose whole ones that fit."""
    near = sorted(step.micros(), key=lambda micro: abs(micro - step.micro))
    fitting = [micro for micro in near if size in step.sizes(micro)]
    good = neighbours(size, step.sizes(near[0])) or [size]
    change_both = f"use {near[0]}, and {ref(f'{step.role.value}.{key}')}={good[0]}"
    return Problem(
        f"{step.role.value}.micro_batch_size",
        f"must be even with {ref('training.stage')}=ray_online_dpo, whose loss needs both "
        "responses of a pair",
        step.micro,
        use(sorted(fitting[:2])) if fitting else change_both,
    )


def _mini_batch(config: RunConfig, step: _Step, key: str, size: int) -> Iterator[Problem]:
    """Check that a mini-batch divides the samples and fills whole micro-batches on each rank."""
    if step.is_legal and step.samples % size:
        yield Problem(
            key,
            f"must divide the {step.samples} samples of an iteration "
            f"({ref(BATCH)}={config.training.global_batch_size} x "
            f"{ref(SAMPLES)}={config.actor_rollout.n_samples_per_prompt})",
            size,
            step.remedy(size),
        )
    elif size % (unit := step.share * step.micro):
        yield Problem(
            key, f"must be a multiple of {unit} ({step.factors})", size, step.remedy(size)
        )
