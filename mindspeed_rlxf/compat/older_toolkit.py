"""Translate the YAML of MindSpeed-LLM's Ray PPO to the keys and words of the schema.

Changes the sections in place, before they are typed. Keys without effect are removed, with a note;
keys of features that do not exist here become problems. `older_keys` lists these keys.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mindspeed_rlxf.compat.older_data import translate_category, translate_data
from mindspeed_rlxf.compat.older_keys import NO_OPS, REFUSED
from mindspeed_rlxf.compat.older_values import (
    ACTOR,
    reject_non_flag,
    reject_two_values,
    set_moved_key,
    take_value,
)
from mindspeed_rlxf.config.draft import Draft, Tree, set_default
from mindspeed_rlxf.config.enums import (
    CONFIGURED,
    AdvantageWhiten,
    AdvEstimator,
    KlIn,
    KlPenalty,
    Role,
    Stage,
)
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.hf_config import read_hf_config
from mindspeed_rlxf.config.suggest import format_value

GROUP_NORM = "group_norm"
"""Word of the older toolkit for the advantages of GRPO."""
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


def translate(draft: Draft, sections: Tree, nested: bool) -> None:
    """Replace the older toolkit's keys in `sections` in place; add problems and notes to `draft`.

    nested: the YAML has actor and reference under one key, as only the older toolkit's has
    If `nested`, or if `draft` has notes by then, it also notes the keys that remain and that have
    another meaning in the older toolkit.
    """
    for name, values in sections["model"].items():
        if "padded_vocab_size" in values:  # the rows of the checkpoint's embedding
            values["vocab_size"] = values.pop("padded_vocab_size")
            draft.spelled[f"model.{name}.vocab_size"] = f"model.{name}.padded_vocab_size"
        _translate_query_groups(draft, f"model.{name}.group_query_attention", values)
    _rename_recompute(draft, sections)
    _merge_seeds(draft, sections)
    translate_data(draft, sections)
    translate_category(draft, sections)
    _translate_algorithm(draft, sections)
    _translate_value_clip(draft, sections)
    for key in ("inference_tensor_model_parallel_size", "use_deter_comp"):
        found = take_value(draft, sections, key)
        # `use_deter_comp: false` leaves the choice to the device, as an absent key does.
        if found and (key != "use_deter_comp" or found[1] not in (None, False)):
            set_moved_key(draft, sections, *found, MOVED[key])
    _remove_older_keys(draft, sections)
    if nested or draft.notes:
        _note_differences(draft, sections)


def add_vocab_size(draft: Draft, sections: Tree, model: str, architecture: Tree) -> None:
    """Set a missing `vocab_size` of `architecture` from the config.json in the tokenizer's folder.

    Adds a note to `draft`, or a problem if the file lacks an integer or cannot be read. Does
    nothing if the key exists or no tokenizer is configured.
    """
    folder = sections["training"].get("tokenizer_name_or_path")
    if "vocab_size" in architecture or not isinstance(folder, str):
        return
    key, tokenizer = f"model.{model}.vocab_size", Path(os.path.expanduser(folder))
    try:
        found = read_hf_config(tokenizer).get("vocab_size")
        if type(found) is not int:
            raise ValueError(f"its config.json has vocab_size={format_value(found)}; correct it")
    except ValueError as error:
        given = f"{ref('training.tokenizer_name_or_path')}={folder}"
        rule = f"is required, and {given} does not give it: {error}, or add the key"
        draft.reject(Problem(key, rule))
        return
    architecture["vocab_size"] = found
    draft.note(f"taken from {tokenizer / 'config.json'}", f"{key}={found}")


def _translate_query_groups(draft: Draft, path: str, values: Tree) -> None:
    """Remove `group_query_attention`; set or check `num_query_groups` as Megatron reads the flag.

    Without the flag it does nothing.
    true:  the number stays; if there is none, it becomes 1
    false: every query head has a key head: a number other than that of the heads is a problem
    Other values of the flag are a problem.
    """
    if "group_query_attention" not in values:
        return
    flag, groups = values.pop("group_query_attention"), values.get("num_query_groups")
    if not isinstance(flag, bool):
        reject_non_flag(draft, path, flag)
    elif flag:
        values["num_query_groups"] = 1 if groups is None else groups
    elif groups not in (None, values.get("num_attention_heads")):
        rule = f"contradicts num_query_groups={format_value(groups)}"
        draft.reject(Problem(path, rule, False, "remove one of them"))


def _role_sections(sections: Tree) -> Tree:
    """Return path -> section for all that may have keys of a role: models, training, roles."""
    models = {f"model.{name}": values for name, values in sections["model"].items()}
    roles = (role.value for role in CONFIGURED)
    return models | {name: sections[name] for name in ("training", *roles)}


def _rename_recompute(draft: Draft, sections: Tree) -> None:
    """Rename `recompute_granularity` to `recompute` in models, `training` and roles.

    First removes it, `recompute_method` and `recompute_num_layers` where they are null. Another
    value of `recompute` in the same section adds a problem to `draft`.
    """
    for name, values in _role_sections(sections).items():
        for key in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
            if values.get(key, "") is None:
                del values[key]
        if "recompute_granularity" in values:
            older, path = values.pop("recompute_granularity"), f"{name}.recompute"
            if (present := values.setdefault("recompute", older)) != older:
                reject_two_values(draft, f"{path}_granularity", path, present)
            draft.spelled[path] = f"{path}_granularity"


def _merge_seeds(draft: Draft, sections: Tree) -> None:
    """Set training.seed to the actor's seed, if any; remove `seed` and `seq_length` of all models.

    Changes `sections`. The actor's seed is that of its section, else of training, else of its
    model. `draft` gets its origin, and a note for each other seed of a model that differs;
    `seq_length` goes without a note.
    """
    training = sections["training"]
    if found := take_value(draft, sections, "seed"):
        draft.origins["training", "seed"], training["seed"] = found
    for name, values in sections["model"].items():
        values.pop("seq_length", None)  # training.seq_length is required, and counts before it
        other = values.pop("seed", None)
        if other not in (None, training.get("seed")):
            draft.note(
                "one seed for the run, that of training or of the actor's model",
                f"model.{name}.seed={format_value(other)}",
            )


def _translate_value_clip(draft: Draft, sections: Tree) -> None:
    """Set a critic.cliprange_value of 0 or less to null (no clip, as it meant), with a note."""
    critic = sections.get(Role.CRITIC.value) or {}
    value = critic.get("cliprange_value")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
        critic["cliprange_value"] = None
        draft.note("values are not clipped (null)", f"critic.cliprange_value={format_value(value)}")


def _translate_algorithm(draft: Draft, sections: Tree) -> None:
    """Move `missing_eos_penalty`; write whitening true as batch, false as none; group_norm as grpo.

    For online DPO, remove an entropy_coeff that is the older toolkit's default, with a note.
    """
    algorithm, stage = sections["algorithm"], sections["training"].get("stage")
    if found := take_value(draft, sections, "missing_eos_penalty"):
        set_moved_key(draft, sections, *found, "algorithm.missing_eos_penalty")
    whiten = algorithm.get("advantage_whiten")
    if isinstance(whiten, bool):
        word = AdvantageWhiten.BATCH if whiten else AdvantageWhiten.NONE
        algorithm["advantage_whiten"] = word.value
    if algorithm.get("adv_estimator") == GROUP_NORM:
        _translate_group_norm(draft, algorithm)
    if stage == Stage.RAY_ONLINE_DPO.value:
        for section in (ACTOR, "training"):
            if sections[section].get("entropy_coeff") == OLD_ENTROPY_COEFF:
                del sections[section]["entropy_coeff"]
                draft.note(
                    "the loss of a pair has no entropy term", f"entropy_coeff={OLD_ENTROPY_COEFF}"
                )


def _translate_group_norm(draft: Draft, algorithm: Tree) -> None:
    """Set `adv_estimator` to grpo, in place of group_norm, and whitening to batch if it is unset.

    Adds a problem to `draft` for a `gamma` other than 1: the older toolkit puts the z-score of a
    group at the last token and sums from there, and with 1 that is the z-score on every token.
    A `kl_penalty` of kl becomes low_var_kl, with a note, if `kl_in` is unset or loss: the older
    toolkit computes low_var_kl there.
    """
    algorithm["adv_estimator"] = AdvEstimator.GRPO.value
    set_default(algorithm, "advantage_whiten", AdvantageWhiten.BATCH.value)
    gamma = algorithm.get("gamma", 1.0)
    if gamma != 1.0:
        estimator = f"{ref('algorithm.adv_estimator')}=group_norm"
        draft.reject(
            Problem(
                "algorithm.gamma",
                f"must be 1 with {estimator}, where a score counts for every token alike",
                format_value(gamma),
                "use 1.0, or reinforce_plus_plus",
            )
        )
    penalty = algorithm.get("kl_penalty")
    if algorithm.get("kl_in") in (None, KlIn.LOSS.value) and penalty == KlPenalty.KL.value:
        algorithm["kl_penalty"] = KlPenalty.LOW_VAR_KL.value
        draft.note(
            "low_var_kl in the loss, which is what MindSpeed-LLM computed in stage ray_grpo "
            "whatever the key said",
            "kl_penalty=kl",
        )


def _remove_older_keys(draft: Draft, sections: Tree) -> None:
    """Remove keys without effect and refused keys from models, `training` and roles.

    `draft` gets a note for each key without effect, and a problem for a value that is not allowed.
    A refused key with a neutral value goes without a word.
    """
    for section, values in _role_sections(sections).items():
        for key in sorted(values.keys() & (NO_OPS.keys() | REFUSED.keys())):
            path = draft.spelled.get(f"{section}.{key}", f"{section}.{key}")
            _note_or_reject(draft, path, key, values.pop(key))


def _note_or_reject(draft: Draft, path: str, key: str, value: Any) -> None:
    """Add a note or a problem to `draft` for a key of REFUSED or NO_OPS; do nothing for others.

    A refused key is a problem unless its value is neutral. A key without effect is noted if its
    value is allowed, else a problem.
    """
    refusal, entry = REFUSED.get(key), NO_OPS.get(key)
    if refusal and not refusal.is_neutral(value):
        draft.reject(
            Problem(path, f"is not supported: {refusal.why}", format_value(value), refusal.remedy)
        )
    elif entry and entry.allows(value):
        draft.note(entry.meaning, f"{key}={format_value(value)}")
    elif entry:
        good = (
            "a single value"
            if isinstance(entry.allowed, str)
            else " or ".join(format_value(word) for word in entry.allowed[:2])
        )
        draft.reject(
            Problem(
                path,
                f"must be {good}: {entry.meaning}",
                format_value(value),
                f"use {entry.remedy or good}",
            )
        )


def _note_differences(draft: Draft, sections: Tree) -> None:
    """Note keys and values of the YAML that mean something else in the older toolkit.

    They are an entropy coefficient other than 0, `do_sample: true` without a temperature, and the
    stage of online DPO.
    """
    actor, training = sections[ACTOR], sections["training"]
    coefficient = actor.get("entropy_coeff", training.get("entropy_coeff"))
    if coefficient:
        draft.note(
            "the loss has an entropy bonus of this weight (MindSpeed-LLM accepted the key and left "
            "the term out; 0 does the same)",
            f"entropy_coeff={coefficient}",
        )
    if actor.get("do_sample") is True and "temperature" not in actor:
        draft.note("temperature is 1 (0.7 in MindSpeed-LLM)", "do_sample=true")
    if training.get("stage") == Stage.RAY_ONLINE_DPO.value:
        draft.note(
            "samples are counted, two of them are a pair (MindSpeed-LLM counted pairs)",
            "ppo_mini_batch_size, micro_batch_size",
        )
