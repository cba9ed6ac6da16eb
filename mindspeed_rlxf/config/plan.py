"""What `dry_run=true` prints: what will run where, in which sizes, and where the output goes."""

from __future__ import annotations

from mindspeed_rlxf.config.enums import RewardKind, Role, RuntimeKind
from mindspeed_rlxf.config.host import joined_address
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.table import pairs, table

NONE = "-"


def plan(config: RunConfig) -> str:
    """The whole plan as text; no device is touched and nothing is written."""
    sections = {
        f"Run {config.training.run_name}": pairs(_run(config)),
        "Roles": table(_roles(config)),
        "Processes": table(_processes(config)),
        "Batch of an iteration": pairs(_batch(config)),
        "Forward passes": table(_forwards(config)),
        "Optimizer": table(_updates(config)),
    }
    return "\n\n".join(f"{title}\n{body}" for title, body in sections.items())


def _run(config: RunConfig) -> list[tuple[str, object]]:
    training, runtime = config.training, config.runtime
    address = joined_address(config)
    cluster = f"cluster at {address}" if address else "own cluster on this host"
    return [
        ("iterations", training.train_iters),
        ("output", training.output_dir),
        ("tokenizer", training.tokenizer_name_or_path),
        ("training prompts", ", ".join(config.data.train_files)),
        ("validation prompts", ", ".join(config.data.val_files) or "none"),
        ("runtime", f"ray, {cluster}" if runtime.kind is RuntimeKind.RAY else "local"),
        ("device", config.device.kind.value),
        ("reward", f"{config.reward.kind.value}"),
    ]


def _roles(config: RunConfig) -> list[list[object]]:
    rows: list[list[object]] = [
        ["role", "model", "pool", "ranks", "TP", "PP", "DP", "precision", "weights"]
    ]
    for role in Role:
        section, layout = config.role(role), config.layout(role)
        where: list[object] = [config.pool_of(role), layout.world_size]
        if _is_rule(config, role):
            rows.append([role.value, "rule", *where, NONE, NONE, layout.dp, NONE, NONE])
            continue
        precision = "bf16" if section.bf16 else "fp32"
        sizes = [layout.tp, layout.pp, layout.dp]
        rows.append([role.value, section.model, *where, *sizes, precision, section.load])
    return rows


def _is_rule(config: RunConfig, role: Role) -> bool:
    return role is Role.REWARD and config.reward.kind is RewardKind.RULE


def _processes(config: RunConfig) -> list[list[object]]:
    """One line per pool and host: its devices and the ranks on them, in this order."""
    rows: list[list[object]] = [["pool", "host", "devices", "ranks", "roles"]]
    for pool, per_host in config.resource_pool.items():
        roles = ", ".join(role.value for role in config.roles_of(pool))
        first = 0
        for host, count in enumerate(per_host):
            rows.append([pool, host, _span(0, count), _span(first, count), roles])
            first += count
    return rows


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _batch(config: RunConfig) -> list[tuple[str, object]]:
    actor = config.actor_rollout
    per_rank = config.samples_per_iteration // config.layout(Role.ACTOR_ROLLOUT).dp
    return [
        ("prompts (global_batch_size)", config.training.global_batch_size),
        ("samples per prompt", actor.n_samples_per_prompt),
        ("samples", config.samples_per_iteration),
        ("samples per actor replica", per_rank),
        ("generated at once per replica", _at_once(actor.num_samples_per_step, per_rank)),
        ("longest prompt + response", f"{actor.max_prompt_length} + {actor.max_new_tokens} tokens"),
        ("decoding", f"sample, temperature {actor.temperature:g}" if actor.do_sample else "greedy"),
    ]


def _at_once(limit: int | None, per_rank: int) -> str:
    if limit is None:
        return f"{per_rank}, or as many as the KV cache holds"
    at_once = min(limit, per_rank)
    return f"{at_once} (rounds: {-(-per_rank // at_once)})"


def _forwards(config: RunConfig) -> list[list[object]]:
    rows: list[list[object]] = [["role", "samples per rank", "micro-batch", "micro-batches"]]
    for role in Role:
        if not _is_rule(config, role):
            samples = config.samples_per_iteration // config.layout(role).dp
            micro = min(config.role(role).micro_batch_size, samples)
            rows.append([role.value, samples, micro, -(-samples // micro)])
    return rows


def _updates(config: RunConfig) -> list[list[object]]:
    actor, critic = config.actor_rollout, config.critic
    rows: list[list[object]] = [
        ["role", "mini-batch", "mini-batches", "epochs", "steps per iteration",
         "micro-batches per rank and step", "steps in the run", "learning rate"]
    ]  # fmt: skip
    updates = {
        Role.ACTOR_ROLLOUT: (actor.ppo_mini_batch_size, actor.ppo_epochs, actor.optimizer.lr),
        Role.CRITIC: (
            critic.critic_mini_batch_size, critic.critic_update_epochs, critic.optimizer.lr,
        ),
    }  # fmt: skip
    for role, (size, epochs, lr) in updates.items():
        count = config.samples_per_iteration // size
        micro = size // (config.layout(role).dp * config.role(role).micro_batch_size)
        steps = count * epochs
        total = steps * config.training.train_iters
        rows.append([role.value, size, count, epochs, steps, micro, total, f"{lr:g}"])
    return rows
