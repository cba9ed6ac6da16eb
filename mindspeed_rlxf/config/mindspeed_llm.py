"""Translate the YAML of MindSpeed-LLM's Ray PPO to our keys, before anything is validated.

`mindspeed_llm_keys` has the table of keys without effect and of refused keys.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.enums import (
    AdvantageWhiten,
    AdvEstimator,
    KlIn,
    KlPenalty,
    OverlongPrompts,
    RewardKind,
    Stage,
)
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.given import ROLES, Given, Tree, set_default
from mindspeed_rlxf.config.hf_config import read_hf_config
from mindspeed_rlxf.config.mindspeed_llm_keys import NO_OPS, REFUSED
from mindspeed_rlxf.config.suggest import format_value

ACTOR = "actor_rollout"
OLD_ENTROPY_COEFF = 0.001
"""Default of the older toolkit, which never reads the key."""
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
}
"""Key of `model.<name>`, `training` or the actor -> the key here that replaces or must match it."""


def translate(given: Given) -> None:
    """Replace the older toolkit's keys in place; keys without effect are noted, others refused.

    In a YAML of that toolkit (it nests roles, or some key of it was found) also note the keys that
    mean something else here.
    """
    training = given.sections["training"]
    for name, values in given.sections["model"].items():
        if "padded_vocab_size" in values:  # the rows of the checkpoint's embedding
            values["vocab_size"] = values.pop("padded_vocab_size")
            given.renamed[f"model.{name}.vocab_size"] = f"model.{name}.padded_vocab_size"
        values.pop("seq_length", None)  # training.seq_length is required, and beat it there too
        _translate_query_groups(given, f"model.{name}.group_query_attention", values)
    _rename_recompute(given)
    if found := _take(given, "seed"):
        given.renamed["training.seed"], training["seed"] = found
    for name, values in given.sections["model"].items():
        other = values.pop("seed", None)
        if other not in (None, training.get("seed")):
            meaning = "one seed for the run, that of training or of the actor's model"
            given.note(meaning, f"model.{name}.seed={format_value(other)}")
    _translate_data(given)
    _translate_category(given)
    _translate_algorithm(given)
    if found := _take(given, "inference_tensor_model_parallel_size"):
        _move(given, *found, "rollout.tensor_model_parallel_size")
    found = _take(given, "use_deter_comp")
    if found and found[1] not in (None, False):  # false leaves the choice to the device
        _move(given, *found, "training.deterministic")
    for section, values in _role_sections(given).items():
        for key in sorted(values.keys() & (NO_OPS.keys() | REFUSED.keys())):
            _note_or_refuse(given, f"{section}.{key}", key, values.pop(key))
    _add_vocab_sizes(given)
    if given.nested or given.notes:
        _note_differences(given)


def _take(given: Given, key: str) -> tuple[str, Any] | None:
    """Remove a key from the actor's section, training and the actor's model.

    Returns the path and value of the one that counts, in that order.
    """
    model = str(given.model_of(ACTOR))
    homes = {f"model.{model}": given.sections["model"].get(model, {})}
    homes |= {name: given.sections[name] for name in ("training", ACTOR)}
    found = None
    for name, values in homes.items():
        if key in values:
            path = f"{name}.{key}"
            found = given.renamed.get(path, path), values.pop(key)
    return found


def _take_flag(given: Given, key: str) -> tuple[str, bool] | None:
    found = _take(given, key)
    if found and not isinstance(found[1], bool):
        _refuse_non_flag(given, *found)
        return None
    return found


def _move(given: Given, path: str, value: Any, target: str) -> None:
    """Set `section.key` to the value written at `path`; another value there is a problem."""
    section, key = target.split(".")
    present = given.sections[section].setdefault(key, value)
    if present == value:
        given.renamed.setdefault(target, path)
    else:
        _refuse_two_values(given, path, target, present)


def _refuse_two_values(given: Given, path: str, target: str, present: Any) -> None:
    rule = f"and {ref(target)}={format_value(present)} say the same thing differently"
    given.problems.append(Problem(path, rule, remedy="keep one"))


def _refuse_non_flag(given: Given, path: str, value: Any) -> None:
    shown = format_value(value)
    given.problems.append(Problem(path, "must be true or false", shown, "use true"))


def _role_sections(given: Given) -> Tree:
    """Return the sections that may have keys of a role: models, training, roles."""
    models = {f"model.{name}": values for name, values in given.sections["model"].items()}
    return models | {name: given.sections[name] for name in ("training", *ROLES)}


def _translate_query_groups(given: Given, path: str, values: Tree) -> None:
    """Read Megatron's flag: true without a number means one group, false one group per head."""
    if "group_query_attention" not in values:
        return
    flag, groups = values.pop("group_query_attention"), values.get("num_query_groups")
    if not isinstance(flag, bool):
        _refuse_non_flag(given, path, flag)
    elif flag:
        values["num_query_groups"] = 1 if groups is None else groups
    elif groups not in (None, values.get("num_attention_heads")):
        rule = f"contradicts num_query_groups={format_value(groups)}"
        given.problems.append(Problem(path, rule, False, "remove one of them"))


