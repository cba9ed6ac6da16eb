"""Turn the composed YAML tree into one plain dict per typed section, and merge the layers.

Per role the rightmost wins: `model.<name>` < `training` < the role's own section. The origin of
each value is kept, so that an error names the line that the user wrote.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.derived import (
    has_critic,
    make_paths_absolute,
    place_roles,
    set_max_new_tokens,
    set_stage_defaults,
)
from mindspeed_rlxf.config.draft import Dialect, Draft, Tree, set_default
from mindspeed_rlxf.config.enums import CONFIGURED, RewardKind, Role
from mindspeed_rlxf.config.errors import Problem, UserError, ref
from mindspeed_rlxf.config.hf_config import (
    OF_WEIGHTS,
    find_unsupported,
    parse_architecture,
    read_hf_config,
)
from mindspeed_rlxf.config.keys import (
    ARCHITECTURE_KEYS,
    CLASSIFIER_KEYS,
    NESTED_ROLES,
    OPTIMIZER_KEYS,
    PLAIN_SECTIONS,
    ROLE_SECTIONS,
    RULE_KEYS,
    SHARED_KEYS,
    TOP_LEVEL,
    fields,
    role_keys,
    unknown_key,
)
from mindspeed_rlxf.config.plugins import read_and_load
from mindspeed_rlxf.config.reward_functions import read_functions
from mindspeed_rlxf.config.schema import (
    KlControlConfig,
    OffloadConfig,
    SandboxConfig,
    TrainingConfig,
)
from mindspeed_rlxf.config.suggest import closest, format_value

AUTO = "auto"
"""Value of a role's `model` that takes the architecture from config.json of its `load` folder."""

WITHOUT_ARCHITECTURE = {
    RewardKind.RULE.value: RULE_KEYS,
    RewardKind.HUGGING_FACE.value: CLASSIFIER_KEYS,
}
"""Kind of reward without a Megatron model -> keys that it reads."""

VERBATIM = ("model", "resource_pool", "rules", "arguments", "chat_template_kwargs")
"""Sections whose keys are names that the user chose."""


def make_draft(tree: Mapping[str, Any], name: str, dialect: Dialect | None = None) -> Draft:
    """Return the YAML's values as a Draft, in the shape of RunConfig and with derived defaults.

    Types are not checked. Mistakes become problems of the draft; none is raised. Plugins and files
    of reward functions are run, and this user's Ray cluster is looked for (`choose_cluster`).
    Relative paths become absolute.
    name:    of the config
    dialect: translator of another toolkit's keys; None = the YAML only has keys of this project
    """
    draft = Draft()
    sections = _make_sections(draft, tree)
    if dialect:
        nested = any(str(key).replace("-", "_") == NESTED_ROLES for key in tree)
        dialect.translate(draft, sections, nested)
    draft.payload = {"name": name, "dry_run": sections.pop("dry_run", False)}
    for section, schema in PLAIN_SECTIONS.items():
        draft.payload[section] = draft.keep_known(section, sections[section], fields(schema))
    algorithm = draft.payload["algorithm"]
    if isinstance(keys := algorithm.get("kl_ctrl"), dict):
        algorithm["kl_ctrl"] = draft.keep_known("algorithm.kl_ctrl", keys, fields(KlControlConfig))
    draft.payload["training"] = _make_training(draft, sections["training"], name)
    _make_roles(draft, sections, dialect)
    set_stage_defaults(draft)
    place_roles(draft, sections)
    set_max_new_tokens(draft)
    make_paths_absolute(draft.payload)
    return draft


def _make_sections(draft: Draft, tree: Mapping[str, Any]) -> Tree:
    """Return every section of TOP_LEVEL as a dict, {} where absent; report unknown sections.

    Keys get underscores (not in VERBATIM, except the keys of each model), `runtime: WORD` becomes
    {kind: WORD}, and roles inside `actor_rollout_ref` move to the top level. A value that is no
    section is rejected.
    `dry_run`, which is no section, stays as it is.
    """
    sections = _underscore_keys(draft, tree, "")
    if isinstance(sections.get("runtime"), str):
        sections["runtime"] = {"kind": sections["runtime"]}
    for name in list(sections):
        if name not in TOP_LEVEL:
            draft.problems.append(unknown_key("", name, TOP_LEVEL))
            del sections[name]
    for name in TOP_LEVEL - {"dry_run"}:
        sections[name] = draft.mapping(name, sections.get(name))
    _unfold(draft, sections)
    sections["model"] = {
        str(name): _underscore_keys(draft, draft.mapping(f"model.{name}", keys), f"model.{name}.")
        for name, keys in sections["model"].items()
    }
    return sections


def _underscore_keys(draft: Draft, tree: Mapping[Any, Any], prefix: str) -> Tree:
    """Return the tree with keys as text, "_" for "-", at every depth, but not in lists.

    VERBATIM sections are copied unchanged. A key in both spellings becomes a problem, and its later
    value wins.
    prefix: of the keys in that problem
    """
    result: Tree = {}
    for spelled, value in tree.items():
        name = str(spelled).replace("-", "_")
        if name in result:
            draft.problems.append(
                Problem(f"{prefix}{name}", f"is given twice, as {spelled} too", remedy="keep one")
            )
        is_section = isinstance(value, dict) and name not in VERBATIM
        result[name] = _underscore_keys(draft, value, f"{prefix}{name}.") if is_section else value
    return result


