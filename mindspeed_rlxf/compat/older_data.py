"""Translate the older toolkit's keys of data sets and of what scores their prompts."""

from __future__ import annotations

from typing import Any

from mindspeed_rlxf.compat.older_values import set_moved_key, take_flag, take_value
from mindspeed_rlxf.config.draft import Draft, Tree, set_default
from mindspeed_rlxf.config.enums import OverlongPrompts, RewardKind
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.suggest import format_value


def translate_data(draft: Draft, sections: Tree) -> None:
    """Translate data_path, no_shuffle, dataset_with_labels and dataset_additional_keys, in place.

    The keys are removed from `sections`, and what they mean is set in its section `data`: with
    data_path also `_set_older_data_defaults`. `dataset_with_labels: true`, or `labels` in
    dataset_additional_keys, sets an absent `ground_truth_key` to labels.
    `draft` gets a note for `dataset_with_labels: true`, for each legal dataset_additional_keys, and
    for a default that data_path sets; and a problem for a wrong type or a second, other value.
    """
    data = sections["data"]
    if found := take_value(draft, sections, "data_path"):
        set_moved_key(draft, sections, found[0], _parse_prefixes(draft, *found), "data.data_path")
        _set_older_data_defaults(draft, data)
    if found := take_flag(draft, sections, "no_shuffle"):
        set_moved_key(draft, sections, found[0], not found[1], "data.shuffle")
    if (found := take_flag(draft, sections, "dataset_with_labels")) and found[1]:
        set_default(data, "ground_truth_key", "labels")
        draft.note("data.ground_truth_key=labels", f"{found[0]}=true")
    if found := take_value(draft, sections, "dataset_additional_keys"):
        path, value = found
        names = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            draft.reject(
                Problem(path, "must be names of columns", format_value(value), "use labels")
            )
            return
        if "labels" in names:
            set_default(data, "ground_truth_key", "labels")
        draft.note(
            "all columns of a data set can be used; rules compare with data.ground_truth_key",
            f"dataset_additional_keys={' '.join(names)}",
        )


def _parse_prefixes(draft: Draft, path: str, value: Any) -> Any:
    """Return the stripped prefixes in a string `a,b` or `weight,a`; other types as they are.

    Several pairs of weight and prefix are a problem, added to `draft`; it still returns the
    prefixes.
    """
    if not isinstance(value, str):
        return value
    parts = [part for part in map(str.strip, value.split(",")) if part]
    if len(parts) % 2 or not all(part.replace(".", "", 1).isdigit() for part in parts[::2]):
        return parts
    names = parts[1::2]
    if len(names) > 1:
        draft.reject(
            Problem(
                path,
                "data sets are not blended by weight",
                value,
                f"use {ref('data.data_path')}=[{', '.join(names)}], where each prompt counts once",
                colon=True,
            )
        )
    return names


def _set_older_data_defaults(draft: Draft, data: Tree) -> None:
    """Set default_data_source to "prompts", and overlong_prompts to "drop" with a note.

    Each only if it is absent or null.
    """
    set_default(data, "default_data_source", "prompts")
    if data.get("overlong_prompts") is None:
        data["overlong_prompts"] = OverlongPrompts.DROP.value
        draft.note(
            "prompts over max_prompt_length are dropped and counted (MindSpeed-LLM cut off their "
            "end, where a chat's answer begins)",
            "data.overlong_prompts=drop",
        )


def translate_category(draft: Draft, sections: Tree) -> None:
    """Remove `dataset_category`, and note it if all data sets have the reward that scores here.

    Legal is 1 (the verifier) with `reward.verifier`, else 0 (a reward model, in the older toolkit);
    another value or a mix is a problem, added to `draft`. Also without `dataset_category`,
    `reward.verifier: true` sets an absent `reward.kind` to rule. Changes `sections` in place.
    """
    reward = sections["reward"]
    wanted = "1" if reward.get("verifier") else "0"
    if found := take_value(draft, sections, "dataset_category"):
        path, value = found
        if set(str(value).replace(" ", "").split(",")) == {wanted}:
            by = "the verifier" if wanted == "1" else "the reward model"
            draft.note(f"{by} scores every prompt", f"dataset_category={value}")
        else:
            draft.reject(
                Problem(
                    path,
                    "one reward scores every prompt here",
                    format_value(value),
                    f"use {wanted} (1 = reward.verifier, 0 = reward model), or reward.kind=rule "
                    "with a rule for each data source",
                    colon=True,
                )
            )
    if reward.get("verifier") is True:
        set_default(reward, "kind", RewardKind.RULE.value)
