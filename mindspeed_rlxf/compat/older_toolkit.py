"""YAML of MindSpeed-LLM's Ray PPO: its places and words turned into those of the schema.

Works on the sections before they are typed. What is taken out without effect is noted once, what
asks for something that is not here is a problem; `older_keys` has the lists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_rlxf.compat.older_keys import NO_OPS, REFUSED
from mindspeed_rlxf.config.draft import Draft, Tree, set_default
from mindspeed_rlxf.config.enums import (
    CONFIGURED,
    AdvantageWhiten,
    AdvEstimator,
    KlIn,
    KlPenalty,
    OverlongPrompts,
    RewardKind,
    Role,
    Stage,
)
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.hf_config import read_hf_config
from mindspeed_rlxf.config.suggest import written

ACTOR = Role.ACTOR_ROLLOUT.value
GROUP_NORM = "group_norm"
"""Their word for GRPO's advantages."""
OLD_ENTROPY_COEFF = 0.001
"""Their default of a key that they never read."""
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
}
"""Keys of `model.<name>`, `training` or the actor that live on as another key, or agree with it."""


def translate(draft: Draft, sections: Tree, nested: bool) -> None:
    """sections: underscored, roles at the top. nested: the tree has `actor_rollout_ref`."""
    for name, values in sections["model"].items():
        _vocabulary(draft, f"model.{name}", values)
        _query_groups(draft, f"model.{name}", values)
    _seeds(draft, sections)
    _data(draft, sections)
    _category(draft, sections)
    _algorithm(draft, sections)
    _value_clip(draft, sections)
    _rollout_layout(draft, sections)
    _deterministic(draft, sections)
    _take_out(draft, sections)
    if nested or draft.notes:
        _what_differs(draft, sections)


def tokenizer_vocabulary(draft: Draft, sections: Tree, model: str, architecture: Tree) -> None:
    """A model YAML without `vocab_size` has that of the config.json beside the tokenizer."""
    folder = sections["training"].get("tokenizer_name_or_path")
    if "vocab_size" in architecture or not isinstance(folder, str):
        return
    key, place = f"model.{model}.vocab_size", Path(folder).expanduser()
    try:
        found = read_hf_config(place).get("vocab_size")
        if type(found) is not int:
            raise ValueError(f"its config.json has vocab_size={written(found)}; correct it")
    except ValueError as error:
        tokenizer = f"{ref('training.tokenizer_name_or_path')}={folder}"
        draft.reject(
            Problem(key, f"is required, and {tokenizer} does not tell it: {error}, or add the key")
        )
        return
    architecture["vocab_size"] = found
    draft.note(f"taken from {place / 'config.json'}", f"{key}={found}")


def _vocabulary(draft: Draft, path: str, values: Tree) -> None:
    """What they pad to is what the checkpoint's embedding holds."""
    if "padded_vocab_size" in values:
        values["vocab_size"] = values.pop("padded_vocab_size")
        draft.spelled[f"{path}.vocab_size"] = f"{path}.padded_vocab_size"


def _query_groups(draft: Draft, path: str, values: Tree) -> None:
    """Without the flag Megatron has a key head for each query head whatever the number says, with
    it and without a number it has one."""
    if "group_query_attention" not in values:
        return
    flag, groups = values.pop("group_query_attention"), values.get("num_query_groups")
    if not isinstance(flag, bool):
        draft.reject(_not_a_flag(f"{path}.group_query_attention", flag))
    elif flag:
        values["num_query_groups"] = 1 if groups is None else groups
    elif groups not in (None, values.get("num_attention_heads")):
        name = f"{path}.group_query_attention"
        draft.reject(
            Problem(
                name, f"contradicts num_query_groups={written(groups)}", False, "remove one of them"
            )
        )


def _not_a_flag(path: str, value: Any) -> Problem:
    return Problem(path, "must be true or false", written(value), "use true")


def _strongest(draft: Draft, sections: Tree, key: str) -> tuple[str, Any] | None:
    """(path as written, value) of a key in the actor's layers, which it is taken out of."""
    training, actor = sections["training"], sections[ACTOR]
    model = str(actor.get("model", training.get("model")))
    layers = {f"model.{model}": sections["model"].get(model, {}), "training": training}
    found = None
    for name, values in {**layers, ACTOR: actor}.items():
        if key in values:
            path = f"{name}.{key}"
            found = draft.spelled.get(path, path), values.pop(key)
    return found


