"""Rules between sections; `Section._broken_rules` has those within one, `host_rules` the host's."""

from collections.abc import Iterator
from math import gcd

from mindspeed_rlxf.config.agent_rules import check_agents
from mindspeed_rlxf.config.architecture import find_uneven
from mindspeed_rlxf.config.batch_rules import MINI_BATCHES, SAMPLES, TITLES, check_batches
from mindspeed_rlxf.config.enums import (
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
from mindspeed_rlxf.config.schema import RoleConfig, RunConfig
from mindspeed_rlxf.config.staleness_rules import check_staleness

ESTIMATOR = "algorithm.adv_estimator"
STAGE = "training.stage"
MAX_NEW = "actor_rollout.max_new_tokens"
PENALTY = "algorithm.kl_penalty"
KL_IN = "algorithm.kl_in"
TRAIN = "actor_rollout.num_gpus_for_train"
INFER = "actor_rollout.num_gpus_for_infer"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
ACTOR_TP = "actor_rollout.tensor_model_parallel_size"
ROLLOUT_EP = "rollout.expert_model_parallel_size"
ACTOR_EP = "actor_rollout.expert_model_parallel_size"


def check_sections(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each broken rule between sections. Does not look at the host."""
    # The later rules divide by the parallel sizes, so they wait until these are legal.
    size_problems = list(_check_pools(config))
    if not size_problems:
        size_problems = list(_check_replicas(config))
    yield from size_problems
    prompt = config.actor_rollout.max_prompt_length
    response = config.actor_rollout.max_new_tokens
    both = f"{ref('actor_rollout.max_prompt_length')}={prompt} + {ref(MAX_NEW)}={response}"
    yield from at_least("training.seq_length", config.training.seq_length, both, prompt + response)
    if config.validation.reward is not RewardKind.RULE and config.reward.kind is RewardKind.RULE:
        rule = f"needs {ref('reward.kind')}=model"
        yield Problem("validation.reward", rule, config.validation.reward, "use rule")
    yield from _check_stage(config)
    yield from _check_split(config)
    yield from _check_backends(config)
    yield from check_staleness(config)
    yield from check_agents(config)
    if not size_problems:
        yield from _check_nodes_of_replicas(config)
    if config.runs_vllm and not size_problems:
        yield from _check_vllm(config)
    for role in config.roles:
        if config.role(role).architecture is not None:  # the reward may be a rule
            yield from _check_model(config, role, forms_replicas=not size_problems)
    if not size_problems:
        yield from check_batches(config)


def _check_pools(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each role on an unknown pool, and each pool without a role."""
    pool_names = ", ".join(config.resource_pool) or "it has none"
    for role, pool in config.placement.items():
        if pool not in config.resource_pool:
            key = f"placement.{role.value}"
            guess = closest(pool, config.resource_pool) or next(iter(config.resource_pool), "")
            remedy = f"use {ref(key)}={guess}, or " if guess else ""
            remedy += f"add resource_pool.{pool}"
            yield Problem(key, f"must name a pool of resource_pool ({pool_names})", pool, remedy)
    for pool in config.resource_pool.keys() - config.placement.values():
        yield Problem(f"resource_pool.{pool}", "must hold a role", remedy="remove it")


def _check_replicas(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each role whose processes do not form whole replicas."""
    for role in config.roles:
        section = config.role(role)
        num_processes = sum(config.processes_of(role))
        tp = section.tensor_model_parallel_size
        cp = section.context_parallel_size
        pp = section.pipeline_model_parallel_size
        replica_size = tp * cp * pp
        if num_processes % replica_size == 0:
            continue
        is_split = role is Role.ACTOR_ROLLOUT and config.train_rollout_split
        key = TRAIN if is_split else f"resource_pool.{config.placement[role]}"
        sizes = f"TP {tp}" + (f" x CP {cp}" if cp > 1 else "") + f" x PP {pp}"
        rule = f"must be a multiple of {sizes} = {replica_size} of {TITLES[role]}"
        yield Problem(key, rule, num_processes, use(multiples_around(num_processes, replica_size)))


def _check_model(config: RunConfig, role: Role, forms_replicas: bool) -> Iterator[Problem]:
    """Yield problems with a role's model: its weights, lengths and parallel sizes.

    Args:
        config: The run's configuration.
        role: A role with a model.
        forms_replicas: Whether every role's processes form whole replicas.
    """
    section = config.role(role)
    pool = config.placement[role]
    if section.load is None:
        yield Problem(f"{role.value}.load", "is required", remedy="give the folder of its weights")
    seq_length = config.training.seq_length
    max_positions = section.architecture.max_position_embeddings
    limit = f"{ref(f'model.{section.model}.max_position_embeddings')}={max_positions}"
    yield from at_most("training.seq_length", seq_length, limit, max_positions)
    if section.max_tokens_per_micro_batch is not None:
        key = f"{role.value}.max_tokens_per_micro_batch"
        longest_sample = f"{ref('training.seq_length')}={seq_length}"
        yield from at_least(key, section.max_tokens_per_micro_batch, longest_sample, seq_length)
        normalizer = config.algorithm.loss_normalizer
        if role in MINI_BATCHES and normalizer is LossNormalizer.MICRO_BATCH_MEAN:
            rule = f"needs micro-batches of one size, which {ref(key)} does not make"
            yield Problem("algorithm.loss_normalizer", rule, normalizer, "use minibatch_tokens")
    tp = section.tensor_model_parallel_size
    if section.architecture.num_experts is not None:
        key = f"{role.value}.expert_model_parallel_size"
        dp = None
        if forms_replicas:
            dp = config.layout(role).dp * section.context_parallel_size
        yield from _check_experts(key, section.expert_model_parallel_size, section, dp)
    if role is Role.ACTOR_ROLLOUT and config.rollout_tp != tp:
        a = section.architecture
        yield from find_uneven(ROLLOUT_TP, config.rollout_tp, a, section.model, f"{role.value}.")
    if not forms_replicas or config.pool_settings.tensor_parallel_spans_nodes:
        return
    # A tensor-parallel group that spans two nodes would communicate over the slow network.
    if any(num_processes % tp for num_processes in config.processes_of(role)):
        rule = f"must be multiples of {role.value}'s TP {tp}, one for each node"
        remedy = "change them, or use resource_pool.tensor_parallel_spans_nodes=true"
        yield Problem(f"resource_pool.{pool}", rule, config.resource_pool[pool], remedy)


def _check_backends(config: RunConfig) -> Iterator[Problem]:
    """Yield problems with training engines: one per process, and the reference's is the actor's."""
    roles = [role for role in config.roles if config.role(role).architecture is not None]
    first_role_of_pool: dict[str, Role] = {}
    is_local = config.runtime.kind == "local"  # all roles are in one process, whatever their pool
    for role in roles:
        pool = config.placement[role]
        first_role = first_role_of_pool.setdefault("" if is_local else pool, role)
        first_backend = config.role(first_role).backend
        backend = config.role(role).backend
        if backend == first_backend:
            continue
        shared = f"in one process with {ref('runtime.kind')}=local" if is_local else f"on {pool}"
        first_key = ref(f"{first_role.value}.backend")
        rule = f"must be {first_key}={first_backend}, as both are {shared}"
        remedy = f"use {first_backend}, or another pool (placement.{role.value})"
        yield Problem(f"{role.value}.backend", rule, backend, remedy)
    actor = config.actor_rollout
    if Role.REF in roles and config.ref.backend != actor.backend:
        rule = f"must be {ref('actor_rollout.backend')}={actor.backend}"
        yield Problem("ref.backend", rule, config.ref.backend, f"use {actor.backend}")
    if actor.backend == "fsdp" and config.rollout.engine == "native":
        rule = f"computes with Megatron, and {ref('actor_rollout.backend')} is fsdp"
        yield Problem("rollout.engine", rule, "native", "use transformers")
    elif actor.backend == "fsdp" and config.train_rollout_split:
        rule = f"needs {ref('actor_rollout.backend')}=megatron"
        remedy = "remove it: all ranks train and generate"
        yield Problem(INFER, rule, config.actor_rollout.num_gpus_for_infer, remedy)


def _check_split(config: RunConfig) -> Iterator[Problem]:
    """Yield problems with disaggregated placement, which splits the actor's pool.

    Colocated, the rollout must have the actor's parallel sizes.
    """
    actor = config.actor_rollout
    pool = config.placement[Role.ACTOR_ROLLOUT]
    train = actor.num_gpus_for_train
    infer = actor.num_gpus_for_infer
    if train is None or infer is None:  # one without the other is refused by ActorConfig
        if not config.runs_vllm:  # whose servers have weights of their own
            yield from _check_colocated_sizes(config)
        return
    pool_key = ref(f"resource_pool.{pool}")
    pool_size = sum(config.resource_pool.get(pool, [train + infer]))
    if pool_size != train + infer:
        remedy = f"{ref(INFER)}={pool_size - train}, or " if pool_size > train else ""
        rule = f"and {ref(INFER)}={infer} must add up to {pool_key}={pool_size}"
        yield Problem(TRAIN, rule, train, f"use {remedy}{pool_key}={train + infer}")
    for role in config.roles_of(pool):
        if role is Role.ACTOR_ROLLOUT or (role is Role.REF and config.shares_reference):
            continue
        # The ranks of a disaggregated pool form two process groups, which fit no other role.
        rule = f"must be another pool, as {ref(INFER)} splits this one"
        yield Problem(f"placement.{role.value}", rule, pool, f"add resource_pool.{role.value}")
    tp = config.rollout_tp
    ep = config.rollout_ep
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


def _check_colocated_sizes(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each parallel size of generation that differs from the actor's."""
    actor = config.actor_rollout
    for key, size, actor_key, actor_size in (
        (ROLLOUT_TP, config.rollout_tp, ACTOR_TP, actor.tensor_model_parallel_size),
        (ROLLOUT_EP, config.rollout_ep, ACTOR_EP, actor.expert_model_parallel_size),
    ):
        if size != actor_size:
            rule = f"must be {ref(actor_key)}={actor_size} on the actor's devices"
            remedy = f"remove it, or give the rollout devices by {ref(TRAIN)} and {ref(INFER)}"
            yield Problem(key, rule, size, remedy)


def _check_nodes_of_replicas(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if a replica that generates has ranks on two nodes.

    A vLLM server never does: its processes are all on its leader's node.
    """
    tp = config.rollout_tp
    num_per_node = config.resource_pool[config.placement[Role.ACTOR_ROLLOUT]]
    may_span_nodes = config.pool_settings.tensor_parallel_spans_nodes and not config.runs_vllm
    as_in_training = not config.train_rollout_split and not config.runs_vllm  # see `_check_model`
    if config.train_rollout_split:
        num_per_node = count_per_node(num_per_node, *config.train_rollout_split)
    forms_replicas = sum(num_per_node) % tp == 0  # other rules say so if not
    if may_span_nodes or as_in_training or not forms_replicas:
        return
    if all(num_processes % tp == 0 for num_processes in num_per_node):
        return
    counts = ", ".join(map(str, num_per_node))
    rule = f"must divide the numbers of generating processes on each node ({counts}): "
    remedy = use(neighbours(tp, divisors(gcd(*num_per_node))))
    if config.runs_vllm:
        key = "rollout.vllm.tensor_parallel_size"
        rule += "a server is on one node"
    else:
        key = ROLLOUT_TP
        rule += "a replica is on one node"
        remedy += ", or resource_pool.tensor_parallel_spans_nodes=true"
    yield Problem(key, rule, tp, remedy)


def _check_vllm(config: RunConfig) -> Iterator[Problem]:
    """Yield problems with vLLM servers: their devices, and log-probs they cannot report."""
    actor = config.actor_rollout
    tp = config.rollout_tp
    num_devices = config.layout(Role.ACTOR_ROLLOUT).world_size
    if not config.train_rollout_split and num_devices % tp:
        rule = f"must divide the actor's {num_devices} devices"
        yield Problem("rollout.vllm.tensor_parallel_size", rule, tp, use(divisors(num_devices)))
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
    num_experts = section.architecture.num_experts or 1
    remedy = use(neighbours(ep, divisors(gcd(num_experts, dp or num_experts))))
    if num_experts % ep:
        experts_key = ref(f"model.{section.model}.num_experts")
        yield Problem(key, f"must divide {experts_key}={num_experts}", ep, remedy)
    if dp is not None and dp % ep:
        yield Problem(key, f"must divide the data-parallel size {dp}", ep, remedy)


def _check_stage(config: RunConfig) -> Iterator[Problem]:
    """Yield broken rules between stage, estimator, rewards and samples."""
    algorithm = config.algorithm
    actor = config.actor_rollout
    yield from _check_pairs(config) if config.compares_pairs else _check_estimator(config)
    ref_vocab = config.ref.architecture.vocab_size
    actor_vocab = actor.architecture.vocab_size
    if config.shares_reference:
        yield from _check_shared_reference(config)
    elif Role.REF in config.roles and actor_vocab != ref_vocab:
        rule = f"vocab_size={ref_vocab} must be the actor's {actor_vocab}, whose tokens it scores"
        yield Problem("ref", rule, remedy="use the folder and model of the actor", colon=True)
    iterations = config.training.train_iters
    limit = f"{iterations - 1}, as the actor is trained after it ({ref('training.train_iters')})"
    yield from at_most("critic.warmup_iters", config.warmup_iters, limit, iterations - 1)
    limit = f"{ref(MAX_NEW)}={actor.max_new_tokens}"
    yield from at_most(
        "algorithm.overlong_buffer_len",
        algorithm.overlong_buffer_len,
        limit,
        actor.max_new_tokens,
    )
    rules = algorithm.verifier_function
    weights = algorithm.verifier_weight
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
    for key, (ref_value, actor_value) in values.items():
        if ref_value != actor_value:
            rule = f"must be the actor's {actor_value} with {ref('actor_rollout.lora.rank')}"
            rule += ": the reference is the actor without adapters"
            yield Problem(key, rule, ref_value, "remove it")


def _check_pairs(config: RunConfig) -> Iterator[Problem]:
    """Yield broken rules in online DPO, which prefers one response over another."""
    actor = config.actor_rollout
    dpo = f"{ref(STAGE)}=ray_online_dpo"
    if actor.n_samples_per_prompt != 2:
        yield Problem(SAMPLES, f"must be 2 with {dpo}", actor.n_samples_per_prompt, "use 2")
    max_tokens = actor.max_tokens_per_micro_batch
    size = actor.micro_batch_size
    if max_tokens is not None:
        key = "actor_rollout.max_tokens_per_micro_batch"
        rule = f"may separate the responses of a pair with {dpo}"
        yield Problem(key, rule, max_tokens, "use null, and micro_batch_size")
    elif size % 2:
        rule = "must be even, to hold whole pairs"
        yield Problem("actor_rollout.micro_batch_size", rule, size, f"use {max(2, size - 1)}")


def _check_estimator(config: RunConfig) -> Iterator[Problem]:
    """Yield broken rules about the estimator, its stage and its KL penalty."""
    algorithm = config.algorithm
    stage = config.training.stage
    name = algorithm.adv_estimator
    needs_critic = algorithm.estimator.needs_critic
    if needs_critic and stage is not Stage.RAY_PPO:
        rule = f"needs a critic, and {ref(STAGE)}={stage.value} has none"
        yield Problem(ESTIMATOR, rule, name, f"use grpo, or {ref(STAGE)}=ray_ppo")
    elif stage is Stage.RAY_PPO and not needs_critic:
        rule = f"needs no critic, and {ref(STAGE)}={stage.value} trains one"
        yield Problem(ESTIMATOR, rule, name, f"use gae, or {ref(STAGE)}=ray_grpo")
    num_samples = config.actor_rollout.n_samples_per_prompt
    if algorithm.estimator.compares_group and num_samples == 1:
        cause = f"{ref(ESTIMATOR)}={name}, which compares the responses to a prompt"
        yield Problem(SAMPLES, f"must be 2 or more with {cause}", num_samples, "use 4 or 8")
    penalty = algorithm.kl_penalty
    in_loss = algorithm.kl_in == "loss"
    if in_loss and penalty is KlPenalty.KL:
        rule = f"must not be kl with {ref(KL_IN)}=loss, where its gradient is 0 on average"
        yield Problem(PENALTY, rule, penalty, "use low_var_kl or mse")
    if penalty is not KlPenalty.FULL or Role.REF not in config.roles:
        return
    if in_loss:
        yield Problem(PENALTY, f"needs {ref(KL_IN)}=reward", "full", "use that, or low_var_kl")
    pool = config.placement[Role.ACTOR_ROLLOUT]
    ref_pool = config.placement[Role.REF]
    if pool != ref_pool:
        rule = f"needs the reference in the actor's pool, and not in {ref_pool}"
        yield Problem(PENALTY, rule, "full", f"use {ref('placement.ref')}={pool}, or low_var_kl")
    # Each rank compares its shard of the vocabulary.
    for key in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ):
        actor_size = getattr(config.actor_rollout, key)
        ref_size = getattr(config.role(Role.REF), key)
        if actor_size != ref_size:
            rule = f"must be the actor's {actor_size} with {ref(PENALTY)}=full"
            yield Problem(f"ref.{key}", rule, ref_size, f"use {actor_size}, or low_var_kl")
