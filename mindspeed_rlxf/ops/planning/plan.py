"""The plan that `dry_run=true` prints: placement, sizes, batches, memory, disk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from mindspeed_rlxf.cluster.worker import list_variables, offload_environment
from mindspeed_rlxf.config.enums import OldLogProbs, Role
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.ray_cluster import choose_cluster
from mindspeed_rlxf.config.schema import SAVED_AS, LearningConfig, RunConfig
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.fit import check_fit
from mindspeed_rlxf.ops.planning.memory import cache_rows, has_model
from mindspeed_rlxf.ops.planning.stage_memory import is_split, micro_batches
from mindspeed_rlxf.ops.planning.suggest import Note, show_suggestions, suggest, usable_bytes
from mindspeed_rlxf.reporting.table import pairs, table

Place: TypeAlias = tuple[int, int, int]
"""Host, device on the host, rank in the pool."""
Placed: TypeAlias = tuple[ParallelLayout, int]
"""A layout, and the pool's rank of its first rank."""

MAX_LINES = 32  # with more devices, hosts with the same layout share a line


def topology(config: RunConfig) -> str:
    """Return a text table per pool; two for a disaggregated one, ranks that train and generate.

    A line per device; over MAX_LINES devices in all, a line per range of hosts with equal layout.
    """
    whole = sum(map(sum, config.resource_pool.values())) <= MAX_LINES
    return "\n\n".join(
        _table(pool, places, layouts, whole)
        for pool in config.resource_pool
        for places, layouts in _pool_parts(config, pool)
    )


def _pool_parts(config: RunConfig, pool: str) -> Iterator[tuple[list[Place], dict[str, Placed]]]:
    """Yield the places of a pool's ranks and the layouts by role, for each part of the pool."""
    sizes = enumerate(config.resource_pool[pool])
    devices = [(host, number) for host, size in sizes for number in range(size)]
    places = [(*device, rank) for rank, device in enumerate(devices)]
    layouts = {role.value: (config.layout(role), 0) for role in config.roles_of(pool)}
    if not is_split(config, pool) or config.parts is None:
        yield places, layouts
        return
    first = config.parts[0]
    yield places[:first], layouts
    yield places[first:], {"rollout": (config.rollout_layout, first)}


def _table(pool: str, places: list[Place], layouts: dict[str, Placed], whole: bool) -> str:
    """Return a pool's table; `whole`: with a line per device, else per range of like hosts."""
    rows: list[list[object]] = [
        ["pool", "hosts", "devices", "ranks", *(f"{role} TP,PP,DP" for role in layouts)]
    ]
    placed = list(layouts.values())
    groups = [[place] for place in places]
    if not whole:
        hosts = [list(host) for _, host in groupby(places, lambda place: place[0])]

        def likeness(host: list[Place]) -> tuple[object, ...]:
            ranks = [rank for _, _, rank in host]
            devices = [device for _, device, _ in host]
            return devices, *(_coordinates(each, ranks)[:2] for each in placed)

        alike = groupby(hosts, likeness)
        groups = [[place for host in group for place in host] for _, group in alike]
    for group in groups:
        spans = [_span(numbers) for numbers in zip(*group, strict=True)]
        ranks = [rank for _, _, rank in group]
        coordinates = (",".join(map(_span, _coordinates(each, ranks))) for each in placed)
        rows.append([pool, *spans, *coordinates])
    return table(rows)


def _coordinates(placed: Placed, ranks: list[int]) -> list[list[int]]:
    layout, first = placed
    functions = (layout.tp_rank, layout.pp_rank, layout.dp_rank)
    return [[function(rank - first) for rank in ranks] for function in functions]


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


NONE = "-"
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


