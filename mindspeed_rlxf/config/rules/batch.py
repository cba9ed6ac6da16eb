"""Rules about the division of samples among ranks, mini-batches and micro-batches."""

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
    """Return a problem for each broken rule of batch sizes.

    Call it only if the processes of every role are a multiple of TP x PP.
    """
    return [*_check_batch(config), *_check_mini_batches(config)]


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


def _check_batch(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of `global_batch_size`, which all roles' ranks must be able to divide equally.

    One for each role's unit of samples (`_Share`) that does not divide the samples of an iteration;
    not if a larger unit that was reported implies it. Also if responses that are compared would be
    on several ranks (not after the first kind), and if greedy responses, one per prompt, cannot be
    divided among the reward's replicas.
    """
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
    """Return the number whose multiples are the legal values of `global_batch_size`.

    The least common multiple of the numbers of prompts that the rules of `_check_batch` need.
    """
    per_prompt = config.actor_rollout.n_samples_per_prompt
    steps = [share.unit // gcd(share.unit, per_prompt) for share in _shares(config)]
    if config.samples_together > 1:
        steps.append(config.layout(_experience_role(config)).dp)
    if config.algorithm.estimator.reads_greedy:
        steps.append(config.layout(Role.REWARD).dp)
    return lcm(*steps)


def _experience_role(config: RunConfig) -> Role:
    """Return the role on whose ranks advantages are computed, from whole groups."""
    return Role.ACTOR_ROLLOUT if config.critic is None else Role.CRITIC


@dataclass(frozen=True)
class _Share:
    """Factors that a role's number of samples must have; `unit` is their product.

    Only trained roles have to fill a virtual pipeline; a frozen role pads it.
    """

    dp: int
    stages: int  # of the virtual pipeline of a role that learns, else 1
    together: int  # 2 where the loss needs pairs of responses, else 1

    @classmethod
    def of(cls, config: RunConfig, role: Role) -> _Share:
        """Return the factors of a role, for the sizes of the configuration.

        `stages` is that of the virtual pipeline for a role that learns; `together` is 2 for the
        actor of online DPO.
        """
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
    """Map each set of factors to the first role, in the order of `Role`, that has it."""
    return {_Share.of(config, role): role for role in reversed(config.roles)}


def _legal_samples(config: RunConfig) -> int:
    """Return the samples of an iteration, by which mini-batches are checked.

    prompts x `n_samples_per_prompt`. Prompts are `global_batch_size`, or where it is illegal the
    greatest common divisor of the two sizes that its problem proposes, so that remedies for
    mini-batches fit both.
    """
    prompts, step = config.training.global_batch_size, _prompt_step(config)
    if prompts % step:
        prompts = gcd(*multiples_around(prompts, step))
    return prompts * config.actor_rollout.n_samples_per_prompt


def _check_mini_batches(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of the mini-batches of actor and critic, at most one per role.

    Reported is the first of: a micro-batch that separates a pair of responses, a mini-batch that
    does not divide the samples of an iteration, one that is no multiple of the ranks'
    micro-batches.
    """
    sizes = [(Role.ACTOR_ROLLOUT, "ppo_mini_batch_size"), (Role.CRITIC, "critic_mini_batch_size")]
    for role, key in sizes:
        if role in config.roles:
            step, size = _Step.of(config, role), getattr(config.role(role), key)
            if step.splits_pairs:
                yield _odd_micro_batch(step, key, size)
            else:
                yield from _check_mini_batch(config, step, f"{role.value}.{key}", size)


@dataclass(frozen=True)
class _Step:
    """Factors that the number of samples of a role's optimizer step must have."""

    role: Role
    samples: int  # of an iteration, by `_legal_samples`
    is_legal: bool  # global_batch_size is legal, so `samples` is the real number
    share: int  # data-parallel size x stages of a virtual pipeline
    micro: int  # micro_batch_size; 1 with max_tokens_per_micro_batch
    together: int  # 2 where the loss needs pairs of responses, else 1
    by_tokens: bool  # max_tokens_per_micro_batch is given
    factors: str  # text of the factors share x micro, for messages

    @classmethod
    def of(cls, config: RunConfig, role: Role) -> _Step:
        """Return the factors of an optimizer step of a role, which must be the actor or the critic.

        `share` = data-parallel size x stages of the virtual pipeline; `micro` = micro_batch_size,
        or 1 with a token limit; `samples` by `_legal_samples`; `factors` = share and micro as text.
        """
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
        """Whether `micro_batch_size` separates the two responses of a pair.

        False with max_tokens_per_micro_batch, which `rules.stages` refuses for pairs.
        """
        return not self.by_tokens and self.micro % self.together > 0

    def sizes(self, micro: int) -> list[int]:
        """List the legal sizes of mini-batches for micro-batches of `micro` samples, ascending."""
        return [n for n in divisors(self.samples) if n % (self.share * micro) == 0]

    def micros(self) -> list[int]:
        """List the sizes of micro-batches for which a mini-batch is legal, ascending."""
        return [n for n in divisors(self.samples // self.share) if n % self.together == 0]

    def remedy(self, size: int) -> str:
        """Return text that proposes the legal mini-batches nearest to `size`, on both sides.

        If none is legal for the micro_batch_size: another micro_batch_size, and a mini-batch for
        it.
        """
        if good := self.sizes(self.micro):
            return use(neighbours(size, good))
        fits = neighbours(self.micro, self.micros())[0]
        return (
            f"no size fits, so use {ref(f'{self.role.value}.micro_batch_size')}={fits} and a "
            f"mini-batch of {fits * self.share}"
        )


def _odd_micro_batch(step: _Step, key: str, size: int) -> Problem:
    """Return the problem of a micro_batch_size that separates pairs, with even sizes as remedy.

    The remedy is the closest one or two sizes that the mini-batch allows, ascending, perhaps both
    on one side; if there are none, the closest even micro-batch and a mini-batch for it.
    key, size: of the role's mini-batch
    """
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


def _check_mini_batch(config: RunConfig, step: _Step, key: str, size: int) -> Iterator[Problem]:
    """Yield at most one problem: the first of these two rules that the mini-batch breaks.

    It divides the samples of an iteration (checked only if `global_batch_size` is legal). It is a
    multiple of DP x stages of a virtual pipeline x micro-batch size.
    key, size: of the mini-batch
    """
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
