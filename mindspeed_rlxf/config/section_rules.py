"""Rules between sections and about this host; `Section._broken_rules` has those within a section.

Only processes on this host are checked here. In a joined Ray cluster the runtime counts devices
later and compares each node's packages.
"""

import os
from collections.abc import Iterator
from math import gcd, lcm, prod

from packaging.version import Version

from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.agent_rules import check_agents
from mindspeed_rlxf.config.architecture import SHARED_GROUPS_SINCE, find_uneven
from mindspeed_rlxf.config.enums import (
    DeviceKind,
    KlPenalty,
    LossNormalizer,
    RewardKind,
    Role,
    Stage,
)
from mindspeed_rlxf.config.lora import LORA_RANKS
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
from mindspeed_rlxf.config.schema import LearningConfig, RoleConfig, RunConfig
from mindspeed_rlxf.config.staleness_rules import check_staleness

GIB = 1024**3
PROCESS_BYTES = GIB // 2
"""One worker process's memory before its model: interpreter, torch, Megatron."""

TITLES = {
    Role.ACTOR_ROLLOUT: "the actor",
    Role.REF: "the reference",
    Role.CRITIC: "the critic",
    Role.REWARD: "the reward model",
}
MINI_BATCHES = {Role.ACTOR_ROLLOUT: "ppo_mini_batch_size", Role.CRITIC: "critic_mini_batch_size"}
BATCH, SAMPLES = "training.global_batch_size", "actor_rollout.n_samples_per_prompt"
ESTIMATOR, STAGE = "algorithm.adv_estimator", "training.stage"
MAX_NEW = "actor_rollout.max_new_tokens"
PENALTY, KL_IN = "algorithm.kl_penalty", "algorithm.kl_in"
TRAIN, INFER = "actor_rollout.num_gpus_for_train", "actor_rollout.num_gpus_for_infer"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
ACTOR_TP = "actor_rollout.tensor_model_parallel_size"
ROLLOUT_EP = "rollout.expert_model_parallel_size"
ACTOR_EP = "actor_rollout.expert_model_parallel_size"


