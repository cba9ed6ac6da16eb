"""Rules about batch sizes: each role's ranks take whole micro-batches of whole mini-batches."""

from collections.abc import Iterator
from math import gcd, lcm, prod

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.problems import (
    Problem,
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
BATCH = "training.global_batch_size"
SAMPLES = "actor_rollout.n_samples_per_prompt"


def check_batches(config: RunConfig) -> Iterator[Problem]:
    """Yield problems with batch sizes. Each role's processes must form whole replicas."""
    num_prompts = config.training.global_batch_size
    per_prompt = config.actor_rollout.n_samples_per_prompt
    times = f"x {ref(SAMPLES)}={per_prompt} " if per_prompt > 1 else ""
    units: dict[str, int] = {}  # rule -> number that divides a legal number of prompts
    for role in config.roles:
        if config.role(role).architecture is None:
            continue  # ranks of rules and of classifiers may score a row again
        factors = _factors(config, role)
        if role is Role.ACTOR_ROLLOUT and config.compares_pairs:
            factors["2 responses of a pair"] = 2
        num_samples = prod(factors.values())  # that the role takes at a time
        rule = f"{times}must be a multiple of {TITLES[role]}'s {' x '.join(factors)}"
        units[rule] = num_samples // gcd(num_samples, per_prompt)
    if config.samples_together > 1:
        comparing_role = Role.ACTOR_ROLLOUT if config.critic is None else Role.CRITIC
        dp = config.layout(comparing_role).dp
        rule = f"must be a multiple of {TITLES[comparing_role]}'s data-parallel size {dp}"
        units[f"{rule}, whose ranks compare responses"] = dp
    if config.algorithm.estimator.reads_greedy:
        dp = config.layout(Role.REWARD).dp
        rule = f"must be a multiple of the reward's data-parallel size {dp}"
        units[f"{rule}, which scores greedy responses too"] = dp
    broken_rules = [rule for rule, unit in units.items() if num_prompts % unit]
    if broken_rules:
        remedy = use(multiples_around(num_prompts, lcm(*units.values())))
        strictest_rule = max(broken_rules, key=units.__getitem__)
        yield Problem(BATCH, strictest_rule, num_prompts, remedy)
        return  # a mini-batch is judged by a legal batch
    for role in MINI_BATCHES:
        if role in config.roles:
            yield from _check_mini_batch(config, role)


def _factors(config: RunConfig, role: Role) -> dict[str, int]:
    """Return the sizes whose product divides a role's batches, by how messages call them.

    {"data-parallel size 4": 4, "2 stages of its virtual pipeline": 2}: batches are multiples of 8.
    """
    section = config.role(role)
    dp = config.layout(role).dp
    factors = {f"data-parallel size {dp}": dp}
    # Only trained roles have to fill a virtual pipeline; a frozen role pads it.
    if isinstance(section, LearningConfig):
        num_stages = section.micro_batch_multiple
        if num_stages > 1:
            factors[f"{num_stages} stages of its virtual pipeline"] = num_stages
    return factors


def _check_mini_batch(config: RunConfig, role: Role) -> Iterator[Problem]:
    """Yield at most one problem with the actor's or critic's mini-batches."""
    section = config.role(role)
    key = f"{role.value}.{MINI_BATCHES[role]}"
    micro_key = f"{role.value}.micro_batch_size"
    mini_batch_size: int = getattr(section, MINI_BATCHES[role])
    by_tokens = section.max_tokens_per_micro_batch is not None
    micro_batch_size = 1 if by_tokens else section.micro_batch_size
    # Samples that stay in one micro-batch: a pair in online DPO.
    samples_together = 2 if role is Role.ACTOR_ROLLOUT and config.compares_pairs else 1
    if micro_batch_size % samples_together:  # `_check_pairs` reports it
        return
    factors = _factors(config, role)
    width = prod(factors.values())  # micro-batches at a time, over replicas and pipeline stages
    num_samples = config.samples_per_iteration
    legal_sizes = [n for n in divisors(num_samples) if n % (width * samples_together) == 0]
    sizes_for_micro = [n for n in legal_sizes if n % (width * micro_batch_size) == 0]
    nearest_size = min(legal_sizes, key=lambda n: abs(n - mini_batch_size))
    legal_micros = [n for n in divisors(nearest_size // width) if n % samples_together == 0]
    nearest_micro = min(legal_micros, key=lambda n: abs(n - micro_batch_size))
    # The micro-batch size does not change the result of a run, so it is changed first.
    if mini_batch_size in legal_sizes:
        remedy = f"use {ref(micro_key)}={nearest_micro}"
    elif sizes_for_micro:
        remedy = use(neighbours(mini_batch_size, sizes_for_micro))
    else:
        remedy = f"use {nearest_size} with {ref(micro_key)}={nearest_micro}"
    if num_samples % mini_batch_size:
        rule = f"must divide the {num_samples} samples ({ref(BATCH)} x {ref(SAMPLES)})"
        yield Problem(key, rule, mini_batch_size, remedy)
    elif mini_batch_size % (width * micro_batch_size):
        names = [*factors]
        if not by_tokens:
            names.append(f"{ref(micro_key)}={micro_batch_size}")
        rule = f"must be a multiple of {width * micro_batch_size} ({' x '.join(names)})"
        yield Problem(key, rule, mini_batch_size, remedy)
