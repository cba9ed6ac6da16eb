"""Turn the composed YAML tree into the typed, checked configuration, or report every problem.

Each role's keys are merged (`model.<name>` < `training` < role) and derived defaults filled in;
then pydantic validates everything at once. Rules between sections run once every section is valid.
"""

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mindspeed_rlxf.config.backend_override import reset_megatron_keys
from mindspeed_rlxf.config.enums import (
    CONFIGURED,
    AdvantageWhiten,
    AdvEstimator,
    KlPenalty,
    LossNormalizer,
    OldLogProbs,
    RewardKind,
    Role,
    Stage,
)
from mindspeed_rlxf.config.estimator_traits import TRAITS
from mindspeed_rlxf.config.hf_config import (
    WEIGHTS_FOLDER,
    approximate_architecture,
    find_unsupported,
    parse_architecture,
    read_hf_config,
)
from mindspeed_rlxf.config.host_rules import check_host
from mindspeed_rlxf.config.keys import (
    PLAIN_SECTIONS,
    ROLE_SECTIONS,
    SHARED,
    WITHOUT_CRITIC,
    WITHOUT_MODEL,
    Tree,
    find_field,
    keys_of,
    unknown_key,
)
from mindspeed_rlxf.config.micro_batches import set_micro_batches
from mindspeed_rlxf.config.placement import place_roles, trains_adapters
from mindspeed_rlxf.config.plugins import (
    complete_function,
    complete_plugin,
    complete_program,
    complete_tool,
    read_entries,
)
from mindspeed_rlxf.config.problems import (
    ConfigError,
    MissingFile,
    Problem,
    closest,
    explain,
    format_value,
)
from mindspeed_rlxf.config.raw_config import RawConfig, set_default
from mindspeed_rlxf.config.schema import (
    ArchitectureConfig,
    LearningConfig,
    RunConfig,
    TrainingConfig,
)
from mindspeed_rlxf.config.section_rules import check_sections
from mindspeed_rlxf.config.unused import note_unused

AUTO = "auto"
"""A role's `model` that takes the architecture from config.json in its `load` folder."""

DATA_FILES = ("train_files", "val_files")
AGENT_SLICE_STEPS = 32
"""Default of `rollout.slice_steps` with agents, whose turns are short."""


def resolve(tree: Mapping[str, Any] | RawConfig, name: str) -> RunConfig:
    """Return the typed, checked configuration for a composed tree (see `compose`).

    Runs the user's plugins and reward functions.

    Args:
        tree: Composed YAML with our keys, or what a translation of `compat` returned.
        name: Config name, the default for `training.run_name`.

    Raises:
        ConfigError: All problems found. Rules between sections need valid sections; a dry run skips
            this host's devices and memory.
    """
    return resolve_with_notes(tree, name)[0]


def resolve_with_notes(
    tree: Mapping[str, Any] | RawConfig, name: str, overrides: Sequence[str] = ()
) -> tuple[RunConfig, list[str]]:
    """Return the configuration, and lines about legal but surprising keys; see `resolve`.

    `overrides` are those of the command line, which the tree has already: one that chooses FSDP
    resets keys of the YAML that only Megatron has.
    """
    raw = tree if isinstance(tree, RawConfig) else RawConfig(tree)
    reset_megatron_keys(raw, overrides)
    return resolve_raw(raw, name)


def resolve_raw(raw: RawConfig, name: str) -> tuple[RunConfig, list[str]]:
    """Return the configuration and notes for keys that are ours already; see `resolve`."""
    payload = _build(raw, name)
    try:
        config = RunConfig.model_validate(payload)
        if not raw.problems:
            _check(config, raw)
    except ValidationError as error:
        raw.problems += _problems_of(error.errors(include_url=False), raw)
    if raw.problems:
        _add_missing_files(raw)
        # Without repeats, as of a key that several roles share.
        by_text = {str(problem): problem for problem in raw.problems}
        raise ConfigError(list(by_text.values()))
    return config, raw.list_notes()


def _add_missing_files(raw: RawConfig) -> None:
    """Add the run's other missing files, if one that is read first is missing."""
    reported = {problem.key for problem in raw.problems if isinstance(problem, MissingFile)}
    if reported:
        missing = find_missing_files(raw)
        raw.problems += [problem for problem in missing if problem.key not in reported]


def find_missing_files(raw: RawConfig) -> list[MissingFile]:
    """Return a problem for each file or folder of `named_files` that is not there."""
    problems: list[MissingFile] = []
    for key, path in named_files(raw):
        if not os.path.exists(path):
            problems.append(MissingFile(raw.user_key(key), "must exist", path, "correct the path"))
    return problems


