"""Translate MindSpeed-LLM's Ray PPO YAML to our keys, before anything is validated.

`keys` lists keys without effect and refused keys.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_rlxf.compat.mindspeed_llm.keys import NO_OPS, REFUSED, allows
from mindspeed_rlxf.config.enums import (
    AdvantageWhiten,
    AdvEstimator,
    KlPenalty,
    OverlongPrompts,
    RewardKind,
    Stage,
)
from mindspeed_rlxf.config.hf_config import read_hf_config
from mindspeed_rlxf.config.keys import ROLES, WITHOUT_MODEL, Tree
from mindspeed_rlxf.config.problems import Problem, format_value, ref
from mindspeed_rlxf.config.raw_config import RawConfig, set_default

ACTOR = "actor_rollout"
OLD_ENTROPY_COEFF = 0.001
"""The older toolkit's default; it never reads the key."""
MOVED = {
    "data_path": "data.data_path",
    "no_shuffle": "data.shuffle",
    "missing_eos_penalty": "algorithm.missing_eos_penalty",
    "seed": "training.seed",
    "dataset_additional_keys": "data.ground_truth_key",
    "dataset_with_labels": "data.ground_truth_key",
    "dataset_category": "reward.verifier",
    "padded_vocab_size": "model.<name>.vocab_size",
    "group_query_attention": "model.<name>.num_query_groups",
    "seq_length": "training.seq_length",
    "inference_tensor_model_parallel_size": "rollout.tensor_model_parallel_size",
    "use_deter_comp": "training.deterministic",
    "recompute_granularity": "training.recompute",
    "ulysses_sequence_parallel_size": "training.context_parallel_size",
}
"""Key in `model.<name>`, `training` or the actor -> the key here replacing or matching it."""
TAKEN = (
    "seed", "missing_eos_penalty", "inference_tensor_model_parallel_size", "use_deter_comp",
    "no_shuffle",
)  # fmt: skip
"""Keys in MOVED whose value is only moved, from where `_take` finds it."""


def translate(tree: Mapping[str, Any]) -> RawConfig:
    """Return a tree with the older toolkit's keys replaced by ours; ours are kept.

    Keys without effect are noted, others refused. For a YAML from that toolkit (it nests roles, or
    has its keys) also notes keys with another meaning here.
    """
    raw = RawConfig(tree)
    _replace_keys(raw)
    if raw.nested or raw.notes:
        _note_other_meanings(raw)
    return raw


def _replace_keys(raw: RawConfig) -> None:
    training = raw.sections["training"]
    for name, values in raw.sections["model"].items():
        if "padded_vocab_size" in values:  # the rows of the checkpoint's embedding
            values["vocab_size"] = values.pop("padded_vocab_size")
            raw.renamed[f"model.{name}.vocab_size"] = f"model.{name}.padded_vocab_size"
        values.pop("seq_length", None)  # training.seq_length is required, and beat it there too
        _translate_query_groups(raw, f"model.{name}.group_query_attention", values)
    for key in TAKEN:
        path, value = _take(raw, key)
        if key == "no_shuffle" and isinstance(value, bool):
            value = not value
        if path and (value or key != "use_deter_comp"):  # its false leaves the choice to the device
            raw.move(path, value, MOVED[key])
    for name, values in raw.sections["model"].items():
        other = values.pop("seed", None)
        if other not in (None, training.get("seed")):
            meaning = "one seed for the run, that of training or of the actor's model"
            raw.note(meaning, f"model.{name}.seed={format_value(other)}")
    _translate_data(raw)
    _translate_category(raw)
    _translate_algorithm(raw)
    models = {f"model.{name}": values for name, values in raw.sections["model"].items()}
    roles = {name: raw.sections[name] for name in ("training", *ROLES)}
    for section, values in {**models, **roles}.items():
        for key in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
            if values.get(key, "") is None:
                del values[key]
        if "recompute_granularity" in values:
            path, value = f"{section}.recompute_granularity", values.pop("recompute_granularity")
            raw.move(path, value, f"{section}.recompute")
        if "ulysses_sequence_parallel_size" in values:
            path = f"{section}.ulysses_sequence_parallel_size"
            value = values.pop("ulysses_sequence_parallel_size")
            raw.move(path, value, f"{section}.context_parallel_size")
        for key in sorted(values.keys() & (NO_OPS.keys() | REFUSED.keys())):
            _note_or_refuse(raw, f"{section}.{key}", key, values.pop(key))
    _add_vocab_sizes(raw)


