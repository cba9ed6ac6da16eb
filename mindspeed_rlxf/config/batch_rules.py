"""Rules of how samples are cut up: over ranks, into mini-batches, into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm

from mindspeed_rlxf.config.enums import LossNormalizer, Role
from mindspeed_rlxf.config.schema import ActorConfig, CriticConfig, RunConfig
from mindspeed_rlxf.config.suggest import around, divisors, multiples_around, use

TITLES = {
    Role.ACTOR_ROLLOUT: "the actor",
    Role.REF: "the reference",
    Role.CRITIC: "the critic",
    Role.REWARD: "the reward model",
}


def check_batches(config: RunConfig) -> list[str]:
    """Every rule broken; all roles have whole replicas."""
    return [*_batch(config), *_mini_batches(config)]


def token_budget(config: RunConfig, role: Role) -> Iterator[str]:
    """`max_tokens_per_micro_batch` of one role with a model."""
    section = config.role(role)
    limit = section.max_tokens_per_micro_batch
    if limit is None:
        return
    shown = f"{role.value}.max_tokens_per_micro_batch={limit}"
    if limit < config.training.seq_length:
        yield (
            f"{shown} must be at least training.seq_length={config.training.seq_length}, so that "
            f"every sample fits; use {config.training.seq_length} or more"
        )
    if not section.packed_sequences:
        yield (
            f"{shown} needs {role.value}.packed_sequences=true, as padding would exceed it; "
            f"remove one of them"
        )


def loss_by_micro_batch(config: RunConfig) -> Iterator[str]:
    """A mean of micro-batch means depends on what shares a micro-batch."""
    if config.algorithm.loss_normalizer is not LossNormalizer.MICRO_BATCH_MEAN:
        return
    for role in (r for r in config.roles if r in (Role.ACTOR_ROLLOUT, Role.CRITIC)):
        limit = config.role(role).max_tokens_per_micro_batch
        if limit is not None:
            yield (
                f"algorithm.loss_normalizer=micro_batch_mean needs micro-batches of one size, "
                f"{role.value}.max_tokens_per_micro_batch={limit} makes others; "
                "use null there, or algorithm.loss_normalizer=minibatch_tokens"
            )


def _batch(config: RunConfig) -> Iterator[str]:
    """Every rank takes the same number of samples; the remedy is good for all roles."""
    prompts = config.training.global_batch_size
    per_prompt = config.actor_rollout.n_samples_per_prompt
    # The first role of each share.
    shares = {_share(config, role): role for role in reversed(config.roles)}
    step = lcm(*(dp * stages // gcd(dp * stages, per_prompt) for dp, stages in shares))
    for (dp, stages), role in shares.items():
        if config.samples_per_iteration % (dp * stages):
            times = f" x actor_rollout.n_samples_per_prompt={per_prompt}" if per_prompt > 1 else ""
            yield (
                f"training.global_batch_size={prompts}{times} must be a multiple of "
                f"{TITLES[role]}'s data-parallel size {dp}{_times(stages)}; "
                f"{use(multiples_around(prompts, step))}"
            )


def _share(config: RunConfig, role: Role) -> tuple[int, int]:
    """Replicas, and the micro-batches that each has to make at least (frozen roles can fill up)."""
    section = config.role(role)
    learns = isinstance(section, (ActorConfig, CriticConfig))
    return config.layout(role).dp, section.micro_batch_multiple if learns else 1


def _times(stages: int) -> str:
    return f" x {stages} stages of its virtual pipeline" if stages > 1 else ""


def _mini_batches(config: RunConfig) -> Iterator[str]:
    sizes = {
        Role.ACTOR_ROLLOUT: ("ppo_mini_batch_size", config.actor_rollout.ppo_mini_batch_size),
    }
    if config.critic:
        size = config.critic.critic_mini_batch_size
        sizes[Role.CRITIC] = ("critic_mini_batch_size", size)
    for role, (key, size) in sizes.items():
        yield from _mini_batch(config, _Step.of(config, role), f"{role.value}.{key}={size}", size)


@dataclass(frozen=True)
class _Step:
    """What the samples of an optimizer step are a multiple of."""

    role: Role
    share: int  # data-parallel size, with a virtual pipeline times its stages
    micro: int  # micro_batch_size, 1 where tokens are counted
    factors: str

    @classmethod
    def of(cls, config: RunConfig, role: Role) -> _Step:
        section = config.role(role)
        dp, stages = _share(config, role)
        factors, micro = f"data-parallel size {dp}{_times(stages)}", 1
        if section.max_tokens_per_micro_batch is None:
            micro = section.micro_batch_size
            factors += f" x {role.value}.micro_batch_size={micro}"
        return cls(role, dp * stages, micro, factors)

    @property
    def unit(self) -> int:
        return self.share * self.micro

    def remedy(self, samples: int, size: int) -> str:
        samples += -samples % self.share  # a batch size that is wrong will be mended too
        good = [number for number in divisors(samples) if number % self.unit == 0]
        if good:
            return use(around(size, good))
        fits = around(self.micro, divisors(samples // self.share))[0]
        return (
            f"no size fits, so use {self.role.value}.micro_batch_size={fits} and a mini-batch of "
            f"{fits * self.share}"
        )


def _mini_batch(config: RunConfig, step: _Step, shown: str, size: int) -> Iterator[str]:
    """A mini-batch divides the iteration's samples and fills whole micro-batches on each rank."""
    samples = config.samples_per_iteration
    if samples % size and samples % step.share == 0:
        yield (
            f"{shown} must divide the {samples} samples of an iteration "
            f"(training.global_batch_size={config.training.global_batch_size} x "
            f"actor_rollout.n_samples_per_prompt={config.actor_rollout.n_samples_per_prompt}); "
            f"{step.remedy(samples, size)}"
        )
    if size % step.unit:
        yield (
            f"{shown} must be a multiple of {step.unit} ({step.factors}); "
            f"{step.remedy(samples, size)}"
        )