def named_files(raw: RawConfig) -> list[tuple[str, str]]:
    """Return (key, absolute path) of the weights, the tokenizer and the data files."""
    values: list[tuple[str, Any]] = []
    for role in CONFIGURED:
        values.append((f"{role.value}.load", raw.value(role.value, "load")))
    tokenizer = raw.sections["training"].get("tokenizer_name_or_path")
    values.append(("training.tokenizer_name_or_path", tokenizer))
    for key in DATA_FILES:
        files = raw.sections["data"].get(key)
        for file in files if isinstance(files, list) else [files]:
            values.append((f"data.{key}", file))
    return [
        (key, os.path.abspath(os.path.expanduser(file)))
        for key, file in values
        if isinstance(file, str)
    ]


def find_wrong_values(raw: RawConfig) -> list[Problem]:
    """Return the problems of single values; `resolve` finds more, and reads models for it."""
    reward = {key: v for key, v in raw.sections["reward"].items() if key != "function"}
    try:
        RunConfig.model_validate({**raw.sections, "reward": reward})
    except ValidationError as error:
        # Keys that are absent or unknown, and rules between keys, are for `resolve`.
        ignored = ("missing", "extra_forbidden", "value_error")
        errors = [e for e in error.errors(include_url=False) if e["type"] not in ignored]
        return [*_problems_of(errors, raw)]
    return []


def _check(config: RunConfig, raw: RawConfig) -> None:
    """Add problems between sections, host problems, unused keys and notes to `raw`."""
    # A dry run checks the host after it has printed its plan: see `cli.train`.
    problems = list(check_sections(config))
    if not config.dry_run:
        problems += check_host(config)
    raw.problems += [problem.rename_keys(raw.user_key) for problem in problems]
    note_unused(config, raw)
    save_interval = config.training.save_interval
    train_iters = config.training.train_iters
    if save_interval > train_iters:
        raw.note(
            "checkpoints are saved by training.save_interval_s only, and at the end",
            f"training.save_interval={save_interval} is over training.train_iters={train_iters}",
        )
    if config.shared_save is not None:
        raw.note(
            "weights go to its subfolders actor and critic",
            f"actor_rollout.save and critic.save are one folder, {config.shared_save}",
        )


def _build(raw: RawConfig, name: str) -> Tree:
    """Return plain values in RunConfig's shape, with derived defaults filled in."""
    sections = raw.sections
    payload: Tree = {"name": name, "dry_run": sections["dry_run"]}
    payload |= {section: sections[section] for section in PLAIN_SECTIONS}
    # Keys of roles, which `training` holds as their defaults.
    role_keys = SHARED.keys() - TrainingConfig.model_fields.keys()
    training = {key: v for key, v in sections["training"].items() if key not in role_keys}
    payload["training"] = training
    set_default(training, run_name=name)
    set_default(training, output_dir=os.path.join("outputs", str(training["run_name"])))
    read_entries(raw.problems, "training.plugins", training, complete_plugin)
    read_entries(raw.problems, "rollout.tools", payload["rollout"], complete_tool)
    read_entries(raw.problems, "rollout.program", payload["rollout"], complete_program)
    stage = training.get("stage")
    if stage in WITHOUT_CRITIC:
        payload["critic"] = None
        if sections["critic"]:
            remedy = "remove the section critic ('~critic' on the command line)"
            raw.problems.append(Problem("training.stage", "has no critic", stage, remedy))
    sections["ref"].setdefault("load", raw.value("actor_rollout", "load"))
    _choose_engines(raw, payload)
    for role in CONFIGURED:
        if role.value not in payload:
            payload[role.value] = _build_role(raw, role)
    _set_stage_defaults(training, payload["algorithm"], payload["actor_rollout"])
    set_micro_batches(raw, payload)
    _set_correction(payload)
    if any(payload["rollout"].get(name) for name in ("agent", "tools", "program")):
        set_default(payload["rollout"], slice_steps=AGENT_SLICE_STEPS)
    place_roles(raw, payload)
    _note_unread(raw, payload)
    return payload


def _choose_engines(raw: RawConfig, payload: Tree) -> None:
    """Give the reference the actor's training engine, and an FSDP actor a rollout engine."""
    backend = raw.value("actor_rollout", "backend")
    if backend is None:
        return
    raw.sections["ref"].setdefault("backend", backend)
    if backend == "fsdp":
        set_default(payload["rollout"], engine="transformers")