def _note_other_meanings(raw: RawConfig) -> None:
    actor, training = raw.sections[ACTOR], raw.sections["training"]
    if coefficient := actor.get("entropy_coeff", training.get("entropy_coeff")):
        meaning = "the loss has an entropy bonus of this weight, which MindSpeed-LLM left out"
        raw.note(meaning, f"entropy_coeff={coefficient}")
    if actor.get("do_sample") is True and "temperature" not in actor:
        raw.note("temperature is 1 (0.7 in MindSpeed-LLM)", "do_sample=true")
    if training.get("stage") == Stage.RAY_ONLINE_DPO.value:
        meaning = "samples are counted, two of them are a pair (MindSpeed-LLM counted pairs)"
        raw.note(meaning, "ppo_mini_batch_size, micro_batch_size")


def _take(raw: RawConfig, key: str) -> tuple[str, Any]:
    # Removes the key everywhere; the actor's own has precedence. Path "" if there is none.
    found: tuple[str, Any] = "", None
    for name, values in reversed(raw.sections_of_role(ACTOR).items()):
        if key in values:
            path = f"{name}.{key}"
            found = raw.renamed.get(path, path), values.pop(key)
    return found


def _translate_query_groups(raw: RawConfig, path: str, values: Tree) -> None:
    # Megatron's flag: true without a number means one group, false one group per head.
    flag, groups = values.pop("group_query_attention", None), values.get("num_query_groups")
    if flag is True:
        set_default(values, num_query_groups=1)
    elif flag or (flag is False and groups not in (None, values.get("num_attention_heads"))):
        rule = f"contradicts num_query_groups={format_value(groups)}"
        raw.refuse(path, rule, flag, "remove one of them")


def _translate_data(raw: RawConfig) -> None:
    """Translate data_path, dataset_with_labels and dataset_additional_keys."""
    data = raw.sections["data"]
    path, value = _take(raw, "data_path")
    if path:
        raw.move(path, _parse_prefixes(raw, path, value), "data.data_path")
        if data.get("overlong_prompts") is None:
            meaning = "prompts over max_prompt_length are dropped (MindSpeed-LLM truncated them)"
            raw.note(meaning, "data.overlong_prompts=drop")
        overlong = OverlongPrompts.DROP.value
        set_default(data, default_data_source="prompts", overlong_prompts=overlong)
    labels, value = _take(raw, "dataset_with_labels")
    if labels and not isinstance(value, bool):
        raw.refuse(labels, "must be true or false", value, "use true")
    path, names = _take(raw, "dataset_additional_keys")
    columns = names.replace(",", " ").split() if isinstance(names, str) else names
    if isinstance(columns, list) and all(isinstance(name, str) for name in columns):
        meaning = "all columns of a data set can be used; rules compare with data.ground_truth_key"
        raw.note(meaning, f"dataset_additional_keys={' '.join(columns)}")
    elif path:
        raw.refuse(path, "must be names of columns", names, "use labels")
    if value is True or (isinstance(columns, list) and "labels" in columns):
        set_default(data, ground_truth_key="labels")


def _parse_prefixes(raw: RawConfig, path: str, value: Any) -> Any:
    """Return the prefixes in `a,b` or `weight,a`; several weights are a problem."""
    if not isinstance(value, str):
        return value
    words = [word.strip() for word in value.split(",") if word.strip()]
    weights = words[::2]
    prefixes = words[1::2]
    has_weights = len(weights) == len(prefixes) and all(map(_is_weight, weights))
    if not has_weights:
        return words
    if len(prefixes) > 1:
        remedy = f"use {ref('data.data_path')}=[{', '.join(prefixes)}]"
        raw.refuse(path, "must not blend data sets by weight", value, remedy)
    return prefixes


