"""Rules about the division of samples among ranks, mini-batches and micro-batches."""

from collections.abc import Iterator
from math import gcd, lcm, prod

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.problems import Problem, divisors, multiples_around, neighbours, ref, use
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig

TITLES = {
    Role.ACTOR_ROLLOUT: "the actor",
    Role.REF: "the reference",
    Role.CRITIC: "the critic",
    Role.REWARD: "the reward model",
}
MINI_BATCHES = {Role.ACTOR_ROLLOUT: "ppo_mini_batch_size", Role.CRITIC: "critic_mini_batch_size"}
BATCH, SAMPLES = "training.global_batch_size", "actor_rollout.n_samples_per_prompt"


def check_batches(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each broken rule of batch sizes.

    Call it only if the processes of every role are a multiple of TP x PP.
    """
    prompts = config.training.global_batch_size
    per_prompt = config.actor_rollout.n_samples_per_prompt
    compares = Role.ACTOR_ROLLOUT if config.critic is None else Role.CRITIC
    dp, replicas = config.layout(compares).dp, config.layout(Role.REWARD).dp
    greedy = config.algorithm.estimator.reads_greedy
    units = {role: prod(_factors(config, role).values()) for role in config.roles}
    step = lcm(  # every legal number of prompts is a multiple of it
        *(unit // gcd(unit, per_prompt) for unit in units.values()),
        *([dp] if config.samples_together > 1 else []),
        *([replicas] if greedy else []),
    )
    remedy = use(multiples_around(prompts, step))
    strictest_first = sorted(units, key=units.__getitem__, reverse=True)
    broken = [role for role in strictest_first if config.samples_per_iteration % units[role]]
    if broken:
        times = f"x {ref(SAMPLES)}={per_prompt} " if per_prompt > 1 else ""
        factors = " x ".join(_factors(config, broken[0]))
        yield Problem(
            BATCH, f"{times}must be a multiple of {TITLES[broken[0]]}'s {factors}", prompts, remedy
        )
    elif config.samples_together > 1 and prompts % dp:
        rule = f"must be a multiple of {TITLES[compares]}'s data-parallel size {dp}"
        yield Problem(BATCH, f"{rule}, whose ranks compare responses", prompts, remedy)
    elif greedy and prompts % replicas:
        rule = f"must be a multiple of the reward's data-parallel size {replicas}"
        yield Problem(BATCH, f"{rule}, which scores greedy responses too", prompts, remedy)
    for role in (role for role in MINI_BATCHES if role in config.roles):
        yield from _check_mini_batch(config, role, step)


def _factors(config: RunConfig, role: Role, pairs: bool = True) -> dict[str, int]:
    # Only trained roles have to fill a virtual pipeline; a frozen role pads it.
    section, dp = config.role(role), config.layout(role).dp
    found = {f"data-parallel size {dp}": dp}
    if isinstance(section, LearningConfig) and (stages := section.micro_batch_multiple) > 1:
        found[f"{stages} stages of its virtual pipeline"] = stages
    if pairs and role is Role.ACTOR_ROLLOUT and config.compares_pairs:
        found["2 responses of a pair"] = 2
    return found


def _check_mini_batch(config: RunConfig, role: Role, step: int) -> Iterator[Problem]:
    """Yield at most one problem of the mini-batches of a role, the actor or the critic."""
    section, factors = config.role(role), _factors(config, role, pairs=False)
    per_prompt = config.actor_rollout.n_samples_per_prompt
    prompts = config.training.global_batch_size
    key, micro_key = f"{role.value}.{MINI_BATCHES[role]}", f"{role.value}.micro_batch_size"
    size: int = getattr(section, MINI_BATCHES[role])
    by_tokens = section.max_tokens_per_micro_batch is not None
    micro, width = 1 if by_tokens else section.micro_batch_size, prod(factors.values())
    # The remedies of an illegal batch's mini-batches fit both sizes that its own remedy names.
    is_legal = prompts % step == 0
    samples = (prompts if is_legal else gcd(*multiples_around(prompts, step))) * per_prompt
    together = prod(_factors(config, role).values()) // width
    micros = [n for n in divisors(samples // width) if n % together == 0]
    good = [n for n in divisors(samples) if n % (width * micro) == 0]
    fits = min(micros, key=lambda n: abs(n - micro))
    if not by_tokens and micro % together:  # `rules.stages` refuses a token limit for pairs
        yield Problem(micro_key, "must be even, to hold whole pairs", micro, f"use {fits}")
        return
    other = f"no size fits, so use {ref(micro_key)}={fits} and a mini-batch of {fits * width}"
    remedy = use(neighbours(size, good)) if good else other
    if is_legal and samples % size:
        names = f"{ref(BATCH)}={prompts} x {ref(SAMPLES)}={per_prompt}"
        yield Problem(key, f"must divide the {samples} samples ({names})", size, remedy)
    elif size % (width * micro):
        names = " x ".join((*factors, *([] if by_tokens else [f"{ref(micro_key)}={micro}"])))
        yield Problem(key, f"must be a multiple of {width * micro} ({names})", size, remedy)
