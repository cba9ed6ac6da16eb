"""Rules between keys of several sections. `Section.broken_rules` has those within a section."""

from collections.abc import Iterator
from math import gcd

from mindspeed_rlxf.config.architecture import find_uneven
from mindspeed_rlxf.config.enums import LossNormalizer, RewardKind, Role
from mindspeed_rlxf.config.problems import (
    Problem,
    at_least,
    at_most,
    closest,
    divides,
    divisors,
    multiples_around,
    neighbours,
    ref,
    use,
)
from mindspeed_rlxf.config.rank_layout import count_per_node
from mindspeed_rlxf.config.roles import RoleConfig
from mindspeed_rlxf.config.rules.batch_sizes import MINI_BATCHES, TITLES, check_batches
from mindspeed_rlxf.config.rules.stages import check_stage
from mindspeed_rlxf.config.schema import RunConfig

TRAIN, INFER = "actor_rollout.num_gpus_for_train", "actor_rollout.num_gpus_for_infer"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
ACTOR_TP = "actor_rollout.tensor_model_parallel_size"
ROLLOUT_EP = "rollout.expert_model_parallel_size"
ACTOR_EP = "actor_rollout.expert_model_parallel_size"


def check_sections(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each broken rule between sections. Does not look at the host."""
    sizes = [*_check_pools(config)] or [*_check_replicas(config)]
    yield from sizes
    keys = ("max_prompt_length", "max_new_tokens")
    parts = {key: getattr(config.actor_rollout, key) for key in keys}
    both = " + ".join(f"{ref(f'actor_rollout.{key}')}={size}" for key, size in parts.items())
    total = config.training.seq_length
    yield from at_least("training.seq_length", total, both, sum(parts.values()))
    if config.validation.reward is not RewardKind.RULE and config.reward.kind is RewardKind.RULE:
        rule, value = f"needs {ref('reward.kind')}=model", config.validation.reward
        yield Problem("validation.reward", rule, value, "use rule")
    yield from check_stage(config)
    yield from _check_split(config)
    for role in config.roles:
        if config.role(role).architecture is not None:  # the reward may be a rule
            yield from _check_model(config, role, not sizes)
    if not sizes:
        yield from check_batches(config)


def _check_pools(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each role on a pool that does not exist, and each pool without a role."""
    known = ", ".join(config.resource_pool) or "it has none"
    for role, pool in config.placement.items():
        if pool not in config.resource_pool:
            key = f"placement.{role.value}"
            guess = closest(pool, config.resource_pool) or next(iter(config.resource_pool), "")
            remedy = f"use {ref(key)}={guess}, or " if guess else ""
            remedy += f"add resource_pool.{pool}"
            yield Problem(key, f"must name a pool of resource_pool ({known})", pool, remedy)
    for pool in config.resource_pool.keys() - config.placement.values():
        yield Problem(f"resource_pool.{pool}", "must hold a role", remedy="remove it")


def _check_replicas(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each role whose processes hold no whole number of replicas."""
    for role in config.roles:
        section, size = config.role(role), sum(config.processes_of(role))
        tp, pp = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
        if size % (tp * pp):
            split = role is Role.ACTOR_ROLLOUT and config.parts
            key = TRAIN if split else f"resource_pool.{config.placement[role]}"
            rule = f"must be a multiple of TP {tp} x PP {pp} = {tp * pp} of {TITLES[role]}"
            yield Problem(key, rule, size, use(multiples_around(size, tp * pp)))


def _check_model(config: RunConfig, role: Role, whole: bool) -> Iterator[Problem]:
    """Yield problems of a role with a model: its weights, lengths and parallel sizes.

    Args:
        whole: the processes of every role hold whole replicas.
    """
    section, pool = config.role(role), config.placement[role]
    if section.load is None:
        yield Problem(f"{role.value}.load", "is required", remedy="give the folder of its weights")
    total, longest = config.training.seq_length, section.architecture.max_position_embeddings
    limit = f"{ref(f'model.{section.model}.max_position_embeddings')}={longest}"
    yield from at_most("training.seq_length", total, limit, longest)
    if section.max_tokens_per_micro_batch is not None:
        key = f"{role.value}.max_tokens_per_micro_batch"
        longest_sample = f"{ref('training.seq_length')}={total}"
        yield from at_least(key, section.max_tokens_per_micro_batch, longest_sample, total)
        normalizer = config.algorithm.loss_normalizer
        if role in MINI_BATCHES and normalizer is LossNormalizer.MICRO_BATCH_MEAN:
            rule = f"needs micro-batches of one size, which {ref(key)} does not make"
            yield Problem("algorithm.loss_normalizer", rule, normalizer, "use minibatch_tokens")
    tp, ep = section.tensor_model_parallel_size, section.expert_model_parallel_size
    if section.architecture.num_experts is not None:
        dp = config.layout(role).dp if whole else None
        yield from _check_experts(f"{role.value}.expert_model_parallel_size", ep, section, dp)
    if role is Role.ACTOR_ROLLOUT and config.rollout_tp != tp:
        a = section.architecture
        yield from find_uneven(ROLLOUT_TP, config.rollout_tp, a, section.model, f"{role.value}.")
    uneven = whole and any(processes % tp for processes in config.processes_of(role))
    if uneven and not config.pool_settings.tensor_parallel_spans_nodes:
        rule = f"must be multiples of {role.value}'s TP {tp}, one for each node"
        remedy = "change them, or use resource_pool.tensor_parallel_spans_nodes=true"
        yield Problem(f"resource_pool.{pool}", rule, config.resource_pool[pool], remedy)


def _check_split(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of an actor's pool that is split into training and generating devices.

    Without a split, a rollout size other than the actor's is a problem.
    """
    actor, pool = config.actor_rollout, config.placement[Role.ACTOR_ROLLOUT]
    train, infer = actor.num_gpus_for_train, actor.num_gpus_for_infer
    if train is None or infer is None:  # one without the other is refused by ActorConfig
        for key, size, actors, actors_size in (
            (ROLLOUT_TP, config.rollout_tp, ACTOR_TP, actor.tensor_model_parallel_size),
            (ROLLOUT_EP, config.rollout_ep, ACTOR_EP, actor.expert_model_parallel_size),
        ):
            if size != actors_size:
                rule = f"must be {ref(actors)}={actors_size} on the actor's devices"
                remedy = f"remove it, or give the rollout devices by {ref(TRAIN)} and {ref(INFER)}"
                yield Problem(key, rule, size, remedy)
        return
    size, key = sum(config.resource_pool.get(pool, [train + infer])), ref(f"resource_pool.{pool}")
    if size != train + infer:
        other = f"{ref(INFER)}={size - train}, or " if size > train else ""
        rule = f"and {ref(INFER)}={infer} must add up to {key}={size}"
        yield Problem(TRAIN, rule, train, f"use {other}{key}={train + infer}")
    for role in (role for role in config.roles_of(pool) if role is not Role.ACTOR_ROLLOUT):
        # The ranks of a disaggregated pool form two process groups, which fit no other role.
        rule = f"must be another pool, as {ref(INFER)} splits this one"
        yield Problem(f"placement.{role.value}", rule, pool, f"add resource_pool.{role.value}")
    yield from _check_generating(config, train, infer)


def _check_generating(config: RunConfig, train: int, infer: int) -> Iterator[Problem]:
    """Yield a problem unless the ranks that only generate form whole TP and expert groups."""
    actor, tp, ep = config.actor_rollout, config.rollout_tp, config.rollout_ep
    if infer % tp and config.rollout.tensor_model_parallel_size is None:
        rule = f"must be a multiple of {ref(ACTOR_TP)}={tp}"
        yield Problem(
            INFER, rule, infer, f"{use(multiples_around(infer, tp))}, or give {ref(ROLLOUT_TP)}"
        )
        return
    yield from divides(ROLLOUT_TP, tp, f"{ref(INFER)}={infer}", infer)
    if infer % tp:
        return
    pool = config.resource_pool.get(config.placement[Role.ACTOR_ROLLOUT], [])
    for processes in (n for n in count_per_node(pool, train, infer) if n % tp):
        rule = f"{processes} processes on a node must be a multiple of the rollout's TP {tp}"
        yield Problem(
            INFER, rule, infer, f"{use(multiples_around(processes, tp))} on each node", colon=True
        )
    if ep > 1 and actor.architecture.num_experts is None:
        yield Problem(ROLLOUT_EP, f"needs experts, model.{actor.model} is dense", ep, "remove it")
    elif ep > 1:
        yield from _check_experts(ROLLOUT_EP, ep, actor, infer // tp)


def _check_experts(key: str, ep: int, section: RoleConfig, dp: int | None) -> Iterator[Problem]:
    # dp None: the number of processes does not allow one.
    experts = section.architecture.num_experts or 1
    remedy = use(neighbours(ep, divisors(gcd(experts, dp or experts))))
    if experts % ep:
        number = ref(f"model.{section.model}.num_experts")
        yield Problem(key, f"must divide {number}={experts}", ep, remedy)
    if dp is not None and dp % ep:
        yield Problem(key, f"must divide the data-parallel size {dp}", ep, remedy)