def _is_weight(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()


def _translate_category(raw: RawConfig) -> None:
    """Check `dataset_category`: 1 = the verifier scores every prompt, 0 = the reward model."""
    reward = raw.sections["reward"]
    wanted = "1" if reward.get("verifier") else "0"
    path, value = _take(raw, "dataset_category")
    if {*str(value).replace(" ", "").split(",")} == {wanted}:
        by = "the verifier" if wanted == "1" else "the reward model"
        raw.note(f"{by} scores every prompt", f"dataset_category={value}")
    elif path:
        remedy = f"use {wanted} (1 = reward.verifier, 0 = reward model), or reward.kind=rule"
        raw.refuse(path, "must be one number, as one reward scores all prompts", value, remedy)
    if reward.get("verifier") is True:
        set_default(reward, kind=RewardKind.RULE.value)


def _translate_algorithm(raw: RawConfig) -> None:
    sections = raw.sections
    algorithm, critic = sections["algorithm"], sections["critic"]
    if isinstance(whiten := algorithm.get("advantage_whiten"), bool):
        algorithm["advantage_whiten"] = "batch" if whiten else "none"
    if algorithm.get("adv_estimator") == "group_norm":
        _translate_group_norm(raw, algorithm)
    clip = critic.get("cliprange_value")
    if isinstance(clip, (int, float)) and not isinstance(clip, bool) and clip <= 0:
        critic["cliprange_value"] = None
        raw.note("values are not clipped (null)", f"critic.cliprange_value={format_value(clip)}")
    if sections["training"].get("stage") == Stage.RAY_ONLINE_DPO.value:
        for section in (ACTOR, "training"):
            if sections[section].get("entropy_coeff") == OLD_ENTROPY_COEFF:
                coefficient = sections[section].pop("entropy_coeff")
                raw.note("the loss of a pair has no entropy term", f"entropy_coeff={coefficient}")


def _translate_group_norm(raw: RawConfig, algorithm: Tree) -> None:
    # MindSpeed-LLM puts a group's z-score at the last token and sums from there, which with gamma 1
    # is the z-score on every token. It whitens them, and computes low_var_kl in the loss.
    algorithm["adv_estimator"] = AdvEstimator.GRPO.value
    set_default(algorithm, advantage_whiten=AdvantageWhiten.BATCH.value)
    penalty = algorithm.get("kl_penalty")
    if algorithm.get("kl_in") in (None, "loss") and penalty == KlPenalty.KL.value:
        algorithm["kl_penalty"] = KlPenalty.LOW_VAR_KL.value
        raw.note("low_var_kl in the loss, as MindSpeed-LLM computed in ray_grpo", "kl_penalty=kl")


def _note_or_refuse(raw: RawConfig, path: str, key: str, value: Any) -> None:
    path = raw.renamed.get(path, path)
    refusal, entry = REFUSED.get(key), NO_OPS.get(key)
    if refusal and not allows((None, False, *refusal.neutral), value):
        raw.refuse(path, f"is not supported: {refusal.why}", value, refusal.remedy)
    elif entry and allows(entry.allowed, value):
        raw.note(entry.meaning, f"{key}={format_value(value)}")
    elif entry:
        words = ["a single value"] if isinstance(entry.allowed, str) else entry.allowed[:2]
        good = " or ".join(w if isinstance(w, str) else format_value(w) for w in words)
        raw.refuse(path, f"must be {good}: {entry.meaning}", value, f"use {entry.remedy or good}")


def _add_vocab_sizes(raw: RawConfig) -> None:
    """Take a used model's missing `vocab_size` from config.json in the tokenizer folder."""
    folder = raw.sections["training"].get("tokenizer_name_or_path")
    used = {
        str(raw.model_of(role))
        for role in ROLES
        if "vocab_size" not in raw.sections[role]
        and (role != "reward" or str(raw.sections[role].get("kind")) not in WITHOUT_MODEL)
    }
    for name, architecture in raw.sections["model"].items():
        if "vocab_size" in architecture or not isinstance(folder, str) or name not in used:
            continue
        key, tokenizer = f"model.{name}.vocab_size", Path(os.path.expanduser(folder))
        try:
            found = read_hf_config(tokenizer).get("vocab_size")
            if type(found) is not int:
                shown = format_value(found)
                raise ValueError(f"its config.json has vocab_size={shown}; correct it")
            raw.note(f"taken from {tokenizer / 'config.json'}", f"{key}={found}")
        except ValueError as error:
            source = f"{ref('training.tokenizer_name_or_path')}={folder}"
            raw.problems.append(
                Problem(key, f"is required, and {source} does not give it: {error}, or add the key")
            )
            found = 1  # a legal value, as the problem is reported
        architecture["vocab_size"] = found
