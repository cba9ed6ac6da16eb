"""The plan printed by `dry_run=true`: placement, sizes, batches, memory, disk."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mindspeed_rlxf.cluster.worker import layout_environment, list_variables, offload_environment
from mindspeed_rlxf.config.enums import OldLogProbs, Role
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.ray_cluster import choose_cluster
from mindspeed_rlxf.config.rollout_section import TOOL_AGENT
from mindspeed_rlxf.config.schema import SAVED_AS, LearningConfig, RunConfig
from mindspeed_rlxf.models.parameter_counts import HEADS, model_elements
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.fit import check_fit
from mindspeed_rlxf.ops.planning.memory import cache_rows, has_model
from mindspeed_rlxf.ops.planning.stage_memory import is_split, micro_batches, mini_batch_size
from mindspeed_rlxf.ops.planning.suggest import suggest, usable_bytes
from mindspeed_rlxf.ops.planning.work import describe_work
from mindspeed_rlxf.reporting.table import named_table, pairs, table


def topology(config: RunConfig) -> str:
    """Build a text table per pool; two if disaggregated: training ranks, then generating ranks.

    A line per device; over 32 devices in all, a line per range with equal pipeline stages.
    """
    num_devices = sum(map(sum, config.resource_pool.values()))
    by_device = num_devices <= 32
    # A private cluster on this host holds every pool.
    num_per_host = config.device.devices_per_node if available.is_joined(config) else num_devices
    devices_by_pool = place_pools(config.resource_pool, num_per_host)
    tables = []
    for pool in config.resource_pool:
        devices = devices_by_pool[pool]
        layouts = {role.value: config.layout(role) for role in config.roles_of(pool)}
        first_rank = 0
        if is_split(config, pool) and config.train_rollout_split is not None:
            first_rank = config.train_rollout_split[0]
            tables.append(_topology_table(pool, devices[:first_rank], 0, layouts, by_device))
            layouts = {"rollout": config.rollout_layout}
        devices = devices[first_rank:]
        tables.append(_topology_table(pool, devices, first_rank, layouts, by_device))
    return "\n\n".join(tables)


def place_pools(
    pools: Mapping[str, Sequence[int]], num_per_host: int
) -> dict[str, list[tuple[int, int]]]:
    """Number hosts and devices over the cluster: each pool takes the first hosts with room for it.

    The largest pools come first, as when the devices are reserved: with 8 devices per host,
    {"actor": [8], "ref": [2], "critic": [4]} is actor on host 0, critic on devices 0 to 3 of
    host 1, and ref on devices 4 and 5 of it.

    Args:
        pools: Devices of each pool per host.
        num_per_host: Devices of a host; a larger entry of a pool has a host of that size.

    Returns:
        (host, device) of each rank, by pool.
    """
    num_used: list[int] = []  # by host
    devices_by_pool: dict[str, list[tuple[int, int]]] = {}
    for pool in sorted(pools, key=lambda name: -max(pools[name])):
        host = 0
        devices: list[tuple[int, int]] = []
        for size in pools[pool]:
            while host < len(num_used) and num_used[host] + size > num_per_host:
                host += 1
            if host == len(num_used):
                num_used.append(0)
            first = num_used[host]
            devices += [(host, number) for number in range(first, first + size)]
            num_used[host] += size
            host += 1  # entries of a pool are on different hosts
        devices_by_pool[pool] = devices
    return devices_by_pool


def _topology_table(
    pool: str,
    devices: Sequence[tuple[int, int]],
    first_rank: int,
    layouts: Mapping[str, ParallelLayout],
    by_device: bool,
) -> str:
    """Build the table for some of a pool's ranks, from `first_rank` on.

    devices: Each rank's host and number.
    """

    def line_of(rank: int) -> object:
        return rank if by_device else [layout.pp_rank(rank) for layout in layouts.values()]

    rows: list[dict[str, object]] = []
    for _, group in groupby(range(len(devices)), line_of):
        ranks = list(group)
        row: dict[str, object] = {
            "pool": pool,
            "hosts": _span([devices[rank][0] for rank in ranks]),
            "devices": _span([devices[rank][1] for rank in ranks]),
            "ranks": _span([first_rank + rank for rank in ranks]),
        }
        for role, layout in layouts.items():
            axes = _axes(layout)
            spans = []
            for axis in axes.split(","):
                coordinate = getattr(layout, f"{axis.lower()}_rank")
                spans.append(_span([coordinate(rank) for rank in ranks]))
            row[f"{role} {axes}"] = ",".join(spans)
        rows.append(row)
    return named_table(rows)


def _axes(layout: ParallelLayout) -> str:
    return "TP,CP,PP,DP" if layout.cp > 1 else "TP,PP,DP"


def _span(numbers: Sequence[int]) -> str:
    low = min(numbers)
    high = max(numbers)
    return str(low) if low == high else f"{low}-{high}"


OLD_LOG_PROBS = {
    OldLogProbs.AUTO: "of the update, without a pass before it",
    OldLogProbs.RECOMPUTE: "a pass before the update",
    OldLogProbs.ROLLOUT: "of generation",
}


@dataclass(frozen=True)
class Plan:
    """The plan as text, and the problems found."""

    text: str
    problems: list[Problem]


def plan(config: RunConfig, nested: bool = False) -> Plan:
    """Make a run's plan as text, and list its problems; claims no device, writes no file.

    Args:
        config: The run.
        nested: Whether the YAML has `actor_rollout` and `ref` under `actor_rollout_ref`.
    """
    runtime = "local"
    if config.runtime.kind == "ray":
        chosen = choose_cluster(config.runtime.address)
        runtime = f"ray, private cluster on this host ({chosen.source})"
        if chosen.address:
            runtime = f"ray, cluster at {chosen.address} ({chosen.source})"
    asked_kind = config.device.kind
    config = available.look_once(config)
    if config.runtime.address == available.OTHER_HOSTS:
        runtime = f"ray, a cluster of hosts with {config.device.devices_per_node} devices"
    device_kind = config.device.kind.value
    if config.device.kind is not asked_kind:
        device_kind += ", as device.memory_gib is given; device.kind names another"
    fitting, problems = check_fit(config)
    variables = list_variables(
        config.pool_settings.env, offload_environment(config), layout_environment(config)
    )
    sections = {
        f"Run {config.training.run_name}": pairs(_run_lines(config, runtime, device_kind)),
        "Roles": named_table([*_role_rows(config)]),
        "Placement of the ranks": topology(config),
        "Environment of the workers": table([("variable", "value", "source"), *variables])
        if variables
        else pairs([("no variables", "add some with resource_pool.env")]),
        "Batch of an iteration": pairs(_batch_sizes(config)),
        "Forward passes": named_table([*_forward_rows(config)]),
        "Optimizer": named_table([*_update_rows(config)]),
        "Work of an iteration": describe_work(config),
        **fitting,
    }
    if config.plan.suggest:
        memory = available.device_memory(config)
        if memory is None and available.on_cpu(config):
            memory = available.rollout_memory(config)
        if memory is None:
            rule = "needs device.memory_gib, which is unknown here"
            remedy = "set it"
            sections["Suggested layouts"] = f"  {rule}; {remedy}"
            problems = [Problem("plan.suggest", rule, True, remedy), *problems]
        else:
            sections["Suggested layouts"] = suggest(config, nested, usable_bytes(memory))
    text = "\n\n".join(f"{title}\n{body}" for title, body in sections.items())
    return Plan(text, problems)


def _run_lines(config: RunConfig, runtime: str, device_kind: str) -> list[tuple[str, object]]:
    """Return the run's settings as (title, value).

    `runtime` describes where processes start, `device_kind` on which devices.
    """
    training = config.training
    data = config.data
    saves = ["at the end", f"the last {training.keep_last} are kept"]
    if training.seconds_between_saves:
        saves.insert(0, f"every {training.seconds_between_saves:g} s")
    if 0 < training.save_interval <= training.train_iters:
        saves.insert(0, _every(training.save_interval))
    lines: list[tuple[str, object]] = [
        ("iterations", training.train_iters),
        ("output", training.output_dir),
    ]
    for role in config.roles:
        folder = config.save_folder(role) if role in SAVED_AS else None
        if folder is not None:
            lines.append((f"weights of {role.value}", folder))
    lines += [
        ("checkpoints of the run", ", ".join(saves)),
        ("tokenizer", training.tokenizer_name_or_path),
        ("training prompts", ", ".join(data.train_files or data.data_path)),
        ("validation prompts", ", ".join(data.val_files or data.val_data_path) or "none"),
    ]
    if config.has_validation_prompts:
        lines.append(("validation", _describe_validation(config)))
    rules = ", ".join(f"{weight:g} x {rule.value}" for rule, weight in config.verifiers)
    lines += [
        ("runtime", runtime),
        ("device", device_kind),
        ("reward", f"verifier: {rules}" if rules else config.reward.kind.value),
    ]
    if config.reward.scoring_functions:
        lines.append(("reward functions", _describe_functions(config)))
    lines.append(("old log-probs", OLD_LOG_PROBS[config.old_log_probs]))
    if config.rollout.max_staleness:
        lines.append(("generation", _describe_slices(config)))
    if config.rollout.runs_agents:
        lines.append(("agent", _describe_agent(config)))
    if config.rollout.tools:
        lines.append(("tools", _describe_tools(config)))
    return lines


def _describe_validation(config: RunConfig) -> str:
    keys = config.validation
    interval = f"{_every(keys.interval)}, " if keys.interval else ""
    return (
        f"{'and no training, ' if keys.only else interval}{keys.n_samples} "
        f"response{'s' if keys.n_samples > 1 else ''} per prompt, "
        f"{_describe_decoding(keys.do_sample, keys.temperature)}, scored by {keys.reward.value}"
    )


def _describe_slices(config: RunConfig) -> str:
    rollout = config.rollout
    overlap = "while the previous batch is trained" if config.lead else "before each update"
    return (
        f"{overlap}, in slices of {rollout.slice_steps} decode steps, by weights up to "
        f"{rollout.max_staleness} updates old"
    )


def _describe_agent(config: RunConfig) -> str:
    rollout = config.rollout
    return (
        f"{rollout.agent or TOOL_AGENT}, turns: {rollout.max_turns}, slices until an answer: "
        f"{rollout.agent_lag} (of {rollout.slice_steps} decode steps)"
    )


def _describe_tools(config: RunConfig) -> str:
    rollout = config.rollout
    names = ", ".join(tool.function for tool in rollout.tools)
    replicas = config.rollout_layout.dp
    return f"{names}, processes: {replicas * rollout.tool_processes} (replicas: {replicas})"


def _every(interval: int) -> str:
    return "every iteration" if interval == 1 else f"every {interval} iterations"


def _describe_functions(config: RunConfig) -> str:
    terms = []
    for function in config.reward.scoring_functions:
        terms.append(f"{function.weight:g} x {function.function or function.url}")
    return ", ".join(terms)


def _describe_decoding(do_sample: bool, temperature: float) -> str:
    return f"sample, temperature {temperature:g}" if do_sample else "greedy"


def _role_rows(config: RunConfig) -> Iterator[dict[str, object]]:
    """Yield a row for each role, and one for ranks that only generate."""
    for role in config.roles:
        section = config.role(role)
        layout = config.layout(role)
        row: dict[str, object] = {
            "role": role.value, "model": "rule", "pool": config.placement[role],
            "ranks": layout.world_size,
        }  # fmt: skip
        if not has_model(config, role):
            yield row | {"DP": layout.dp}
            continue
        chunks = f" x {section.model_chunks} chunks" if section.model_chunks > 1 else ""
        elements = model_elements(section.architecture, HEADS[role])
        count = f"{elements / 1e9:.3g} G" if elements >= 1e9 else f"{elements / 1e6:.3g} M"
        row |= {
            "model": section.model, "TP": layout.tp, "CP": layout.cp, "PP": f"{layout.pp}{chunks}",
            "DP": layout.dp, "EP": section.expert_model_parallel_size,
            "precision": "bf16" if section.bf16 else "fp32", "engine": section.backend,
            "parameters": count,
            "weights": _describe_weights(config, role),
        }  # fmt: skip
        yield row
        if role is Role.ACTOR_ROLLOUT and config.train_rollout_split:
            generating = config.rollout_layout
            yield row | {
                "role": "rollout", "ranks": generating.world_size, "TP": generating.tp,
                "CP": generating.cp, "PP": generating.pp, "DP": generating.dp,
                "EP": config.rollout_ep, "engine": config.rollout.engine,
                "weights": "the actor's, after each update",
            }  # fmt: skip


def _describe_weights(config: RunConfig, role: Role) -> str:
    section = config.role(role)
    if role is Role.REF and config.shares_reference:
        return "the actor's, without its adapters"
    rank = section.adapters.rank
    return f"{section.load}" + (f", adapters of rank {rank}" if rank else "")


def _batch_sizes(config: RunConfig) -> list[tuple[str, object]]:
    actor = config.actor_rollout
    rows = cache_rows(config)
    per_rank = config.samples_per_iteration // config.layout(Role.ACTOR_ROLLOUT).dp
    per_replica = -(-config.samples_per_iteration // config.rollout_layout.dp)
    return [
        ("prompts (global_batch_size)", config.training.global_batch_size),
        ("samples per prompt", actor.n_samples_per_prompt),
        ("samples", config.samples_per_iteration),
        ("samples per actor replica", per_rank),
        (
            "generated at once per rollout replica",
            f"{rows} (rounds: {-(-per_replica // rows)})",
        ),
        (
            "longest prompt + response",
            f"{actor.max_prompt_length} + {actor.max_new_tokens} tokens",
        ),
        ("decoding", _describe_decoding(actor.do_sample, actor.temperature)),
    ]


def _forward_rows(config: RunConfig) -> Iterator[dict[str, object]]:
    """Yield the micro-batches of each role with a model in a pass over an iteration's samples."""
    for role in config.roles:
        if has_model(config, role):
            samples = config.samples_per_iteration // config.layout(role).dp
            size, count = _describe_micro_batches(config, role, samples)
            row: dict[str, object] = {
                "role": role.value, "samples per rank": samples, "micro-batch": size,
                "micro-batches": count,
            }  # fmt: skip
            if config.actor_rollout.n_samples_per_prompt > 1:
                row["a prompt is computed"] = _describe_sharing(config, role, samples)
            yield row


