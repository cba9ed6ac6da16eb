"""Rules between keys of several sections. `Section.broken_rules` has those within a section."""

from collections.abc import Iterator
from math import gcd

from mindspeed_rlxf.config.architecture import find_uneven
from mindspeed_rlxf.config.enums import RewardKind, Role
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
from mindspeed_rlxf.config.rules.batch_sizes import (
    TITLES,
    check_batches,
    check_loss_normalizer,
    check_token_budget,
)
from mindspeed_rlxf.config.rules.stages import check_stage
from mindspeed_rlxf.config.schema import RunConfig

TRAIN, INFER = "actor_rollout.num_gpus_for_train", "actor_rollout.num_gpus_for_infer"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
ACTOR_TP = "actor_rollout.tensor_model_parallel_size"
ROLLOUT_EP = "rollout.expert_model_parallel_size"
ACTOR_EP = "actor_rollout.expert_model_parallel_size"


def check_sections(config: RunConfig) -> list[Problem]:
    """Return a problem for each broken rule between sections. Does not look at the host."""
    problems = [*_check_pools(config), *_check_lengths(config), *_check_validation(config)]
    problems += [*check_stage(config), *check_split(config)]
    for role in config.roles:
        if config.role(role).architecture is not None:  # the reward may be a rule
            problems += _check_model(config, role)
        problems += _check_parallel(config, role)
    problems += check_loss_normalizer(config)
    # Without whole replicas of every role there is no data-parallel size to check batches by.
    if not any(_check_pools(config)) and not any(
        _check_replicas(config, role) for role in config.roles
    ):
        problems += check_batches(config)
    return problems


