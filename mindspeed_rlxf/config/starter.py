"""Warn about defaults kept from the older toolkit, and write a first configuration."""

import json
from collections.abc import Mapping

from mindspeed_rlxf.config.schema import LearningConfig, RunConfig

STAGES = {"ppo": "ray_ppo", "grpo": "ray_grpo", "dpo": "ray_online_dpo"}
"""Word for a stage -> `training.stage`."""


GSM8K_KEYS = {"ground_truth_key": "reward_model.ground_truth"}
"""Of the files that `examples/data_preprocess` makes."""


def list_warnings(config: RunConfig) -> list[str]:
    """Return warnings about absent keys whose defaults are rarely wanted.

    They are the older toolkit's: greedy responses, and a mini-batch of one sample.
    """
    actor = config.actor_rollout
    critic = config.critic
    samples = config.samples_per_iteration
    warnings = []
    if not (actor.do_sample or actor.fixed_responses or "do_sample" in actor.model_fields_set):
        warnings.append(
            "actor_rollout.do_sample is not given, so each response is the greedy one and the "
            "policy explores nothing; usual is do_sample: true"
        )
    mini_batches: list[tuple[str, LearningConfig, str, int]] = [
        ("actor_rollout", actor, "ppo_mini_batch_size", actor.ppo_mini_batch_size)
    ]
    if critic:
        size = critic.critic_mini_batch_size
        mini_batches.append(("critic", critic, "critic_mini_batch_size", size))
    for role, section, key, size in mini_batches:
        if key in section.model_fields_set or samples < 4 * size:
            continue
        warnings.append(
            f"{role}.{key} is not given, so each of the {samples // size} optimizer steps of "
            f"an iteration sees {size} sample; usual is a quarter of the samples, {key}: "
            f"{samples // 4}"
        )
    return warnings


def first_yaml(
    stage: str,
    model: str,
    train_files: str,
    num_devices: int,
    seq_length: int,
    reward_model: str | None = None,
    data_keys: Mapping[str, str] = GSM8K_KEYS,
    rules: Mapping[str, str] | None = None,
    recompute: bool = True,
) -> str:
    """Return the YAML of a first run of a Hugging Face model.

    All roles share the devices, and a mini-batch is a quarter of an iteration's samples.

    Args:
        stage: A key of STAGES.
        model: Hugging Face folder; critic and reference start from it.
        train_files: Data file of prompts.
        num_devices: Devices of the host; the batches are multiples of it.
        seq_length: Longest prompt and response, tokens; half of them for each.
        reward_model: Folder of a sequence classifier; None = the data sources' rules score.
        data_keys: Further keys of the section `data`, such as those of the file's columns.
        rules: Data source -> rule, for sources without a built-in one.
        recompute: Whether updates recompute activations.
    """
    responses = {"ppo": 1, "grpo": 8, "dpo": 2}[stage]
    prompts = -(-64 // num_devices) * num_devices * (2 if stage == "ppo" else 1)
    mini_batch = prompts * responses // 4
    mini_batch = max(mini_batch - mini_batch % (2 * num_devices), 2 * num_devices)
    while prompts * responses % mini_batch:
        mini_batch -= 2 * num_devices
    if reward_model is None:
        listed = ", ".join(f"{_quote(source)}: {rule}" for source, rule in (rules or {}).items())
        reward = f"{{kind: rule, rules: {{{listed}}}}}" if listed else "{kind: rule}"
    else:
        reward = f"{{kind: huggingface, load: {_quote(reward_model)}}}"
    keys = "".join(f"{key}: {_quote(value)}, " for key, value in data_keys.items())
    half = seq_length // 2
    shared = f"load: {_quote(model)}"
    sampling = "do_sample: true" + (f", n_samples_per_prompt: {responses}" if responses > 1 else "")
    lines = [
        f"# {stage.upper()} of {model}; the plan: dry_run=true.",
        "# Output goes to outputs/NAME, NAME being this file's; training.output_dir changes that.",
        "training:",
        f"  stage: {STAGES[stage]}",
        "  train_iters: 100",
        f"  global_batch_size: {prompts}  # prompts of an iteration",
        f"  seq_length: {seq_length}",
        "  micro_batch_size: 2",
        "  bf16: true",
        "  use_distributed_optimizer: true",
        *(["  recompute: full  # less memory for a third more time of an update"] * recompute),
        f"  tokenizer_name_or_path: {_quote(model)}",
        f"actor_rollout: {{{shared}, {sampling}, max_prompt_length: {half}, "
        f"max_new_tokens: {seq_length - half}, ppo_mini_batch_size: {mini_batch}, lr: 1.0e-6}}",
    ]
    if stage == "ppo":
        lines.append(
            f"critic: {{{shared}, critic_mini_batch_size: {mini_batch}, lr: 5.0e-6, "
            "warmup_iters: 5}"
        )
    lines += [
        f"reward: {reward}",
        f"data: {{train_files: {_quote(train_files)}, {keys}overlong_prompts: drop}}",
        f"resource_pool: {{main: {num_devices}}}",
    ]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """Return a string as YAML, in quotes."""
    return json.dumps(text, ensure_ascii=False)