def _unfold(draft: Draft, sections: Tree) -> None:
    """Move the keys of roles under `actor_rollout_ref` into the roles at the top level, in place.

    Rejects a key that has different values in the two sections (that at the top level stays). A
    role there other than actor and reference becomes a problem. Records the YAML's path of each key
    in `draft.spelled`.
    """
    known = {Role.ACTOR_ROLLOUT.value, Role.REF.value}
    for role, values in draft.keep_known(NESTED_ROLES, sections.pop(NESTED_ROLES), known).items():
        for key, value in draft.mapping(f"{NESTED_ROLES}.{role}", values).items():
            path = f"{NESTED_ROLES}.{role}.{key}"
            kept = sections[role].setdefault(key, value)
            if kept is not value and kept != value:  # `is` for NaN, which differs from itself
                draft.reject(
                    Problem(path, f"and {ref(f'{role}.{key}')} are the same key", remedy="keep one")
                )
            draft.spelled[f"{role}.{key}"] = path


def _make_training(draft: Draft, values: Tree, name: str) -> Tree:
    """Return the fields of TrainingConfig; keys that `training` shares with roles are left out.

    An unknown key becomes a problem. Sets absent `run_name` (to the config's `name`) and
    `output_dir` (to outputs/<run_name>). Runs the files of `plugins`, one or a list, and puts the
    path and SHA-256 of each in a list; a file that fails is rejected and left out.
    """
    own = fields(TrainingConfig)
    known = draft.keep_known("training", values, own | SHARED_KEYS).items()
    training = {key: value for key, value in known if key in own}
    set_default(training, "run_name", name)
    set_default(training, "output_dir", os.path.join("outputs", str(training["run_name"])))
    given, loaded = training.get("plugins") or [], []
    for entry in given if isinstance(given, list) else [given]:
        try:
            loaded.append(read_and_load(entry))
        except UserError as error:
            for problem in error.problems:
                draft.reject(problem)
    return training | {"plugins": loaded}


def _make_roles(draft: Draft, sections: Tree, dialect: Dialect | None) -> None:
    """Put each role's section into the payload: model, training, own keys; the later one wins.

    `critic` is None where the stage has no critic; a section `critic` is rejected then. A reward
    without an architecture gets only the keys that it reads. Runs files of reward functions,
    rejects models that do not exist, and notes keys that no role reads. Without a model a role has
    no `architecture`.
    """
    known = ARCHITECTURE_KEYS | SHARED_KEYS - {"model"}
    models = {
        name: draft.keep_known(f"model.{name}", keys, known)
        for name, keys in sections["model"].items()
    }
    training = {key: value for key, value in sections["training"].items() if key in SHARED_KEYS}
    for role in CONFIGURED:
        stage = draft.payload["training"].get("stage")
        if role is Role.CRITIC and not has_critic(stage, sections[role.value]):
            draft.payload[role.value] = None
            if sections[role.value]:
                remedy = "remove the section critic ('~critic' on the command line)"
                draft.reject(Problem("training.stage", "has no critic", stage, remedy), role.value)
            continue
        own = draft.keep_known(role.value, sections[role.value], role_keys(role))
        if role is Role.REWARD:
            read_functions(draft, own)
            if isinstance(keys := own.get("sandbox"), dict):
                own["sandbox"] = draft.keep_known("reward.sandbox", keys, fields(SandboxConfig))
        if str(own.get("kind")) in WITHOUT_ARCHITECTURE:
            _make_reward_section(draft, own, sections["training"])
            continue
        chosen = own.get("model", training.get("model"))
        if chosen == AUTO:
            architecture = _read_architecture(draft, role, own.get("load", training.get("load")))
        else:
            architecture = models.get(str(chosen))
            if dialect and architecture is not None and "vocab_size" not in own:
                dialect.add_vocab_size(draft, sections, str(chosen), architecture)
        layers = {f"model.{chosen}": architecture or {}, "training": training}
        merged = _merge(draft, role, {**layers, role.value: own})
        if merged.get("micro_batch_size", 0) is None and merged.get("max_tokens_per_micro_batch"):
            del merged["micro_batch_size"]  # max_tokens_per_micro_batch replaces it
        draft.payload[role.value] = _nest_sections(role, merged)
        if architecture is None:
            del draft.payload[role.value]["architecture"]
            if chosen != AUTO:
                _report_missing_model(draft, role, chosen, models)
    _note_unread(draft, training, models)