def plan(config: RunConfig, nested: bool = False, note: Note = lambda _: None) -> Plan:
    """Make the plan of a run as text, and list its problems; claims no device, writes no file.

    Args:
        nested: the YAML has `actor_rollout` and `ref` under `actor_rollout_ref`.
        note: called with lines of progress while layouts are suggested (key `plan.suggest`).
    """
    chosen = choose_cluster(config.runtime.address)
    cluster = f"cluster at {chosen.address}" if chosen.address else "private cluster on this host"
    config = available.look_once(config)
    fitting = check_fit(config)
    problems = fitting.problems
    training, data = config.training, config.data
    saved = {role: config.save_folder(role) for role in config.roles if role in SAVED_AS}
    saves = ["at the end", f"the last {training.keep_last} are kept"]
    if training.seconds_between_saves:
        saves.insert(0, f"every {training.seconds_between_saves:g} s")
    if 0 < training.save_interval <= training.train_iters:
        saves.insert(0, f"every {training.save_interval} iterations")
    rules = ", ".join(f"{weight:g} x {rule.value}" for rule, weight in config.verifiers)
    variables = list_variables(config.pool_settings.env, offload_environment(config))
    sections = {
        f"Run {config.training.run_name}": pairs(
            [
                ("iterations", training.train_iters),
                ("output", training.output_dir),
                *((f"weights of {role.value}", folder) for role, folder in saved.items() if folder),
                ("checkpoints of the run", ", ".join(saves)),
                ("tokenizer", training.tokenizer_name_or_path),
                ("training prompts", ", ".join(data.train_files or data.data_path)),
                ("validation prompts", ", ".join(data.val_files or data.val_data_path) or "none"),
                *(
                    [("validation", _describe_validation(config))]
                    if config.has_validation_prompts
                    else []
                ),
                (
                    "runtime",
                    f"ray, {cluster} ({chosen.source})"
                    if config.runtime.kind == "ray"
                    else "local",
                ),
                ("device", config.device.kind.value),
                ("reward", f"verifier: {rules}" if rules else config.reward.kind.value),
                ("old log-probs", OLD_LOG_PROBS[config.old_log_probs]),
            ]
        ),
        "Roles": table(_roles_table(config)),
        "Places of the ranks": topology(config),
        "Environment of the workers": table(
            [["variable", "value", "source"], *map(list, variables)]
        )
        if variables
        else pairs([("no variables", "add some with resource_pool.env")]),
        "Batch of an iteration": pairs(_batch_sizes(config)),
        "Forward passes": table(_forwards_table(config)),
        "Optimizer": table(_updates_table(config)),
        **fitting.sections,
    }
    if config.plan.suggest:
        sections["Suggested layouts"], found = _suggestions(config, nested, note)
        problems = [*found, *problems]
    text = "\n\n".join(f"{title}\n{body}" for title, body in sections.items())
    return Plan(text, problems)


def _suggestions(config: RunConfig, nested: bool, note: Note) -> tuple[str, list[Problem]]:
    """Search layouts; return the text of the plan's section on them, and problems."""
    room = available.device_memory(config)
    if room is None and available.on_cpu(config):
        room = available.rollout_memory(config)
    if room is None:
        rule, remedy = "needs device.memory_gib, which is unknown here", "set it"
        return f"  {rule}; {remedy}", [Problem("plan.suggest", rule, True, remedy)]
    limit = usable_bytes(room)
    return show_suggestions(config, suggest(config, limit, note), nested, limit), []


def _describe_validation(config: RunConfig) -> str:
    """Return as text the interval of validation, responses per prompt, decoding and reward."""
    keys, found = config.validation, []
    if keys.only:
        found.append("and no training")
    elif keys.interval:
        found.append(f"every {keys.interval} iterations")
    found.append(f"{keys.n_samples} responses per prompt")
    found.append(_describe_decoding(keys.do_sample, keys.temperature))
    return ", ".join([*found, f"scored by {keys.reward.value}"])


def _describe_decoding(do_sample: bool, temperature: float) -> str:
    return f"sample, temperature {temperature:g}" if do_sample else "greedy"


def _roles_table(config: RunConfig) -> list[list[object]]:
    """Return the table of roles, a heading row first: model, pool, sizes, precision, weights."""
    rows: list[list[object]] = [
        ["role", "model", "pool", "ranks", "TP", "PP", "DP", "EP", "precision", "weights"]
    ]
    for role in config.roles:
        section, layout = config.role(role), config.layout(role)
        where: list[object] = [config.placement[role], layout.world_size]
        if not has_model(config, role):
            rows.append([role.value, "rule", *where, NONE, NONE, layout.dp, *[NONE] * 3])
            continue
        precision = "bf16" if section.bf16 else "fp32"
        chunks = f" x {section.model_chunks} chunks" if section.model_chunks > 1 else ""
        ep = section.expert_model_parallel_size
        sizes = [layout.tp, f"{layout.pp}{chunks}", layout.dp, ep]
        rows.append([role.value, section.model, *where, *sizes, precision, section.load])
        if role is Role.ACTOR_ROLLOUT and config.parts:
            generating = config.rollout_layout
            sizes = [generating.world_size, generating.tp, generating.pp, generating.dp]
            ends = [config.rollout_ep, precision, "the actor's, after each update"]
            rows.append(["rollout", section.model, config.placement[role], *sizes, *ends])
    return rows