def _check_pools(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each role on a pool that does not exist, and each pool without a role."""
    known = ", ".join(config.resource_pool)
    for role, pool in config.placement.items():
        if pool not in config.resource_pool:
            key = f"placement.{role.value}"
            guess = closest(pool, config.resource_pool) or next(iter(config.resource_pool), "")
            use = f"use {ref(key)}={guess}, or add" if guess else "add"
            yield Problem(
                key,
                f"must name a pool of resource_pool ({known or 'it has none'})",
                pool,
                f"{use} resource_pool.{pool}",
            )
    for pool in config.resource_pool.keys() - config.placement.values():
        yield Problem(
            f"resource_pool.{pool}", "must hold a role", remedy="remove it, or place a role on it"
        )


def _check_replicas(config: RunConfig, role: Role) -> Problem | None:
    pool, section = config.pool_of(role), config.role(role)
    tp, pp = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    size = sum(config.processes_of(role)) if pool in config.resource_pool else tp * pp
    if size % (tp * pp) == 0:
        return None
    return Problem(
        TRAIN if role is Role.ACTOR_ROLLOUT and config.parts else f"resource_pool.{pool}",
        f"must be a multiple of TP {tp} x PP {pp} = {tp * pp} of {TITLES[role]} ({role.value})",
        size,
        use(multiples_around(size, tp * pp)),
    )


def _check_model(config: RunConfig, role: Role) -> Iterator[Problem]:
    """Yield a problem if a role's `load` is not set; call it only for a role with a model."""
    section = config.role(role)
    if section.load is None:
        kind = f" with {ref('reward.kind')}={config.reward.kind.value}"
        rule = "is required" + (kind if role is Role.REWARD else "")
        yield Problem(f"{role.value}.load", rule, remedy="give the folder of its weights")
    total, longest = config.training.seq_length, section.architecture.max_position_embeddings
    limit = f"{ref(f'model.{section.model}.max_position_embeddings')}={longest} of {TITLES[role]}"
    yield from at_most("training.seq_length", total, limit, longest)


def _check_parallel(config: RunConfig, role: Role) -> Iterator[Problem]:
    """Yield problems of a role's parallel sizes; without a model only of its processes."""
    misplaced, section, pool = (
        _check_replicas(config, role),
        config.role(role),
        config.pool_of(role),
    )
    if misplaced:
        yield misplaced
    if section.architecture is None:
        return
    tp, known = section.tensor_model_parallel_size, pool in config.resource_pool
    if section.architecture.num_experts is not None:
        key, ep = f"{role.value}.expert_model_parallel_size", section.expert_model_parallel_size
        dp = config.layout(role).dp if known and not misplaced else None
        yield from find_uneven_experts(key, ep, section, dp)
    if role is Role.ACTOR_ROLLOUT and config.rollout_tp != tp:
        a = section.architecture
        yield from find_uneven(ROLLOUT_TP, config.rollout_tp, a, section.model, f"{role.value}.")
    yield from check_token_budget(config, role)
    if not known or misplaced or config.pool_settings.tensor_parallel_spans_nodes:
        return
    for processes in (count for count in config.processes_of(role) if count % tp):
        yield Problem(
            f"resource_pool.{pool}",
            f"{processes} processes on a node must be a multiple of the tensor-parallel size "
            f"{tp} of {role.value}, which may not span nodes",
            remedy=f"{use(multiples_around(processes, tp))}, or allow it with "
            "resource_pool.tensor_parallel_spans_nodes=true",
            colon=True,
        )


def _check_lengths(config: RunConfig) -> Iterator[Problem]:
    keys = ("max_prompt_length", "max_new_tokens")
    parts = {key: getattr(config.actor_rollout, key) for key in keys}
    both = " + ".join(f"{ref(f'actor_rollout.{key}')}={size}" for key, size in parts.items())
    total = config.training.seq_length
    yield from at_least("training.seq_length", total, both, sum(parts.values()))


def _check_validation(config: RunConfig) -> Iterator[Problem]:
    validation = config.validation
    needs = {"interval": (validation.interval, "0"), "only": (validation.only, "false")}
    for name, (value, without) in needs.items():
        if value and not config.has_validation_prompts:
            yield Problem(
                f"validation.{name}",
                f"needs {ref('data.val_files')} or {ref('data.val_data_path')}",
                value,
                f"name a file, or use {ref(f'validation.{name}')}={without}",
            )
    by_rule = config.reward.kind is RewardKind.RULE
    if validation.reward not in (None, RewardKind.RULE) and by_rule:
        yield Problem(
            "validation.reward",
            f"needs {ref('reward.kind')}=model, a rule has no model",
            validation.reward,
            "use rule",
        )


def check_split(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of an actor's pool that is split into training and generating devices.

    Without a split, a rollout size other than the actor's is a problem.
    """
    train, infer = config.actor_rollout.num_gpus_for_train, config.actor_rollout.num_gpus_for_infer
    if train is None and infer is None:
        actor = config.actor_rollout
        for key, size, actors, actors_size in (
            (ROLLOUT_TP, config.rollout_tp, ACTOR_TP, actor.tensor_model_parallel_size),
            (ROLLOUT_EP, config.rollout_ep, ACTOR_EP, actor.expert_model_parallel_size),
        ):
            if size != actors_size:
                yield Problem(
                    key,
                    f"must be {ref(actors)}={actors_size} where the rollout shares the actor's "
                    "devices",
                    size,
                    "remove it, or give the rollout devices of its own by "
                    f"{ref(TRAIN)} and {ref(INFER)}",
                )
    if train is None or infer is None:  # one without the other is refused by ActorConfig
        return
    pool = config.pool_of(Role.ACTOR_ROLLOUT)
    size, key = sum(config.resource_pool.get(pool, [train + infer])), ref(f"resource_pool.{pool}")
    if size != train + infer:
        other = f"{ref(INFER)}={size - train}, or " if size > train else ""
        yield Problem(
            TRAIN,
            f"and {ref(INFER)}={infer} must add up to {key}={size}",
            train,
            f"use {other}{key}={train + infer}",
        )
    for role in (role for role in config.roles_of(pool) if role is not Role.ACTOR_ROLLOUT):
        # The ranks of a split pool form two process groups, which fit no other role.
        yield Problem(
            f"placement.{role.value}",
            f"must be another pool, {ref(INFER)} splits this one between training and generation",
            pool,
            f"add resource_pool.{role.value} and use it, or remove {ref(TRAIN)} and {ref(INFER)}",
        )
    yield from _check_generating(config, train, infer)
    if config.runtime.kind == "local":
        yield Problem(
            "runtime.kind",
            f"runs every role on the same processes and cannot give {infer} of them to the "
            f"rollout ({ref(INFER)})",
            "local",
            f"use {ref('runtime.kind')}=ray, or remove {ref(TRAIN)} and {ref(INFER)}",
        )


def _check_generating(config: RunConfig, train: int, infer: int) -> Iterator[Problem]:
    """Yield a problem unless the generating ranks form whole TP groups on each node."""
    tp, pool = config.rollout_tp, config.pool_of(Role.ACTOR_ROLLOUT)
    if infer % tp and config.rollout.tensor_model_parallel_size is None:
        yield Problem(
            INFER,
            f"must be a multiple of {ref(ACTOR_TP)}={tp}, which the rollout has too",
            infer,
            f"{use(multiples_around(infer, tp))}, or give {ref(ROLLOUT_TP)}",
        )
    elif infer % tp:
        yield from divides(ROLLOUT_TP, tp, f"{ref(INFER)}={infer}", infer)
    else:
        for processes in count_per_node(config.resource_pool.get(pool, []), train, infer):
            if processes % tp:
                yield Problem(
                    INFER,
                    f"{processes} processes on a node must be a multiple of the rollout's "
                    f"tensor-parallel size {tp}, which may not span nodes",
                    infer,
                    f"{use(multiples_around(processes, tp))} on each node",
                    colon=True,
                )
        yield from _check_rollout_experts(config, infer // tp)


def _check_rollout_experts(config: RunConfig, dp: int) -> Iterator[Problem]:
    """Yield problems of the expert-parallel size of ranks that only generate, if it is above 1."""
    actor, ep = config.actor_rollout, config.rollout_ep
    if ep == 1 or actor.architecture is None:
        return
    if actor.architecture.num_experts is None:
        yield Problem(ROLLOUT_EP, f"needs experts, model.{actor.model} is dense", ep, "remove it")
        return
    yield from find_uneven_experts(ROLLOUT_EP, ep, actor, dp)


def find_uneven_experts(
    key: str, ep: int, section: RoleConfig, dp: int | None
) -> Iterator[Problem]:
    """Yield a problem if `ep` does not divide the experts, another if it does not divide `dp`.

    key:     of the expert-parallel size `ep` in the YAML
    section: of a role whose model has experts
    dp:      data-parallel size; None = not checked, the number of processes does not allow one
    """
    experts = section.architecture.num_experts
    assert experts is not None, "checked by the caller"
    remedy = use(neighbours(ep, divisors(gcd(experts, dp or experts))))
    if experts % ep:
        number = ref(f"model.{section.model}.num_experts")
        yield Problem(key, f"must divide {number}={experts}", ep, remedy)
    if dp is not None and dp % ep:
        yield Problem(key, f"must divide the data-parallel size {dp}", ep, remedy)