def _build_role(raw: RawConfig, role: Role) -> Tree:
    """Return a role's values: model < training < own, with the architecture nested."""
    section = raw.sections[role.value]
    training = raw.sections["training"]
    if role is Role.REWARD:
        if section.get("verifier") is True:
            set_default(section, kind=RewardKind.RULE.value)
        read_entries(raw.problems, "reward.function", section, complete_function)
        read_entries(raw.problems, "reward.functions", section, complete_function)
        if str(section.get("kind")) in WITHOUT_MODEL:
            return _build_reward_without_model(raw)
    model = raw.model_of(role.value)
    architecture = _read_architecture(raw, role, model)
    allowed = keys_of(role.value)
    layers = [architecture or {}, training]
    merged: Tree = {}
    for layer in layers:
        merged |= {key: value for key, value in layer.items() if key in allowed}
    merged |= section
    if model:
        merged["model"] = model
    is_trained = issubclass(ROLE_SECTIONS[role], LearningConfig)
    of_trained = () if is_trained else ("optimizer",)
    merged["offload"] = _merge_section("offload", layers, section, of_trained)
    if is_trained:
        merged["lora"] = _merge_section("lora", layers, section)
    if merged.get("micro_batch_size", 0) is None and merged.get("max_tokens_per_micro_batch"):
        del merged["micro_batch_size"]  # max_tokens_per_micro_batch replaces it
    architecture_keys = ArchitectureConfig.model_fields.keys() & merged.keys()
    architecture_values = {key: merged.pop(key) for key in architecture_keys}
    if architecture is not None:  # its absence is reported already
        merged["architecture"] = architecture_values
    return merged


def _build_reward_without_model(raw: RawConfig) -> Tree:
    """Return the values of a reward that runs no Megatron model, and note keys of models."""
    section = raw.sections["reward"]
    training = raw.sections["training"]
    kind = section["kind"]
    read_keys = WITHOUT_MODEL[str(kind)]
    for key in sorted(section.keys() & keys_of("reward").keys() - {*read_keys}):
        value = format_value(section.pop(key))
        raw.note(f"no effect with reward.kind={kind}", f"reward.{key}={value}")
    if "load" in read_keys and "load" in training:
        section.setdefault("load", training["load"])
    return dict(section)


def _merge_section(
    name: str, shared: Iterable[Tree], role_section: Tree, of_role_alone: Sequence[str] = ()
) -> Any:
    """Return a role's section within its section, merged key by key.

    Keys in `of_role_alone` are taken from the role alone.
    """
    merged: Tree = {}
    for layer in (*shared, role_section):
        subsection = {} if layer.get(name) is None else layer[name]
        if not isinstance(subsection, dict):
            return subsection  # pydantic reports it
        for key, value in subsection.items():
            if layer is role_section or key not in of_role_alone:
                merged[key] = value
    return merged


def _read_architecture(raw: RawConfig, role: Role, model: Any) -> Tree | None:
    """Return the keys from the role's model, or the architecture in config.json under its `load`.

    Without either, reports a problem and returns None.
    """
    models = raw.sections["model"]
    load = raw.value(role.value, "load")
    if model != AUTO and str(model) in models:
        return dict(models[str(model)])
    if model != AUTO:
        key = raw.user_key(f"{role.value}.model")
        guess = closest(str(model), models)
        remedy = f"did you mean {guess}?" if guess else "add it to the defaults list, or use auto"
        if model is None:
            raw.problems.append(Problem(key, "is required", None, remedy))
        else:
            raw.problems.append(Problem(key, "is no loaded model", repr(model), remedy))
        return None
    try:
        if not isinstance(load, str):
            raise ValueError("must name a folder with config.json with model=auto; set it")
        folder = Path(os.path.expanduser(load))
        if raw.value(role.value, "backend") == "fsdp":
            return approximate_architecture(folder)
        config = read_hf_config(folder, WEIGHTS_FOLDER)
        unsupported = find_unsupported(config)
        if unsupported:
            rule = "config.json must ask for a known model (field: possible, config.json)"
            raise ValueError(f"{rule}: {'; '.join(unsupported)}; use another model")
        return {k: value for k, value in parse_architecture(config).items() if value is not None}
    except ValueError as error:
        is_missing = isinstance(load, str) and not Path(os.path.expanduser(load)).is_dir()
        kind = MissingFile if is_missing else Problem
        key = raw.user_key(f"{role.value}.load")
        raw.problems.append(kind(key, str(error), f"{load}", colon=True))
        return None