def _move(draft: Draft, sections: Tree, path: str, value: Any, target: str) -> None:
    """To `section.key`, where the same may stand already."""
    section, key = target.split(".")
    there = sections[section].setdefault(key, value)
    if there != value:
        draft.reject(
            Problem(
                path,
                f"and {ref(target)}={written(there)} say the same thing differently",
                remedy="keep one",
            )
        )
    else:
        draft.origins.setdefault((section, key), path)


def _seeds(draft: Draft, sections: Tree) -> None:
    """One seed for the run: the actor's, by their layering."""
    training, own = sections["training"], sections["training"].get("seed")
    found = _strongest(draft, sections, "seed")
    if found:
        path, value = found
        training["seed"] = value
        draft.origins["training", "seed"] = path
    for name, values in sections["model"].items():
        values.pop("seq_length", None)  # `training` is over it, and has to have one
        other = values.pop("seed", None)
        if other is not None and other != training.get("seed", own):
            meaning = "one seed for the run, that of training or of the actor's model"
            draft.note(meaning, f"model.{name}.seed={written(other)}")


def _data(draft: Draft, sections: Tree) -> None:
    data = sections["data"]
    if found := _strongest(draft, sections, "data_path"):
        path, value = found
        _move(draft, sections, path, _prefixes(draft, path, value), "data.data_path")
        _old_data_defaults(draft, data)
    if found := _strongest(draft, sections, "no_shuffle"):
        path, value = found
        if isinstance(value, bool):
            _move(draft, sections, path, not value, "data.shuffle")
        else:
            draft.reject(_not_a_flag(path, value))
    if found := _strongest(draft, sections, "dataset_with_labels"):
        path, value = found
        if not isinstance(value, bool):
            draft.reject(_not_a_flag(path, value))
        elif value:
            set_default(data, "ground_truth_key", "labels")
            draft.note("data.ground_truth_key=labels", f"{path}=true")
    if found := _strongest(draft, sections, "dataset_additional_keys"):
        path, value = found
        names = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            draft.reject(Problem(path, "must be names of columns", written(value), "use labels"))
        else:
            if "labels" in names:
                set_default(data, "ground_truth_key", "labels")
            draft.note(
                "all columns of a data set are in reach; rules compare with data.ground_truth_key",
                f"dataset_additional_keys={' '.join(names)}",
            )


def _value_clip(draft: Draft, sections: Tree) -> None:
    """A clip of nothing: what theirs takes for none would hold the values where they are."""
    critic = sections.get(Role.CRITIC.value) or {}
    value = critic.get("cliprange_value")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
        critic["cliprange_value"] = None
        draft.note("values are not clipped (null)", f"critic.cliprange_value={written(value)}")


def _prefixes(draft: Draft, path: str, value: Any) -> Any:
    """`a`, `a,b`, or `1,a` as data.data_path; several data sets with weights are a problem."""
    if not isinstance(value, str):
        return value
    parts = [part for part in value.split(",") if part]
    if len(parts) % 2 == 0 and all(_is_number(part) for part in parts[::2]):
        if len(parts) > 2:
            names = ", ".join(parts[1::2])
            draft.reject(
                Problem(
                    path,
                    "data sets are not blended by weight",
                    value,
                    f"use {ref('data.data_path')}=[{names}], where each prompt counts once",
                    colon=True,
                )
            )
        parts = parts[1::2]
    return parts


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _old_data_defaults(draft: Draft, data: Tree) -> None:
    """Their data sets name no source, and long prompts did not stop a run."""
    set_default(data, "default_data_source", "prompts")
    if data.get("overlong_prompts") is None:
        data["overlong_prompts"] = OverlongPrompts.DROP.value
        draft.note(
            "prompts over max_prompt_length are dropped and counted (they lost their end, where a "
            "chat's answer begins, in MindSpeed-LLM)",
            "data.overlong_prompts=drop",
        )


