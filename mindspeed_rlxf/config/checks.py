"""Rules across sections, and inside a section between its keys. Nothing here looks at the host."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_rlxf.config.batch_rules import (
    TITLES,
    check_batches,
    loss_by_micro_batch,
    token_budget,
)
from mindspeed_rlxf.config.enums import Role, RopeScaling
from mindspeed_rlxf.config.expert_rules import expert_problems
from mindspeed_rlxf.config.schema import OptimizerConfig, RoleConfig, RunConfig
from mindspeed_rlxf.config.split_rules import ROLLOUT_TP, TRAIN, check_split
from mindspeed_rlxf.config.stage_rules import check_stage
from mindspeed_rlxf.config.suggest import around, closest, divisors, multiples_around, use
from mindspeed_rlxf.config.tensor_parallel import possible_sizes, qkv_rows, whole_groups


def check(config: RunConfig) -> list[str]:
    """Every rule that the configuration breaks, each `rule, value, remedy`; empty when none."""
    problems = [*_pools(config), *_lengths(config), *_generation(config), *_schedules(config)]
    problems += [*_data(config), *check_stage(config), *check_split(config)]
    for role in config.roles:
        problems += [*_weights(config, role), *_model(config, role), *_parallel(config, role)]
    problems += loss_by_micro_batch(config)
    if not _misplaced(config):
        problems += check_batches(config)
    return problems


def _pools(config: RunConfig) -> Iterator[str]:
    known = ", ".join(config.resource_pool)
    for role, pool in config.placement.items():
        if pool not in config.resource_pool:
            guess = closest(pool, config.resource_pool) or next(iter(config.resource_pool))
            yield (
                f"placement.{role.value}={pool} must name a pool of resource_pool ({known}); "
                f"use placement.{role.value}={guess}, or add resource_pool.{pool}"
            )
    for pool in config.resource_pool.keys() - config.placement.values():
        yield f"resource_pool.{pool} must hold a role; remove it, or place a role on it"


def _misplaced(config: RunConfig) -> bool:
    """True while some role has no whole replicas, so that there is no data-parallel size."""
    return any(_pools(config)) or any(_replicas(config, role) for role in config.roles)


def _replicas(config: RunConfig, role: Role) -> str | None:
    pool, section = config.pool_of(role), config.role(role)
    tp, pp = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    size = sum(config.processes_of(role)) if pool in config.resource_pool else tp * pp
    if size % (tp * pp) == 0:
        return None
    key = TRAIN if role is Role.ACTOR_ROLLOUT and config.parts else f"resource_pool.{pool}"
    return (
        f"{key}={size} must be a multiple of TP {tp} x PP {pp} = {tp * pp} of "
        f"{TITLES[role]} ({role.value}); {use(multiples_around(size, tp * pp))}"
    )


def _weights(config: RunConfig, role: Role) -> Iterator[str]:
    if not _is_rule(config, role) and config.role(role).load is None:
        yield f"{role.value}.load is required; give the folder of its weights"


def _is_rule(config: RunConfig, role: Role) -> bool:
    """Or a reward model whose architecture is missing, which has been said."""
    return role is Role.REWARD and config.reward.architecture is None


def _model(config: RunConfig, role: Role) -> Iterator[str]:
    section = config.role(role)
    if _is_rule(config, role):
        return
    a, name = section.architecture, f"model.{section.model}"
    if a.kv_channels is None and a.hidden_size % a.num_attention_heads:
        good = around(a.num_attention_heads, divisors(a.hidden_size))
        yield (
            f"{name}.num_attention_heads={a.num_attention_heads} must divide hidden_size="
            f"{a.hidden_size} where kv_channels is not given; {use(good)}"
        )
    elif a.head_dim % 2:
        yield f"{name}: the head width {a.head_dim} must be even for rotary positions; change it"
    if a.num_attention_heads % a.kv_heads:
        good = around(a.kv_heads, divisors(a.num_attention_heads))
        yield (
            f"{name}.num_query_groups={a.kv_heads} must divide num_attention_heads="
            f"{a.num_attention_heads}; {use(good)}"
        )
    if a.rope_scaling_type is RopeScaling.LLAMA3 and a.original_max_position_embeddings is None:
        yield (
            f"{name}.original_max_position_embeddings is required with rope_scaling_type=llama3; "
            "take it from the checkpoint's config.json"
        )
    if config.training.seq_length > a.max_position_embeddings:
        yield (
            f"training.seq_length={config.training.seq_length} must be at most "
            f"{name}.max_position_embeddings={a.max_position_embeddings} of {TITLES[role]}; "
            f"use {a.max_position_embeddings} or less"
        )


def _parallel(config: RunConfig, role: Role) -> Iterator[str]:
    problem = _replicas(config, role)
    if problem:
        yield problem
    if _is_rule(config, role):
        return
    section = config.role(role)
    tp, pp = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    placed = problem is None and config.pool_of(role) in config.resource_pool
    yield from expert_problems(role, section, config.layout(role).dp if placed else None)
    key = f"{role.value}.tensor_model_parallel_size"
    yield from _tensor_parallel(key, tp, section)
    if role is Role.ACTOR_ROLLOUT and config.rollout_tp != tp:
        yield from _tensor_parallel(ROLLOUT_TP, config.rollout_tp, section)
    yield from token_budget(config, role)
    layers = section.architecture.num_layers
    if layers % pp:
        yield (
            f"{role.value}.pipeline_model_parallel_size={pp} must divide the {layers} layers of "
            f"{section.model}; {use(around(pp, divisors(layers)))}"
        )
    else:
        yield from _virtual_pipeline(role, section, layers // pp)
    known = config.pool_of(role) in config.resource_pool
    may_span = config.pool_settings.tensor_parallel_spans_nodes
    for processes in config.processes_of(role) if known and not may_span else []:
        if processes % tp and not problem:
            yield (
                f"resource_pool.{config.pool_of(role)}: {processes} processes on a node must be a "
                f"multiple of the tensor-parallel size {tp} of {role.value}, which may not span "
                f"nodes; {use(multiples_around(processes, tp))}, or allow it with "
                "resource_pool.tensor_parallel_spans_nodes=true"
            )


def _virtual_pipeline(role: Role, section: RoleConfig, layers: int) -> Iterator[str]:
    """layers: of a pipeline stage"""
    per_chunk = section.num_layers_per_virtual_pipeline_stage
    if per_chunk is None:
        return
    shown = f"{role.value}.num_layers_per_virtual_pipeline_stage={per_chunk}"
    if section.pipeline_model_parallel_size == 1:
        yield (
            f"{shown} needs {role.value}.pipeline_model_parallel_size above 1; raise it, or use "
            f"{role.value}.num_layers_per_virtual_pipeline_stage=null"
        )
    elif layers % per_chunk:
        yield (
            f"{shown} must divide the {layers} layers of a pipeline stage of {section.model}; "
            f"{use(around(per_chunk, divisors(layers)))}"
        )


def _tensor_parallel(key: str, tp: int, section: RoleConfig) -> Iterator[str]:
    a, name = section.architecture, f"model.{section.model}"
    good = use(around(tp, possible_sizes(a)))
    width = "moe_ffn_hidden_size" if a.num_experts and a.moe_ffn_hidden_size else "ffn_hidden_size"
    if a.num_attention_heads % tp:
        yield f"{key}={tp} must divide {name}.num_attention_heads={a.num_attention_heads}; {good}"
    if not whole_groups(a, tp):
        yield (
            f"{key}={tp} must divide {name}.num_query_groups={a.kv_heads}, or be a multiple of it; "
            f"{good}"
        )
    elif a.num_attention_heads % tp == 0 and qkv_rows(a) % tp:
        yield (
            f"{key}={tp} must divide the {qkv_rows(a)} rows of {name}'s query, key and value "
            f"projections; {good}"
        )
    if a.mlp_hidden_size % tp:
        yield f"{key}={tp} must divide {name}.{width}={a.mlp_hidden_size}; {good}"


def _lengths(config: RunConfig) -> Iterator[str]:
    actor, total = config.actor_rollout, config.training.seq_length
    if actor.max_prompt_length + actor.max_new_tokens > total:
        yield (
            f"training.seq_length={total} must be at least actor_rollout.max_prompt_length="
            f"{actor.max_prompt_length} + actor_rollout.max_new_tokens={actor.max_new_tokens}; "
            f"use {actor.max_prompt_length + actor.max_new_tokens} or more"
        )
    if actor.min_new_tokens > actor.max_new_tokens:
        yield (
            f"actor_rollout.min_new_tokens={actor.min_new_tokens} must be at most "
            f"actor_rollout.max_new_tokens={actor.max_new_tokens}; "
            f"use {actor.max_new_tokens} or less"
        )


def _generation(config: RunConfig) -> Iterator[str]:
    actor = config.actor_rollout
    if actor.n_samples_per_prompt > 1 and not actor.do_sample:
        yield (
            f"actor_rollout.n_samples_per_prompt={actor.n_samples_per_prompt} must be 1 with "
            "actor_rollout.do_sample=false, where every sample would be the same; use "
            "actor_rollout.do_sample=true"
        )
    vocab_size = actor.architecture.vocab_size
    outside = [token for token in actor.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        yield (
            f"actor_rollout.stop_token_ids={outside} must be token ids below vocab_size="
            f"{vocab_size}; remove them"
        )


def _schedules(config: RunConfig) -> Iterator[str]:
    optimizers: dict[str, OptimizerConfig] = {
        "actor_rollout": config.actor_rollout.optimizer,
    }
    if config.critic:
        optimizers["critic"] = config.critic.optimizer
    for name, optimizer in optimizers.items():
        if optimizer.min_lr > optimizer.lr:  # Megatron asserts it for a constant rate too
            yield (
                f"{name}.min_lr={optimizer.min_lr:g} must be at most {name}.lr={optimizer.lr:g}; "
                f"use {optimizer.lr:g} or less"
            )


def _data(config: RunConfig) -> Iterator[str]:
    data, interval = config.data, config.validation.interval
    if not data.train_files and not data.data_path:
        yield (
            "data.train_files is required; name files of prompts, or an indexed data set by "
            "data.data_path=PREFIX"
        )
    pairs = {
        "data.train_files and data.data_path": data.train_files and data.data_path,
        "data.val_files and data.val_data_path": data.val_files and data.val_data_path,
    }
    for names, both in pairs.items():
        if both:
            yield f"{names} must not both be given, each names all prompts; remove one of them"
    if interval and not data.val_files and not data.val_data_path:
        yield (
            f"validation.interval={interval} needs data.val_files or data.val_data_path; name a "
            "file, or use validation.interval=0"
        )