def _make_reward_section(draft: Draft, own: Tree, training: Tree) -> None:
    """Put the reward's section into the payload, for a kind in WITHOUT_ARCHITECTURE.

    Keys that the kind does not read are left out, with a note. A classifier without `load` gets
    that of `training`.
    own, training: the sections `reward` and `training` of the YAML
    """
    keys = WITHOUT_ARCHITECTURE[own["kind"]]
    draft.payload[Role.REWARD.value] = {key: own[key] for key in keys if key in own}
    if "load" in keys and "load" in training:
        set_default(draft.payload[Role.REWARD.value], "load", training["load"])
    for key in sorted(own.keys() - {*keys}):
        value = format_value(own[key])
        draft.note(f"no effect with reward.kind={own['kind']}", f"reward.{key}={value}")


def _note_unread(draft: Draft, training: Tree, models: Mapping[str, Tree]) -> None:
    """Add notes on unused models, and on keys of `training` and used models that no role reads.

    training: the keys that the section shares with roles
    """
    sections = {role: draft.payload[role.value] or {} for role in CONFIGURED}
    roles = {role: str(keys["model"]) for role, keys in sections.items() if "model" in keys}
    read = set().union(*map(role_keys, roles))
    used = {f"model.{name}": models[name] for name in roles.values() if name in models}
    for section, values in {**used, "training": training}.items():
        for key in sorted(values.keys() - read):
            draft.note(
                "no role of this run reads it", f"{section}.{key}={format_value(values[key])}"
            )
    for name in models.keys() - set(roles.values()):
        draft.note("no role uses it", f"model.{name}")


def _read_architecture(draft: Draft, role: Role, load: Any) -> Tree | None:
    """Return the architecture in config.json of the folder `load`, without absent fields.

    None, and `<role>.load` is rejected, where `load` is no text, or the folder or model is
    unusable.
    """
    path = f"{role.value}.load"
    try:
        if not isinstance(load, str):
            raise ValueError("must name a folder with config.json with model=auto; set it")
        config = read_hf_config(Path(os.path.expanduser(load)), OF_WEIGHTS)
        if found := find_unsupported(config):
            raise ValueError(
                "config.json must ask for a known model (field: possible, config.json): "
                f"{'; '.join(found)}; use another model"
            )
        architecture = parse_architecture(config)
    except ValueError as error:
        draft.reject(Problem(path, str(error), f"{load}", colon=True))
        return None
    return {name: value for name, value in architecture.items() if value is not None}


def _merge(draft: Draft, role: Role, layers: Mapping[str, Tree]) -> Tree:
    """Return the keys of `layers` that the role has, in one dict; a later layer wins.

    `offload` is always there, merged key by key (`_merge_offload`). Other keys of a layer are
    dropped. Records in `draft.origins` which section each value came from.
    layers: section of the YAML -> its keys
    """
    merged: Tree = {"offload": _merge_offload(draft, role, layers)}
    for section, values in layers.items():
        for key in values.keys() & role_keys(role) - {"offload"}:
            merged[key] = values[key]
            path = f"{section}.{key}"
            draft.origins[role.value, key] = draft.spelled.get(path, path)
    return merged


def _merge_offload(draft: Draft, role: Role, layers: Mapping[str, Tree]) -> Tree:
    """Return the section `offload`, merged from `layers` key by key; a later layer wins.

    `optimizer` of a section other than the role's own is ignored for a role without an optimizer.
    Unknown keys become problems and are left out. Records in `draft.origins` which key each value
    came from.
    """
    merged: Tree = {}
    learns = "optimizer" in fields(ROLE_SECTIONS[role])
    for section, values in layers.items():
        path = draft.spelled.get(f"{section}.offload", f"{section}.offload")
        given = draft.mapping(path, values.get("offload"))
        for key, value in draft.keep_known(path, given, fields(OffloadConfig)).items():
            if key == "optimizer" and not learns and section != role.value:
                continue
            merged[key] = value
            draft.origins[f"{role.value}.offload", key] = f"{path}.{key}"
    return merged


def _nest_sections(role: Role, merged: Tree) -> Tree:
    """Return `merged` with its architecture keys in a dict `architecture`, and so for `optimizer`.

    Both dicts are there also if empty. A role without an optimizer gets no `optimizer`, and its
    optimizer keys are dropped.
    """
    nested = {"architecture": ARCHITECTURE_KEYS}
    if "optimizer" in fields(ROLE_SECTIONS[role]):
        nested["optimizer"] = OPTIMIZER_KEYS
    own = merged.keys() - ARCHITECTURE_KEYS - OPTIMIZER_KEYS
    return {key: value for key, value in merged.items() if key in own} | {
        part: {key: value for key, value in merged.items() if key in keys}
        for part, keys in nested.items()
    }


def _report_missing_model(
    draft: Draft, role: Role, chosen: Any, models: Mapping[str, Tree]
) -> None:
    """Reject a role's `model` (`chosen`): as required if it is None, else as unknown.

    The remedy names the most similar of `models`, and all of them.
    """
    path = draft.origins.get((role.value, "model"), f"{role.value}.model")
    guess = closest(str(chosen), models)
    remedy = f"did you mean {guess}?" if guess else "add its file to the defaults list, or use auto"
    remedy += f" (models loaded: {', '.join(models) or 'none'})"
    if chosen is None:
        draft.reject(Problem(path, "is required", remedy=remedy))
    else:
        draft.reject(Problem(path, "no such model", repr(chosen), remedy, colon=True))