def _rename_recompute(given: Given) -> None:
    for name, values in _role_sections(given).items():
        for key in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
            if values.get(key, "") is None:
                del values[key]
        if "recompute_granularity" in values:
            older, path = values.pop("recompute_granularity"), f"{name}.recompute"
            if (present := values.setdefault("recompute", older)) != older:
                _refuse_two_values(given, f"{path}_granularity", path, present)
            given.renamed[path] = f"{path}_granularity"


def _translate_data(given: Given) -> None:
    """Translate data_path, no_shuffle, dataset_with_labels and dataset_additional_keys."""
    data = given.sections["data"]
    if found := _take(given, "data_path"):
        _move(given, found[0], _parse_prefixes(given, *found), "data.data_path")
        set_default(data, "default_data_source", "prompts")
        if data.get("overlong_prompts") is None:
            data["overlong_prompts"] = OverlongPrompts.DROP.value
            given.note(
                "prompts over max_prompt_length are dropped and counted (MindSpeed-LLM cut off "
                "their end, where a chat's answer begins)",
                "data.overlong_prompts=drop",
            )
    if found := _take_flag(given, "no_shuffle"):
        _move(given, found[0], not found[1], "data.shuffle")
    if (found := _take_flag(given, "dataset_with_labels")) and found[1]:
        set_default(data, "ground_truth_key", "labels")
        given.note("data.ground_truth_key=labels", f"{found[0]}=true")
    if found := _take(given, "dataset_additional_keys"):
        path, value = found
        names = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            shown = format_value(value)
            given.problems.append(Problem(path, "must be names of columns", shown, "use labels"))
            return
        if "labels" in names:
            set_default(data, "ground_truth_key", "labels")
        meaning = "all columns of a data set can be used; rules compare with data.ground_truth_key"
        given.note(meaning, f"dataset_additional_keys={' '.join(names)}")


def _parse_prefixes(given: Given, path: str, value: Any) -> Any:
    """Return the prefixes in `a,b` or `weight,a`; several weights are a problem."""
    if not isinstance(value, str):
        return value
    parts = [part for part in map(str.strip, value.split(",")) if part]
    if len(parts) % 2 or not all(part.replace(".", "", 1).isdigit() for part in parts[::2]):
        return parts
    names = parts[1::2]
    if len(names) > 1:
        rule = "data sets are not blended by weight"
        remedy = f"use {ref('data.data_path')}=[{', '.join(names)}], where each prompt counts once"
        given.problems.append(Problem(path, rule, value, remedy, colon=True))
    return names


def _translate_category(given: Given) -> None:
    """Check `dataset_category`: 1 = the verifier scores every prompt, 0 = the reward model."""
    reward = given.sections["reward"]
    wanted = "1" if reward.get("verifier") else "0"
    if found := _take(given, "dataset_category"):
        path, value = found
        if set(str(value).replace(" ", "").split(",")) == {wanted}:
            by = "the verifier" if wanted == "1" else "the reward model"
            given.note(f"{by} scores every prompt", f"dataset_category={value}")
        else:
            remedy = (
                f"use {wanted} (1 = reward.verifier, 0 = reward model), or reward.kind=rule with a "
                "rule for each data source"
            )
            rule, shown = "one reward scores every prompt here", format_value(value)
            given.problems.append(Problem(path, rule, shown, remedy, colon=True))
    if reward.get("verifier") is True:
        set_default(reward, "kind", RewardKind.RULE.value)


def _translate_algorithm(given: Given) -> None:
    sections = given.sections
    algorithm, critic = sections["algorithm"], sections["critic"]
    if found := _take(given, "missing_eos_penalty"):
        _move(given, *found, "algorithm.missing_eos_penalty")
    whiten = algorithm.get("advantage_whiten")
    if isinstance(whiten, bool):
        word = AdvantageWhiten.BATCH if whiten else AdvantageWhiten.NONE
        algorithm["advantage_whiten"] = word.value
    if algorithm.get("adv_estimator") == "group_norm":
        _translate_group_norm(given, algorithm)
    clip = critic.get("cliprange_value")
    if isinstance(clip, (int, float)) and not isinstance(clip, bool) and clip <= 0:
        critic["cliprange_value"] = None
        given.note("values are not clipped (null)", f"critic.cliprange_value={format_value(clip)}")
    if sections["training"].get("stage") == Stage.RAY_ONLINE_DPO.value:
        for section in (ACTOR, "training"):
            if sections[section].get("entropy_coeff") == OLD_ENTROPY_COEFF:
                del sections[section]["entropy_coeff"]
                meaning = "the loss of a pair has no entropy term"
                given.note(meaning, f"entropy_coeff={OLD_ENTROPY_COEFF}")