def _category(draft: Draft, sections: Tree) -> None:
    """Their mark of each data set: 1 = scored by the verifier, 0 = by the reward model."""
    reward, found = sections["reward"], _strongest(draft, sections, "dataset_category")
    if found:
        path, value = found
        kinds = set(str(value).replace(" ", "").split(","))
        wanted = "1" if reward.get("verifier") else "0"
        if kinds == {wanted}:
            by = "the verifier" if wanted == "1" else "the reward model"
            draft.note(f"{by} scores every prompt", f"dataset_category={value}")
        else:
            draft.reject(
                Problem(
                    path,
                    "one reward scores every prompt here",
                    written(value),
                    f"use {wanted} (1 = reward.verifier, 0 = reward model), or reward.kind=rule "
                    "with a rule for each data source",
                    colon=True,
                )
            )
    if reward.get("verifier") is True:
        set_default(reward, "kind", RewardKind.RULE.value)


def _algorithm(draft: Draft, sections: Tree) -> None:
    algorithm, stage = sections["algorithm"], sections["training"].get("stage")
    if found := _strongest(draft, sections, "missing_eos_penalty"):
        _move(draft, sections, *found, "algorithm.missing_eos_penalty")
    whiten = algorithm.get("advantage_whiten")
    if isinstance(whiten, bool):
        word = AdvantageWhiten.BATCH if whiten else AdvantageWhiten.NONE
        algorithm["advantage_whiten"] = word.value
    if algorithm.get("adv_estimator") == GROUP_NORM:
        _group_norm(draft, algorithm)
    if stage == Stage.RAY_ONLINE_DPO.value:
        for section in (ACTOR, "training"):
            if sections[section].get("entropy_coeff") == OLD_ENTROPY_COEFF:
                del sections[section]["entropy_coeff"]
                meaning = "the loss of a pair has no entropy term"
                draft.note(meaning, f"entropy_coeff={OLD_ENTROPY_COEFF}")


def _group_norm(draft: Draft, algorithm: Tree) -> None:
    """The z-score of a group at the last token and its cumulative sum, which is the z-score on
    every token while nothing is discounted; whitened unless told otherwise; k3 in the loss."""
    algorithm["adv_estimator"] = AdvEstimator.GRPO.value
    set_default(algorithm, "advantage_whiten", AdvantageWhiten.BATCH.value)
    gamma = algorithm.get("gamma", 1.0)
    if gamma != 1.0:
        estimator = f"{ref('algorithm.adv_estimator')}=group_norm"
        draft.reject(
            Problem(
                "algorithm.gamma",
                f"must be 1 with {estimator}, where a score counts for every token alike",
                written(gamma),
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


def _rollout_layout(draft: Draft, sections: Tree) -> None:
    key = "inference_tensor_model_parallel_size"
    if found := _strongest(draft, sections, key):
        _move(draft, sections, *found, MOVED[key])


def _deterministic(draft: Draft, sections: Tree) -> None:
    """Their flag in `false` leaves the choice to the device, as an absent one does."""
    found = _strongest(draft, sections, "use_deter_comp")
    if found and found[1] not in (None, False):
        _move(draft, sections, *found, "training.deterministic")


def _take_out(draft: Draft, sections: Tree) -> None:
    """The no-ops and the refused keys of every layer."""
    layers = {f"model.{name}": values for name, values in sections["model"].items()}
    layers |= {name: sections[name] for name in ("training", *(role.value for role in CONFIGURED))}
    for section, values in layers.items():
        for key in sorted(values.keys() & (NO_OPS.keys() | REFUSED.keys())):
            path = draft.spelled.get(f"{section}.{key}", f"{section}.{key}")
            _take(draft, path, key, values.pop(key))


def _take(draft: Draft, path: str, key: str, value: Any) -> None:
    if key in REFUSED:
        refusal = REFUSED[key]
        if not refusal.is_neutral(value):
            draft.reject(
                Problem(path, f"is not to be had: {refusal.why}", written(value), refusal.remedy)
            )
        return
    entry = NO_OPS[key]
    if entry.allows(value):
        draft.note(entry.meaning, f"{key}={written(value)}")
        return
    good = " or ".join(written(word) for word in entry.allowed[:2])
    draft.reject(
        Problem(
            path, f"must be {good}: {entry.meaning}", written(value), f"use {entry.remedy or good}"
        )
    )


def _what_differs(draft: Draft, sections: Tree) -> None:
    """Keys of one name that mean something else here, where the YAML relies on them."""
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
