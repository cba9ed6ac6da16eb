"""Estimate an iteration's tokens, model FLOPs and time, by phase, at the longest lengths."""

from mindspeed_rlxf.config.enums import OldLogProbs, Role
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig
from mindspeed_rlxf.data.mini_batches import sample_flops
from mindspeed_rlxf.engine.flop_counter import ADAPT, FORWARD, TRAIN
from mindspeed_rlxf.ops.planning.memory import has_model
from mindspeed_rlxf.reporting.table import table

UNKNOWN = "-"
GENERATION = "generation"


def describe_work(config: RunConfig) -> str:
    """Return a table with a line per phase: samples, tokens, FLOPs, and minutes if known.

    FLOPs are those of `throughput/flops_per_device`, for prompts and responses of the greatest
    length. Minutes need `plan.peak_tflops`, and leave generation out: decoding is bound by memory
    bandwidth.
    """
    actor = config.actor_rollout
    longest = actor.max_prompt_length + actor.max_new_tokens
    samples = config.samples_per_iteration
    rows: list[list[object]] = [["phase", "passes", "tokens", "PFLOP", "devices", "minutes"]]
    total_flops = total_minutes = 0.0
    for phase, role, passes in _phases(config):
        section = config.role(role)
        outputs = 0 if role in (Role.CRITIC, Role.REWARD) else actor.max_new_tokens
        flops = passes * samples * sample_flops(section.architecture, longest, outputs)
        devices = config.layout(role).world_size
        if role is Role.ACTOR_ROLLOUT and phase == GENERATION and config.train_rollout_split:
            devices = config.rollout_layout.world_size
        minutes = None if phase == GENERATION else _minutes(config, flops, devices)
        total_flops += flops
        total_minutes += minutes or 0.0
        rows.append(
            [phase, passes, samples * longest, f"{flops / 1e15:.3g}", devices, _show(minutes)]
        )
    if config.plan.peak_tflops is None:
        minutes = None
        hint = "minutes need plan.peak_tflops, the peak of a device"
    else:
        minutes = total_minutes
        hint = (
            f"at {config.plan.mfu:g} of {config.plan.peak_tflops:g} TFLOPS; no minutes for "
            "generation, which is bound by memory bandwidth"
        )
    total = f"{total_flops / 1e15:.3g}"
    rows.append(["all, one after the other", "", "", total, "", _show(minutes)])
    return f"{table(rows)}\n  lengths are the greatest allowed; {hint}"


def _phases(config: RunConfig) -> list[tuple[str, Role, int]]:
    """Return (name, role, passes), a pass being a forward pass over all samples.

    A backward pass counts as two forward passes (arXiv:2204.02311, appendix B).
    """
    actor = config.actor_rollout
    phases: list[tuple[str, Role, int]] = []
    if not actor.fixed_responses:
        phases.append((GENERATION, Role.ACTOR_ROLLOUT, FORWARD))
    for role in config.roles:
        if role is not Role.ACTOR_ROLLOUT and has_model(config, role):
            phases.append((f"{role.value}, forward", role, FORWARD))
    if config.old_log_probs is OldLogProbs.RECOMPUTE:
        phases.append(("old log-probs", Role.ACTOR_ROLLOUT, FORWARD))
    phases.append(("actor update", Role.ACTOR_ROLLOUT, actor.ppo_epochs * _cost_of_update(actor)))
    critic = config.critic
    if critic is not None:
        epochs = critic.critic_update_epochs
        phases.append(("critic update", Role.CRITIC, epochs * _cost_of_update(critic)))
    return phases


def _cost_of_update(section: LearningConfig) -> int:
    return ADAPT if section.lora.rank else TRAIN


def _minutes(config: RunConfig, flops: float, devices: int) -> float | None:
    peak = config.plan.peak_tflops
    if peak is None:
        return None
    return flops / (devices * peak * 1e12 * config.plan.mfu) / 60


def _show(minutes: float | None) -> str:
    return UNKNOWN if minutes is None else f"{minutes:.2g}"