def _translate_group_norm(given: Given, algorithm: Tree) -> None:
    """Read the older toolkit's word for the advantages of GRPO.

    It puts the z-score of a group at the last token and sums from there, which with gamma 1 is the
    z-score on every token. It whitens them, and computes low_var_kl in the loss.
    """
    algorithm["adv_estimator"] = AdvEstimator.GRPO.value
    set_default(algorithm, "advantage_whiten", AdvantageWhiten.BATCH.value)
    gamma = algorithm.get("gamma", 1.0)
    if gamma != 1.0:
        estimator = f"{ref('algorithm.adv_estimator')}=group_norm"
        rule = f"must be 1 with {estimator}, where a score counts for every token alike"
        remedy = "use 1.0, or reinforce_plus_plus"
        given.problems.append(Problem("algorithm.gamma", rule, format_value(gamma), remedy))
    penalty = algorithm.get("kl_penalty")
    if algorithm.get("kl_in") in (None, KlIn.LOSS.value) and penalty == KlPenalty.KL.value:
        algorithm["kl_penalty"] = KlPenalty.LOW_VAR_KL.value
        given.note(
            "low_var_kl in the loss, which is what MindSpeed-LLM computed in stage ray_grpo "
            "whatever the key said",
            "kl_penalty=kl",
        )


def _note_or_refuse(given: Given, path: str, key: str, value: Any) -> None:
    path = given.renamed.get(path, path)
    refusal, entry, shown = REFUSED.get(key), NO_OPS.get(key), format_value(value)
    if refusal:
        if not refusal.is_neutral(value):
            rule = f"is not supported: {refusal.why}"
            given.problems.append(Problem(path, rule, shown, refusal.remedy))
    elif entry and entry.allows(value):
        given.note(entry.meaning, f"{key}={shown}")
    elif entry:
        words = ["a single value"] if isinstance(entry.allowed, str) else entry.allowed[:2]
        good = " or ".join(w if isinstance(w, str) else format_value(w) for w in words)
        rule = f"must be {good}: {entry.meaning}"
        given.problems.append(Problem(path, rule, shown, f"use {entry.remedy or good}"))


def _add_vocab_sizes(given: Given) -> None:
    """Take a missing `vocab_size` of a used model from config.json in the tokenizer's folder."""
    folder = given.sections["training"].get("tokenizer_name_or_path")
    roles = [role for role in ROLES if "vocab_size" not in given.sections[role]]
    rule_kinds = (RewardKind.RULE.value, RewardKind.HUGGING_FACE.value)
    if given.sections["reward"].get("kind") in rule_kinds:
        roles = [role for role in roles if role != "reward"]
    used = {str(given.model_of(role)) for role in roles}
    for name, architecture in given.sections["model"].items():
        if "vocab_size" in architecture or not isinstance(folder, str) or name not in used:
            continue
        key, tokenizer = f"model.{name}.vocab_size", Path(os.path.expanduser(folder))
        try:
            found = read_hf_config(tokenizer).get("vocab_size")
            if type(found) is not int:
                shown = format_value(found)
                raise ValueError(f"its config.json has vocab_size={shown}; correct it")
        except ValueError as error:
            source = f"{ref('training.tokenizer_name_or_path')}={folder}"
            rule = f"is required, and {source} does not give it: {error}, or add the key"
            given.problems.append(Problem(key, rule))
            found = 1  # a legal value, as the problem is reported
        else:
            given.note(f"taken from {tokenizer / 'config.json'}", f"{key}={found}")
        architecture["vocab_size"] = found


def _note_differences(given: Given) -> None:
    actor, training = given.sections[ACTOR], given.sections["training"]
    if coefficient := actor.get("entropy_coeff", training.get("entropy_coeff")):
        given.note(
            "the loss has an entropy bonus of this weight (MindSpeed-LLM accepted the key and left "
            "the term out; 0 does the same)",
            f"entropy_coeff={coefficient}",
        )
    if actor.get("do_sample") is True and "temperature" not in actor:
        given.note("temperature is 1 (0.7 in MindSpeed-LLM)", "do_sample=true")
    if training.get("stage") == Stage.RAY_ONLINE_DPO.value:
        given.note(
            "samples are counted, two of them are a pair (MindSpeed-LLM counted pairs)",
            "ppo_mini_batch_size, micro_batch_size",
        )