def _batch_sizes(config: RunConfig) -> list[tuple[str, object]]:
    """Return the sizes of an iteration's batch, by what they count."""
    actor, rows = config.actor_rollout, cache_rows(config)
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


def _forwards_table(config: RunConfig) -> list[list[object]]:
    """Return the table of forward passes: a heading row, and a row for each role with a model."""
    groups = config.actor_rollout.n_samples_per_prompt > 1
    titles = ["role", "samples per rank", "micro-batch", "micro-batches"]
    rows: list[list[object]] = [[*titles, *["a prompt is computed"] * groups]]
    for role in config.roles:
        if has_model(config, role):
            samples = config.samples_per_iteration // config.layout(role).dp
            sizes = _describe_micro_batches(config, role, samples)
            sharing = [_describe_sharing(config, role, samples)] * groups
            rows.append([role.value, samples, *sizes, *sharing])
    return rows


def _describe_micro_batches(config: RunConfig, role: Role, samples: int) -> tuple[str, str]:
    section, actor = config.role(role), config.actor_rollout
    count = micro_batches(section, samples, actor.max_prompt_length + actor.max_new_tokens)
    limit = section.max_tokens_per_micro_batch
    if limit is None:
        return str(min(section.micro_batch_size, samples)), str(count)
    return f"<= {limit} tokens", f"<= {count}"


def _describe_sharing(config: RunConfig, role: Role, samples: int) -> str:
    """Return how often the prompt of several responses is computed, and which key changes that."""
    section, together = config.role(role), config.shared_samples(role, samples)
    if not (section.share_prompts and section.packed_sequences):
        off = "packed_sequences" if section.share_prompts else "share_prompts"
        return f"for each response: {off}=false"
    if together == 1:
        size = f"micro_batch_size={section.micro_batch_size}"
        return f"for each response: {size} of {samples} samples per rank"
    text = f"once for {together} responses"
    if isinstance(section, LearningConfig) and not config.shares_in_updates(role):
        key = "shuffle_minibatch" if section.shuffle_minibatch else "moe_aux_loss_coeff"
        text += f", in updates for fewer: {key}"
    elif isinstance(section, LearningConfig):
        mini_batch = config.actor_rollout.ppo_mini_batch_size
        if role is Role.CRITIC:
            mini_batch = config.value_model.critic_mini_batch_size
        updates = config.shared_samples(role, mini_batch // config.layout(role).dp)
        text += f", in updates for {updates}" if updates < together else ""
    return text


def _updates_table(config: RunConfig) -> list[list[object]]:
    """Return the table of updates: a heading row, the actor's row, and the critic's if any."""
    actor = config.actor_rollout
    rows: list[list[object]] = [
        ["role", "mini-batch", "mini-batches", "epochs", "steps per iteration",
         "micro-batches per rank and step", "steps in the run", "learning rate"]
    ]  # fmt: skip
    updates = {
        Role.ACTOR_ROLLOUT: (actor.ppo_mini_batch_size, actor.ppo_epochs, actor.optimizer.lr),
    }
    if critic := config.critic:
        updates[Role.CRITIC] = (
            critic.critic_mini_batch_size, critic.critic_update_epochs, critic.optimizer.lr,
        )  # fmt: skip
    for role, (size, epochs, lr) in updates.items():
        count = config.samples_per_iteration // size
        _, micro = _describe_micro_batches(config, role, size // config.layout(role).dp)
        steps = count * epochs
        total = steps * config.learning_iters(role)
        rows.append([role.value, size, count, epochs, steps, micro, total, f"{lr:g}"])
    return rows
