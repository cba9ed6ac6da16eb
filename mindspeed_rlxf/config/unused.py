"""Report keys with a non-default value but no effect in this run.

A field names its condition: without `used_if` a note, without `only_if` an error. A condition is a
path from the key's section or from RunConfig, such as `do_sample`, `!new_run`,
`training.nan_policy=skip` or `tensor_model_parallel_size>1`; "; " joins several.
"""

import re
from collections.abc import Iterator
from typing import Any

from mindspeed_rlxf.config.fields import Section, extra_of
from mindspeed_rlxf.config.problems import Problem, format_value
from mindspeed_rlxf.config.raw_config import RawConfig
from mindspeed_rlxf.config.schema import RoleConfig, RunConfig

CONDITION = re.compile(r"(!?)([\w.]+)(!?=|>|)(.*)")

TEXTS = {
    "estimator.needs_critic": "an algorithm.adv_estimator that has a critic",
    "estimator.discounts": "an algorithm.adv_estimator that reads token rewards",
    "estimator.reads_token_rewards": "an algorithm.adv_estimator that discounts token rewards",
    "reads_lam": "a use for it: critic_lam and lam_alpha replace it",
    "reads_clip_ratio": "a use for it: clip_ratio_low and clip_ratio_high replace it",
    "joins_cluster": "a cluster that is joined (runtime.address)",
    "counts_hosts": "a cluster that is joined (runtime.address), or device.memory_gib",
    "has_validation_prompts": "data.val_files or data.val_data_path",
    "happens": "validation.interval, before or after",
    "validation.happens": "validation.interval, before or after",
    "reads_rows": "data.train_files or data.val_files",
    "generates": "generated responses (actor_rollout.fixed_responses)",
    "!reads_reference": "a run in which neither reward nor loss reads the reference",
    "saves_during_training": "a save before the last iteration",
    "reads_reward_rules": "a rule that scores in training or validation",
    "counts_failures": "functions beside the reward model, or agents",
    "scoring_functions": "reward.functions",
    "architecture.num_experts": "num_experts in its model",
    "compares_responses": "an algorithm.adv_estimator that compares responses, as grpo or rloo",
    "runs_vllm": "rollout.engine=vllm",
    "rollout_tp=1": "a rollout tensor_model_parallel_size of 1",
    "!actor_rollout.architecture.num_experts": "!num_experts in its model",
    "rollout_tp>1": "a rollout tensor_model_parallel_size above 1",
    "runs_agents": "rollout.agent, rollout.program or rollout.tools",
    "rollout.runs_agents": "rollout.agent, rollout.program or rollout.tools",
    "opens_gateway": "rollout.gateway or rollout.program",
    "reward.scores_by_agent": "the rule agent in reward.rules or functions",
    "runs_slices": "rollout.max_staleness or rollout.agent",
    "runs_programs": "a rule of programs (code, code_all) in reward.rules or functions, or the "
    "tool python",
}
"""Conditions on properties unknown to users -> what the run lacks."""


def note_unused(config: RunConfig, raw: RawConfig) -> None:
    """Add notes and problems about unused keys to `raw`.

    A key shared by several roles is unused if no role uses it. Keys from a model's config.json
    (`model: auto`) are left out.
    """
    fields = [*_fields(config, "", config)]
    used_keys = set()
    for _, path, name, failed in fields:
        if failed is None:
            used_keys.add(raw.user_key(f"{path}{name}"))
    for section, path, name, failed in fields:
        value = getattr(section, name)
        key = raw.user_key(f"{path}{name}")
        is_default = value == type(section).model_fields[name].default
        if failed is None or key in used_keys or is_default or key.startswith("model.auto."):
            continue
        kind, condition = failed
        plain = list(value) if isinstance(value, tuple) else getattr(value, "value", value)
        text = TEXTS.get(condition, condition)
        text = f"no effect with {text[1:]}" if text[0] == "!" else f"no effect without {text}"
        if kind == "only_if":
            remedy = "remove one of them" if condition[0] == "!" else "remove it, or set that"
            raw.problems.append(Problem(key, f"has {text}", plain, remedy))
        else:
            raw.note(text, f"{key}={format_value(plain)}")


def idle_keys(config: RunConfig) -> set[str]:
    """Return the keys without effect in this run, whatever their value."""
    return {f"{path}{name}" for _, path, name, failed in _fields(config, "", config) if failed}


def _fields(
    section: Section, path: str, config: RunConfig
) -> Iterator[tuple[Section, str, str, tuple[str, str] | None]]:
    """Yield (section, its path, field, last failed condition with its kind) for each field.

    Leaves out roles not running, and RunConfig itself.
    """
    runs = [role.value for role in config.roles]
    for name, value in section:
        if isinstance(value, Section):
            if not isinstance(value, RoleConfig) or name in runs:
                yield from _fields(value, f"{path}{name}.", config)
        elif path:
            extra = extra_of(type(section).model_fields[name])
            used_if = f"{extra['used_if']}; {section.section_used_if}"
            failed = None
            for kind, conditions in (("used_if", used_if), ("only_if", extra["only_if"])):
                for condition in conditions.split("; "):
                    if condition and not _holds(condition, section, config):
                        failed = kind, condition
            yield section, path, name, failed


def _holds(condition: str, section: Section, config: RunConfig) -> bool:
    negated, path, sign, expected = CONDITION.findall(condition)[0]
    value: Any = section if hasattr(section, path.partition(".")[0]) else config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)  # a rule has no architecture
    value = getattr(value, "value", value)  # of an enum
    if sign == ">":
        return bool(value > float(expected))
    holds = str(value) == expected if sign else bool(value)
    return holds != bool(negated or sign == "!=")