def _describe_micro_batches(config: RunConfig, role: Role, samples: int) -> tuple[str, str]:
    section = config.role(role)
    actor = config.actor_rollout
    count = micro_batches(section, samples, actor.max_prompt_length + actor.max_new_tokens)
    limit = section.max_tokens_per_micro_batch
    if limit is None:
        return str(min(section.micro_batch_size, samples)), str(count)
    return f"<= {limit} tokens", f"<= {count}"


def _describe_sharing(config: RunConfig, role: Role, samples: int) -> str:
    """Return how often a prompt with several responses is computed, and the key to change it."""
    section = config.role(role)
    together = config.shared_samples(role, samples)
    if not (section.share_prompts and section.packed_sequences):
        off = "packed_sequences" if section.share_prompts else "share_prompts"
        return f"for each response: {off}=false"
    if together == 1:
        return (
            f"for each response: micro_batch_size={section.micro_batch_size} of {samples} samples"
        )
    if not isinstance(section, LearningConfig) or config.shares_in_updates(role):
        return f"once for {together} responses"
    key = "shuffle_minibatch" if section.shuffle_minibatch else "moe_aux_loss_coeff"
    return f"once for {together} responses, in updates for fewer: {key}"


def _update_rows(config: RunConfig) -> Iterator[dict[str, object]]:
    """Yield the optimizer steps of the actor, and of the critic if any."""
    actor = config.actor_rollout
    critic = config.critic
    updates = [(Role.ACTOR_ROLLOUT, actor.ppo_epochs, actor.optimizer.lr)]
    if critic is not None:
        updates.append((Role.CRITIC, critic.critic_update_epochs, critic.optimizer.lr))
    for role, epochs, lr in updates:
        size = mini_batch_size(config, role)
        count = config.samples_per_iteration // size
        _, micro = _describe_micro_batches(config, role, size // config.layout(role).dp)
        yield {
            "role": role.value, "mini-batch": size, "mini-batches": count, "epochs": epochs,
            "steps per iteration": count * epochs, "micro-batches per rank and step": micro,
            "steps in the run": count * epochs * config.learning_iters(role),
            "learning rate": f"{lr:g}",
        }  # fmt: skip