def _note_unread(raw: RawConfig, payload: Tree) -> None:
    """Report unknown model keys, and note keys without a reader in this run."""
    if trains_adapters(payload):
        meaning = "no effect with actor_rollout.lora, where the reference is the actor's model"
        for key in sorted(raw.sections["ref"].keys() - {"load", "model"}):
            raw.note(meaning, f"ref.{key}={format_value(raw.sections['ref'][key])}")
    used_models = set()
    read_keys = {*TrainingConfig.model_fields}
    for role in CONFIGURED:
        values = payload[role.value] or {}
        if "model" in values:
            used_models.add(str(values["model"]))
            read_keys.update(keys_of(role.value))
    for name, values in raw.sections["model"].items():
        section = f"model.{name}"
        allowed = keys_of(section)
        for key in sorted(values.keys() - allowed.keys()):
            path = raw.user_key(f"{section}.{key}")
            raw.problems.append(unknown_key(section, key, allowed, path))
        if name in used_models:
            _note_keys_without_reader(raw, section, values, read_keys)
    _note_keys_without_reader(raw, "training", raw.sections["training"], read_keys)


def _note_keys_without_reader(
    raw: RawConfig, section: str, values: Tree, read_keys: Container[str]
) -> None:
    for key in sorted(values.keys() & SHARED.keys()):
        if key not in read_keys:
            setting = f"{section}.{key}={format_value(values[key])}"
            raw.note("no role of this run reads it", setting)


def _set_stage_defaults(training: Tree, algorithm: Tree, actor: Tree) -> None:
    """Set absent keys to the defaults for the stage, the estimator and the policy loss."""
    seq_length = training.get("seq_length")
    prompt_length = actor.get("max_prompt_length", 512)
    # Where a length is no integer, which pydantic reports, 1 stands in.
    max_new_tokens = 1
    if type(seq_length) is type(prompt_length) is int:
        max_new_tokens = max(seq_length - prompt_length, 1)
    set_default(actor, max_new_tokens=max_new_tokens)
    stage = training.get("stage")
    if stage in WITHOUT_CRITIC:
        set_default(actor, do_sample=True)  # several greedy responses would be the same
    if stage == Stage.RAY_ONLINE_DPO.value:
        set_default(actor, n_samples_per_prompt=2)
        return
    if stage == Stage.RAY_GRPO.value:
        set_default(algorithm, adv_estimator=AdvEstimator.GRPO.value)
    if actor.get("policy_loss") in ("gspo", "geo_mean"):
        set_default(algorithm, loss_normalizer=LossNormalizer.SEQUENCE_MEANS.value)
    if actor.get("policy_loss") == "gspo" and actor.get("clip_ratio") is None:
        # arXiv:2507.18071, 5.1: the ratio is of a response.
        set_default(actor, clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    traits = TRAITS.get(str(algorithm.get("adv_estimator")))
    if traits is not None:
        if not traits.whitens:
            set_default(algorithm, advantage_whiten=AdvantageWhiten.NONE.value)
        set_default(algorithm, **traits.defaults)
    if algorithm.get("kl_in") == "loss":
        set_default(algorithm, kl_penalty=KlPenalty.LOW_VAR_KL.value)


def _set_correction(payload: Tree) -> None:
    """Correct for samples of older weights (decoupled PPO). An explicit null stays, as an error."""
    algorithm = payload["algorithm"]
    staleness = payload["rollout"].get("max_staleness")
    runs_ahead = type(staleness) is int and staleness > 0
    has_ratio = payload["training"].get("stage") != Stage.RAY_ONLINE_DPO.value
    if runs_ahead and has_ratio and algorithm.get("old_log_probs") != OldLogProbs.ROLLOUT.value:
        algorithm.setdefault("rollout_is_threshold", 2.0)


def _problems_of(errors: list[ErrorDetails], raw: RawConfig) -> Iterator[Problem]:
    """Yield a problem for each pydantic error, with the key as the user wrote it."""
    for error in errors:
        names = [str(name) for name in error["loc"] if name != "[key]"]
        path = ".".join(names)
        if error["type"] == "value_error":  # broken rules of a section
            for problem in error["ctx"]["error"].problems:
                yield problem.rename_keys(
                    lambda key, section=path: raw.user_key(f"{section}.{key}")
                )
        elif error["type"] == "extra_forbidden":
            *parents, key = [name for name in names if name != "architecture"]
            section = ".".join(parents)
            yield unknown_key(section, key, keys_of(section), raw.user_key(path))
        elif names[-1] not in ("architecture", "model"):  # a missing model is reported already
            written = raw.user_key(path)
            field = find_field(written.split("."))
            yield explain(written, error, (field and field.description) or "")