def check_sections(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each broken rule between sections. Does not look at the host."""
    sizes = [*_check_pools(config)] or [*_check_replicas(config)]
    yield from sizes
    prompt, response = config.actor_rollout.max_prompt_length, config.actor_rollout.max_new_tokens
    both = f"{ref('actor_rollout.max_prompt_length')}={prompt} + {ref(MAX_NEW)}={response}"
    yield from at_least("training.seq_length", config.training.seq_length, both, prompt + response)
    if config.validation.reward is not RewardKind.RULE and config.reward.kind is RewardKind.RULE:
        rule, value = f"needs {ref('reward.kind')}=model", config.validation.reward
        yield Problem("validation.reward", rule, value, "use rule")
    yield from _check_stage(config)
    yield from _check_split(config)
    yield from _check_backends(config)
    yield from check_staleness(config)
    yield from check_agents(config)
    if not sizes:
        yield from _check_nodes_of_replicas(config)
    if config.runs_vllm and not sizes:
        yield from _check_vllm(config)
    for role in config.roles:
        if config.role(role).architecture is not None:  # the reward may be a rule
            yield from _check_model(config, role, not sizes)
    if not sizes:
        yield from _check_batches(config)


def _check_pools(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each role on an unknown pool, and each pool without a role."""
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
    """Yield a problem for each role whose processes do not form whole replicas."""
    for role in config.roles:
        section, size = config.role(role), sum(config.processes_of(role))
        tp, pp = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
        cp = section.context_parallel_size
        if size % (unit := tp * cp * pp):
            split = role is Role.ACTOR_ROLLOUT and config.parts
            key = TRAIN if split else f"resource_pool.{config.placement[role]}"
            sizes = f"TP {tp}" + (f" x CP {cp}" if cp > 1 else "") + f" x PP {pp}"
            rule = f"must be a multiple of {sizes} = {unit} of {TITLES[role]}"
            yield Problem(key, rule, size, use(multiples_around(size, unit)))


def _check_model(config: RunConfig, role: Role, whole: bool) -> Iterator[Problem]:
    """Yield problems with a role's model: its weights, lengths and parallel sizes.

    Args:
        config: The run's configuration.
        role: A role with a model.
        whole: Whether every role's processes form whole replicas.
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
        dp = config.layout(role).dp * section.context_parallel_size if whole else None
        yield from _check_experts(f"{role.value}.expert_model_parallel_size", ep, section, dp)
    if role is Role.ACTOR_ROLLOUT and config.rollout_tp != tp:
        a = section.architecture
        yield from find_uneven(ROLLOUT_TP, config.rollout_tp, a, section.model, f"{role.value}.")
    uneven = whole and any(processes % tp for processes in config.processes_of(role))
    if uneven and not config.pool_settings.tensor_parallel_spans_nodes:
        rule = f"must be multiples of {role.value}'s TP {tp}, one for each node"
        remedy = "change them, or use resource_pool.tensor_parallel_spans_nodes=true"
        yield Problem(f"resource_pool.{pool}", rule, config.resource_pool[pool], remedy)


def _check_backends(config: RunConfig) -> Iterator[Problem]:
    """Yield problems with training engines: one per process, and the reference's is the actor's."""
    roles = [role for role in config.roles if config.role(role).architecture is not None]
    first: dict[str, Role] = {}
    local = config.runtime.kind == "local"
    for role in roles:
        backend, pool = config.role(role).backend, config.placement[role]
        other = first.setdefault("" if local else pool, role)
        if (wanted := config.role(other).backend) != backend:
            where = f"in one process with {ref('runtime.kind')}=local" if local else f"on {pool}"
            rule = f"must be {ref(f'{other.value}.backend')}={wanted}, as both are {where}"
            remedy = f"use {wanted}, or another pool (placement.{role.value})"
            yield Problem(f"{role.value}.backend", rule, backend, remedy)
    actor = config.actor_rollout
    if Role.REF in roles and config.ref.backend != actor.backend:
        rule = f"must be {ref('actor_rollout.backend')}={actor.backend}"
        yield Problem("ref.backend", rule, config.ref.backend, f"use {actor.backend}")
    if actor.backend == "fsdp" and config.rollout.engine == "native":
        rule = f"computes with Megatron, and {ref('actor_rollout.backend')} is fsdp"
        yield Problem("rollout.engine", rule, "native", "use transformers")
    elif actor.backend == "fsdp" and config.parts:
        rule = f"needs {ref('actor_rollout.backend')}=megatron"
        yield Problem(INFER, rule, config.parts[1], "remove it: all ranks train and generate")


def _check_split(config: RunConfig) -> Iterator[Problem]:
    """Yield problems with disaggregated placement, which splits the actor's pool.

    Colocated, the rollout must have the actor's parallel sizes.
    """
    actor, pool = config.actor_rollout, config.placement[Role.ACTOR_ROLLOUT]
    train, infer = actor.num_gpus_for_train, actor.num_gpus_for_infer
    if train is None or infer is None:  # one without the other is refused by ActorConfig
        for key, size, actors, actors_size in (
            (ROLLOUT_TP, config.rollout_tp, ACTOR_TP, actor.tensor_model_parallel_size),
            (ROLLOUT_EP, config.rollout_ep, ACTOR_EP, actor.expert_model_parallel_size),
        ):
            if config.runs_vllm:  # its servers have weights of their own
                continue
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
    own = {Role.ACTOR_ROLLOUT, *([Role.REF] if config.shares_reference else [])}
    for role in (role for role in config.roles_of(pool) if role not in own):
        # The ranks of a disaggregated pool form two process groups, which fit no other role.
        rule = f"must be another pool, as {ref(INFER)} splits this one"
        yield Problem(f"placement.{role.value}", rule, pool, f"add resource_pool.{role.value}")
    tp, ep = config.rollout_tp, config.rollout_ep
    if infer % tp and config.rollout.tensor_model_parallel_size is None:
        rule = f"must be a multiple of {ref(ACTOR_TP)}={tp}"
        remedy = f"{use(multiples_around(infer, tp))}, or give {ref(ROLLOUT_TP)}"
        yield Problem(INFER, rule, infer, remedy)
    elif infer % tp:
        yield from divides(ROLLOUT_TP, tp, f"{ref(INFER)}={infer}", infer)
    elif actor.lora.rank and not config.runs_vllm and tp > actor.architecture.kv_heads:
        groups = actor.architecture.kv_heads
        rule = f"must be at most num_query_groups={groups} with {ref('actor_rollout.lora.rank')}"
        yield Problem(ROLLOUT_TP, rule, tp, f"use {groups} or less")
    elif ep > 1 and actor.architecture.num_experts is None:
        yield Problem(ROLLOUT_EP, f"needs experts, model.{actor.model} is dense", ep, "remove it")
    elif ep > 1:
        yield from _check_experts(ROLLOUT_EP, ep, actor, infer // tp)


def _check_nodes_of_replicas(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if a replica that generates has ranks on two nodes.

    A vLLM server never does: its processes are all on its leader's node.
    """
    tp, processes = config.rollout_tp, config.resource_pool[config.placement[Role.ACTOR_ROLLOUT]]
    spans_nodes = config.pool_settings.tensor_parallel_spans_nodes and not config.runs_vllm
    as_in_training = not config.parts and not config.runs_vllm  # see `_check_model`
    if config.parts:
        processes = count_per_node(processes, *config.parts)
    are_whole = sum(processes) % tp == 0  # other rules say so if not
    if spans_nodes or as_in_training or not are_whole:
        return
    if all(count % tp == 0 for count in processes):
        return
    key = "rollout.vllm.tensor_parallel_size" if config.runs_vllm else ROLLOUT_TP
    counts = ", ".join(map(str, processes))
    whose = "a server is on one node" if config.runs_vllm else "a replica is on one node"
    rule = f"must divide the numbers of generating processes on each node ({counts}): {whose}"
    remedy = use(neighbours(tp, divisors(gcd(*processes))))
    if not config.runs_vllm:
        remedy += ", or resource_pool.tensor_parallel_spans_nodes=true"
    yield Problem(key, rule, tp, remedy)


def _check_vllm(config: RunConfig) -> Iterator[Problem]:
    """Yield problems with vLLM servers: their devices, and log-probs they cannot report."""
    actor, tp = config.actor_rollout, config.rollout_tp
    devices = config.layout(Role.ACTOR_ROLLOUT).world_size
    if not config.parts and devices % tp:
        rule = f"must divide the actor's {devices} devices"
        yield Problem("rollout.vllm.tensor_parallel_size", rule, tp, use(divisors(devices)))
    if actor.lora.rank > LORA_RANKS[-1]:
        rule = f"must be at most {LORA_RANKS[-1]} with {ref('rollout.engine')}=vllm"
        yield Problem("actor_rollout.lora.rank", rule, actor.lora.rank, use([LORA_RANKS[-1]]))
    filters = actor.top_k or actor.top_p < 1 or actor.min_new_tokens
    if actor.logit_temperature != 1 and (filters or actor.fixed_responses):
        rule = f"must be 1 with {ref('rollout.engine')}=vllm where top_k, top_p, min_new_tokens or "
        rule += "fixed_responses is set: its log-probs would be of other distributions"
        yield Problem("actor_rollout.temperature", rule, actor.temperature, "use 1")


def _check_experts(key: str, ep: int, section: RoleConfig, dp: int | None) -> Iterator[Problem]:
    # dp: data-parallel x context-parallel ranks; None = the number of processes allows none.
    experts = section.architecture.num_experts or 1
    remedy = use(neighbours(ep, divisors(gcd(experts, dp or experts))))
    if experts % ep:
        number = ref(f"model.{section.model}.num_experts")
        yield Problem(key, f"must divide {number}={experts}", ep, remedy)
    if dp is not None and dp % ep:
        yield Problem(key, f"must divide the data-parallel size {dp}", ep, remedy)


def _check_batches(config: RunConfig) -> Iterator[Problem]:
    """Yield problems with batch sizes. Each role's processes must form whole replicas."""
    prompts = config.training.global_batch_size
    per_prompt = config.actor_rollout.n_samples_per_prompt
    times = f"x {ref(SAMPLES)}={per_prompt} " if per_prompt > 1 else ""
    steps: dict[str, int] = {}  # rule -> number that divides a legal number of prompts
    for role in config.roles:
        factors = _factors(config, role)
        if role is Role.ACTOR_ROLLOUT and config.compares_pairs:
            factors["2 responses of a pair"] = 2
        unit = prod(factors.values())
        rule = f"{times}must be a multiple of {TITLES[role]}'s {' x '.join(factors)}"
        steps[rule] = unit // gcd(unit, per_prompt)
    if config.samples_together > 1:
        compares = Role.ACTOR_ROLLOUT if config.critic is None else Role.CRITIC
        dp = config.layout(compares).dp
        rule = f"must be a multiple of {TITLES[compares]}'s data-parallel size {dp}"
        steps[f"{rule}, whose ranks compare responses"] = dp
    if config.algorithm.estimator.reads_greedy:
        dp = config.layout(Role.REWARD).dp
        rule = f"must be a multiple of the reward's data-parallel size {dp}"
        steps[f"{rule}, which scores greedy responses too"] = dp
    if broken := [rule for rule, size in steps.items() if prompts % size]:
        remedy = use(multiples_around(prompts, lcm(*steps.values())))
        yield Problem(BATCH, max(broken, key=steps.__getitem__), prompts, remedy)
        return  # a mini-batch is judged by a legal batch
    for role in (role for role in MINI_BATCHES if role in config.roles):
        yield from _check_mini_batch(config, role)


def _factors(config: RunConfig, role: Role) -> dict[str, int]:
    # Only trained roles have to fill a virtual pipeline; a frozen role pads it.
    section, dp = config.role(role), config.layout(role).dp
    found = {f"data-parallel size {dp}": dp}
    if isinstance(section, LearningConfig) and (stages := section.micro_batch_multiple) > 1:
        found[f"{stages} stages of its virtual pipeline"] = stages
    return found


def _check_mini_batch(config: RunConfig, role: Role) -> Iterator[Problem]:
    """Yield at most one problem with the actor's or critic's mini-batches."""
    section, factors = config.role(role), _factors(config, role)
    key, micro_key = f"{role.value}.{MINI_BATCHES[role]}", f"{role.value}.micro_batch_size"
    size: int = getattr(section, MINI_BATCHES[role])
    by_tokens = section.max_tokens_per_micro_batch is not None
    micro, width = 1 if by_tokens else section.micro_batch_size, prod(factors.values())
    together = 2 if role is Role.ACTOR_ROLLOUT and config.compares_pairs else 1
    if micro % together:  # `_check_pairs` reports it
        return
    samples = config.samples_per_iteration
    sizes = [n for n in divisors(samples) if n % (width * together) == 0]
    sizes_for_micro = [n for n in sizes if n % (width * micro) == 0]
    # The micro-batch size does not change the result of a run, so it is changed first.
    nearest_size = min(sizes, key=lambda n: abs(n - size))
    micros = [n for n in divisors(nearest_size // width) if n % together == 0]
    nearest_micro = min(micros, key=lambda n: abs(n - micro))
    if size in sizes:
        remedy = f"use {ref(micro_key)}={nearest_micro}"
    elif sizes_for_micro:
        remedy = use(neighbours(size, sizes_for_micro))
    else:
        remedy = f"use {nearest_size} with {ref(micro_key)}={nearest_micro}"
    if samples % size:
        names = f"{ref(BATCH)} x {ref(SAMPLES)}"
        yield Problem(key, f"must divide the {samples} samples ({names})", size, remedy)
    elif size % (width * micro):
        names = " x ".join((*factors, *([] if by_tokens else [f"{ref(micro_key)}={micro}"])))
        yield Problem(key, f"must be a multiple of {width * micro} ({names})", size, remedy)


def _check_stage(config: RunConfig) -> Iterator[Problem]:
    """Yield broken rules between stage, estimator, rewards and samples."""
    algorithm, actor = config.algorithm, config.actor_rollout
    yield from _check_pairs(config) if config.compares_pairs else _check_estimator(config)
    theirs, mine = config.ref.architecture.vocab_size, actor.architecture.vocab_size
    if config.shares_reference:
        yield from _check_shared_reference(config)
    elif Role.REF in config.roles and mine != theirs:
        rule = f"vocab_size={theirs} must be the actor's {mine}, whose tokens it scores"
        yield Problem("ref", rule, remedy="use the folder and model of the actor", colon=True)
    iterations = config.training.train_iters
    limit = f"{iterations - 1}, as the actor learns after it ({ref('training.train_iters')})"
    yield from at_most("critic.warmup_iters", config.warmup_iters, limit, iterations - 1)
    buffer, longest = algorithm.overlong_buffer_len, actor.max_new_tokens
    limit = f"{ref(MAX_NEW)}={longest}"
    yield from at_most("algorithm.overlong_buffer_len", buffer, limit, longest)
    rules, weights = algorithm.verifier_function, algorithm.verifier_weight
    if config.reward.verifier and weights and len(weights) != len(rules or (None,)):
        rule = f"must have as many as {ref('algorithm.verifier_function')}"
        yield Problem("algorithm.verifier_weight", rule, list(weights), "add or remove weights")


def _check_shared_reference(config: RunConfig) -> Iterator[Problem]:
    """Yield problems with a reference that is the actor without its adapters."""
    values = {
        "ref.load": (config.ref.load, config.actor_rollout.load),
        "placement.ref": (
            config.placement[Role.REF],
            config.placement[Role.ACTOR_ROLLOUT],
        ),
    }
    for key, (theirs, mine) in values.items():
        if theirs != mine:
            rule = f"must be the actor's {mine} with {ref('actor_rollout.lora.rank')}"
            yield Problem(
                key, f"{rule}: the reference is the actor without adapters", theirs, "remove it"
            )


def _check_pairs(config: RunConfig) -> Iterator[Problem]:
    """Yield broken rules in online DPO, which prefers one response over another."""
    actor, dpo = config.actor_rollout, f"{ref(STAGE)}=ray_online_dpo"
    samples, limit, micro = (
        actor.n_samples_per_prompt, actor.max_tokens_per_micro_batch, actor.micro_batch_size
    )  # fmt: skip
    if samples != 2:
        yield Problem(SAMPLES, f"must be 2 with {dpo}", samples, "use 2")
    if limit is not None:
        key = "actor_rollout.max_tokens_per_micro_batch"
        rule = f"may separate the responses of a pair with {dpo}"
        yield Problem(key, rule, limit, "use null, and micro_batch_size")
    elif micro % 2:
        rule = "must be even, to hold whole pairs"
        yield Problem("actor_rollout.micro_batch_size", rule, micro, f"use {max(2, micro - 1)}")


def _check_estimator(config: RunConfig) -> Iterator[Problem]:
    """Yield broken rules about the estimator, its stage and its KL penalty."""
    algorithm, stage = config.algorithm, config.training.stage
    name, needs_critic = algorithm.adv_estimator, algorithm.estimator.needs_critic
    if (stage is Stage.RAY_PPO) != needs_critic:
        needs, has = ("a critic", "has none") if needs_critic else ("no critic", "trains one")
        usual, other = ("grpo", "ray_ppo") if needs_critic else ("gae", "ray_grpo")
        rule = f"needs {needs}, and {ref(STAGE)}={stage.value} {has}"
        yield Problem(ESTIMATOR, rule, name, f"use {usual}, or {ref(STAGE)}={other}")
    samples = config.actor_rollout.n_samples_per_prompt
    if algorithm.estimator.compares_group and samples == 1:
        cause = f"{ref(ESTIMATOR)}={name}, which compares the responses to a prompt"
        yield Problem(SAMPLES, f"must be 2 or more with {cause}", samples, "use 4 or 8")
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
    for key in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ):
        mine, theirs = getattr(config.actor_rollout, key), getattr(config.role(Role.REF), key)
        if mine != theirs:
            rule = f"must be the actor's {mine} with {ref(PENALTY)}=full"
            yield Problem(f"ref.{key}", rule, theirs, f"use {mine}, or low_var_kl")


def check_host(config: RunConfig) -> list[Problem]:
    """Return the problems with running on this host: `check_launch`, `check_devices`."""
    return [*check_launch(config), *check_devices(config)]


def check_launch(config: RunConfig) -> list[Problem]:
    """Return problems with the number of processes, the Ray resource and the kind of device."""
    from mindspeed_rlxf import device

    problems: list[Problem] = []
    kind = device.resolve_kind(config.device.kind)
    has_experts = config.actor_rollout.architecture.num_experts is not None
    if config.runs_vllm and has_experts and kind is DeviceKind.NPU:
        rule = "has not run with experts on NPU, whose weights vllm-ascend 0.23 transposes as it "
        rule += "wakes"
        problems.append(Problem("rollout.engine", rule, "vllm", "use native"))
    if config.runtime.kind == "local":
        world = int(os.environ.get("WORLD_SIZE", "1"))
        rule = f"must equal the {world} processes of this run with {ref('runtime.kind')}=local"
        for pool, nodes in config.resource_pool.items():
            size = sum(nodes)
            if size != world:
                remedy = f"use {world}, or torchrun --nproc-per-node {size}"
                problems.append(Problem(f"resource_pool.{pool}", rule, size, remedy))
        return problems
    name = config.device.resource_name
    own = device.facts(kind).ray_resource
    if kind is not DeviceKind.CPU and name not in (None, own):
        rule = f"must be {own} with {ref('device.kind')}={kind.value}"
        problems.append(Problem("device.resource_name", rule, name, "remove it"))
    return problems


def check_devices(config: RunConfig) -> list[Problem]:
    """Return what this host lacks: a newer megatron-core, CANN, devices, or memory."""
    from mindspeed_rlxf import device

    problems = [*_check_shared_groups(config)]
    if config.joins_cluster:
        return problems  # the runtime counts devices of other hosts
    sizes = {pool: sum(nodes) for pool, nodes in config.resource_pool.items()}
    is_local = config.runtime.kind == "local"
    num_needed = max(sizes.values()) if is_local else sum(sizes.values())
    kind = device.resolve_kind(config.device.kind)
    things = f"{kind.value} devices"
    try:
        num_present = device.device_count(kind)
    except ValueError as error:
        return [*problems, Problem("", str(error))]
    if kind is DeviceKind.CPU:
        things = "processes of 0.5 GiB"
        num_present = device.host_memory() // PROCESS_BYTES
    if num_present is not None and num_needed > num_present:
        pools = ", ".join(f"{pool}={size}" for pool, size in sizes.items())
        rule = f"({pools}) needs {num_needed} {things} and this host has {num_present}"
        remedy = "use fewer, put roles on one pool, or join a cluster with runtime.address"
        problems.append(Problem("resource_pool", rule, remedy=remedy))
    return problems


def _check_shared_groups(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each TP size above its model's key-value groups."""
    sizes = [
        (f"{role.value}.tensor_model_parallel_size", section.tensor_model_parallel_size, section)
        for role in config.roles
        if (section := config.role(role)).architecture is not None
    ]
    if config.rollout_tp != config.actor_rollout.tensor_model_parallel_size:
        sizes.append((ROLLOUT_TP, config.rollout_tp, config.actor_rollout))
    shared = [(key, tp, s) for key, tp, s in sizes if tp > s.architecture.kv_heads]
    found = packages.version(packages.MEGATRON) if shared else None
    if found is None or Version(found).release >= SHARED_GROUPS_SINCE:
        return
    since = ".".join(map(str, SHARED_GROUPS_SINCE))
    for key, tp, section in shared:
        groups, name = section.architecture.kv_heads, f"model.{section.model}.num_query_groups"
        rule = f"must be at most {ref(name)}={groups} with megatron-core {found}"
        yield Problem(key, rule, tp, f"use {groups} or less, or megatron-core {since}")
