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
    OF_WEIGHTS,
    approximate_architecture,
    find_unsupported,
    parse_architecture,
    read_hf_config,
)
from mindspeed_rlxf.config.keys import (
    PLAIN_SECTIONS,
    ROLE_SECTIONS,
    ROLES,
    SHARED,
    WITHOUT_CRITIC,
    WITHOUT_MODEL,
    Given,
    Tree,
    find_field,
    keys_of,
    set_default,
    unknown_key,
)
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
    multiples_around,
    ref,
    use,
)
from mindspeed_rlxf.config.ray_cluster import choose_cluster
from mindspeed_rlxf.config.schema import (
    ArchitectureConfig,
    DeviceConfig,
    LearningConfig,
    PoolSettings,
    RunConfig,
    TrainingConfig,
)
from mindspeed_rlxf.config.section_rules import check_host, check_sections
from mindspeed_rlxf.config.unused import note_unused

AUTO = "auto"
"""A role's `model` that takes the architecture from config.json in its `load` folder."""

DATA_FILES = ("train_files", "val_files")
MAX_DEVICES = 100_000
AGENT_SLICE_STEPS = 32
"""Default of `rollout.slice_steps` with agents, whose turns are short."""


def resolve(tree: Mapping[str, Any] | Given, name: str) -> RunConfig:
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
    tree: Mapping[str, Any] | Given, name: str, overrides: Sequence[str] = ()
) -> tuple[RunConfig, list[str]]:
    """Return the configuration, and lines about legal but surprising keys; see `resolve`.

    `overrides` are those of the command line, which the tree has already: one that chooses FSDP
    resets keys of the YAML that only Megatron has.
    """
    raw_config = tree if isinstance(tree, Given) else Given(tree)
    reset_megatron_keys(raw_config, overrides)
    return resolve_given(raw_config, name)


def resolve_given(given: Given, name: str) -> tuple[RunConfig, list[str]]:
    """Return the configuration and notes for keys that are ours already; see `resolve`."""
    payload = _build(given, name)
    try:
        config = RunConfig.model_validate(payload)
        if not given.problems:
            _check(config, given)
    except ValidationError as error:
        given.problems += _problems_of(error.errors(include_url=False), given)
    if given.problems:
        _add_missing_files(given)
        # Without repeats, as of a key that several roles share.
        by_text = {str(problem): problem for problem in given.problems}
        raise ConfigError(list(by_text.values()))
    return config, given.list_notes()


def _add_missing_files(given: Given) -> None:
    """Add the run's other missing files, if one that is read first is missing."""
    reported = {problem.key for problem in given.problems if isinstance(problem, MissingFile)}
    if reported:
        missing = find_missing_files(given)
        given.problems += [problem for problem in missing if problem.key not in reported]


def find_missing_files(given: Given) -> list[MissingFile]:
    """Return a problem for each file or folder of `named_files` that is not there."""
    problems: list[MissingFile] = []
    for key, path in named_files(given):
        if not os.path.exists(path):
            problems.append(MissingFile(given.written(key), "must exist", path, "correct the path"))
    return problems


def named_files(given: Given) -> list[tuple[str, str]]:
    """Return (key, absolute path) of the weights, the tokenizer and the data files."""
    values: list[tuple[str, Any]] = []
    for role in CONFIGURED:
        values.append((f"{role.value}.load", given.value(role.value, "load")))
    tokenizer = given.sections["training"].get("tokenizer_name_or_path")
    values.append(("training.tokenizer_name_or_path", tokenizer))
    for key in DATA_FILES:
        files = given.sections["data"].get(key)
        for file in files if isinstance(files, list) else [files]:
            values.append((f"data.{key}", file))
    return [
        (key, os.path.abspath(os.path.expanduser(file)))
        for key, file in values
        if isinstance(file, str)
    ]


def find_wrong_values(given: Given) -> list[Problem]:
    """Return the problems of single values; `resolve` finds more, and reads models for it."""
    reward = {key: v for key, v in given.sections["reward"].items() if key != "function"}
    try:
        RunConfig.model_validate({**given.sections, "reward": reward})
    except ValidationError as error:
        # Keys that are absent or unknown, and rules between keys, are for `resolve`.
        ignored = ("missing", "extra_forbidden", "value_error")
        errors = [e for e in error.errors(include_url=False) if e["type"] not in ignored]
        return [*_problems_of(errors, given)]
    return []


def _check(config: RunConfig, given: Given) -> None:
    """Add problems between sections, host problems, unused keys and notes to `given`."""
    # A dry run checks the host after it has printed its plan: see `cli.train`.
    problems = list(check_sections(config))
    if not config.dry_run:
        problems += check_host(config)
    given.problems += [problem.rename_keys(given.written) for problem in problems]
    note_unused(config, given)
    save_interval = config.training.save_interval
    train_iters = config.training.train_iters
    if save_interval > train_iters:
        given.note(
            "checkpoints are saved by training.save_interval_s only, and at the end",
            f"training.save_interval={save_interval} is over training.train_iters={train_iters}",
        )
    if config.shared_save is not None:
        given.note(
            "weights go to its subfolders actor and critic",
            f"actor_rollout.save and critic.save are one folder, {config.shared_save}",
        )


def _build(given: Given, name: str) -> Tree:
    """Return plain values in RunConfig's shape, with derived defaults filled in."""
    sections = given.sections
    payload: Tree = {"name": name, "dry_run": sections["dry_run"]}
    payload |= {section: sections[section] for section in PLAIN_SECTIONS}
    # Keys of roles, which `training` holds as their defaults.
    role_keys = SHARED.keys() - TrainingConfig.model_fields.keys()
    training = {key: v for key, v in sections["training"].items() if key not in role_keys}
    payload["training"] = training
    set_default(training, run_name=name)
    set_default(training, output_dir=os.path.join("outputs", str(training["run_name"])))
    read_entries(given.problems, "training.plugins", training, complete_plugin)
    read_entries(given.problems, "rollout.tools", payload["rollout"], complete_tool)
    read_entries(given.problems, "rollout.program", payload["rollout"], complete_program)
    stage = training.get("stage")
    if stage in WITHOUT_CRITIC:
        payload["critic"] = None
        if sections["critic"]:
            remedy = "remove the section critic ('~critic' on the command line)"
            given.problems.append(Problem("training.stage", "has no critic", stage, remedy))
    sections["ref"].setdefault("load", given.value("actor_rollout", "load"))
    _choose_engines(given, payload)
    for role in CONFIGURED:
        if role.value not in payload:
            payload[role.value] = _build_role(given, role)
    _set_stage_defaults(training, payload["algorithm"], payload["actor_rollout"])
    _set_correction(payload)
    if any(payload["rollout"].get(name) for name in ("agent", "tools", "program")):
        set_default(payload["rollout"], slice_steps=AGENT_SLICE_STEPS)
    _place_roles(given, payload)
    _note_unread(given, payload)
    return payload


def _choose_engines(given: Given, payload: Tree) -> None:
    """Give the reference the actor's training engine, and an FSDP actor a rollout engine."""
    backend = given.value("actor_rollout", "backend")
    if backend is None:
        return
    given.sections["ref"].setdefault("backend", backend)
    if backend == "fsdp":
        set_default(payload["rollout"], engine="transformers")


def _build_role(given: Given, role: Role) -> Tree:
    """Return a role's values: model < training < own, with the architecture nested."""
    section = given.sections[role.value]
    training = given.sections["training"]
    if role is Role.REWARD:
        if section.get("verifier") is True:
            set_default(section, kind=RewardKind.RULE.value)
        read_entries(given.problems, "reward.function", section, complete_function)
        read_entries(given.problems, "reward.functions", section, complete_function)
        if str(section.get("kind")) in WITHOUT_MODEL:
            return _build_reward_without_model(given)
    model = given.model_of(role.value)
    architecture = _read_architecture(given, role, model)
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


def _build_reward_without_model(given: Given) -> Tree:
    """Return the values of a reward that runs no Megatron model, and note keys of models."""
    section = given.sections["reward"]
    training = given.sections["training"]
    kind = section["kind"]
    read_keys = WITHOUT_MODEL[str(kind)]
    for key in sorted(section.keys() & keys_of("reward").keys() - {*read_keys}):
        value = format_value(section.pop(key))
        given.note(f"no effect with reward.kind={kind}", f"reward.{key}={value}")
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


def _read_architecture(given: Given, role: Role, model: Any) -> Tree | None:
    """Return the keys from the role's model, or the architecture in config.json under its `load`.

    Without either, reports a problem and returns None.
    """
    models = given.sections["model"]
    load = given.value(role.value, "load")
    if model != AUTO and str(model) in models:
        return dict(models[str(model)])
    if model != AUTO:
        key = given.written(f"{role.value}.model")
        guess = closest(str(model), models)
        remedy = f"did you mean {guess}?" if guess else "add it to the defaults list, or use auto"
        if model is None:
            given.problems.append(Problem(key, "is required", None, remedy))
        else:
            given.problems.append(Problem(key, "is no loaded model", repr(model), remedy))
        return None
    try:
        if not isinstance(load, str):
            raise ValueError("must name a folder with config.json with model=auto; set it")
        folder = Path(os.path.expanduser(load))
        if given.value(role.value, "backend") == "fsdp":
            return approximate_architecture(folder)
        config = read_hf_config(folder, OF_WEIGHTS)
        unsupported = find_unsupported(config)
        if unsupported:
            rule = "config.json must ask for a known model (field: possible, config.json)"
            raise ValueError(f"{rule}: {'; '.join(unsupported)}; use another model")
        return {k: value for k, value in parse_architecture(config).items() if value is not None}
    except ValueError as error:
        is_missing = isinstance(load, str) and not Path(os.path.expanduser(load)).is_dir()
        kind = MissingFile if is_missing else Problem
        key = given.written(f"{role.value}.load")
        given.problems.append(kind(key, str(error), f"{load}", colon=True))
        return None


def _place_roles(given: Given, payload: Tree) -> None:
    """Set `resource_pool`, `placement` and `pool_settings` in the payload.

    A role without a placement gets the pool with its name, else the only pool. A rule needs no
    devices and shares a pool. A reference is placed only if something reads its log-probs.
    """
    pools = _read_pools(given, payload)
    roles = [role.value for role in CONFIGURED if payload[role.value] is not None]
    chosen = dict(given.sections["placement"])
    for name in sorted(chosen.keys() - {*roles}):
        remedy = "remove it ('~placement.critic' on the command line)"
        absent = Problem("placement.critic", "has no place in this stage", remedy=remedy)
        unknown = unknown_key("placement", name, roles)
        given.problems.append(absent if name == Role.CRITIC.value else unknown)
        del chosen[name]
    placement = {}
    for role in roles:
        shares_only_pool = len(pools) == 1 and role not in pools
        placement[role] = next(iter(pools)) if shares_only_pool else role
    placement |= chosen
    if _trains_adapters(payload):
        placement["ref"] = chosen.get("ref", placement["actor_rollout"])
    control = payload["algorithm"].get("kl_ctrl")
    has_penalty = not (isinstance(control, dict) and control.get("kl_coef") == 0)
    is_dpo = payload["training"].get("stage") == Stage.RAY_ONLINE_DPO.value
    reads_reference = has_penalty or is_dpo or payload["logging"].get("reference_kl") is True
    if not reads_reference:
        pool = placement.pop(Role.REF.value)
        meaning = "no reference runs (logging.reference_kl=true keeps it, for the metric critic/kl)"
        given.note(meaning, "algorithm.kl_ctrl.kl_coef=0")
        if isinstance(pool, str) and pool in pools and pool not in placement.values():
            size = format_value(pools.pop(pool))
            given.note("not used, as no reference runs", f"resource_pool.{pool}={size}")
    section = given.sections["resource_pool"]
    settings = {key: section.get(key) for key in PoolSettings.model_fields}
    payload["pool_settings"] = {key: v for key, v in settings.items() if v is not None}
    payload |= {"resource_pool": pools, "placement": placement}
    kinds_of_models = [kind for kind in RewardKind if kind is not RewardKind.RULE]
    # An unknown value counts as a rule, so that no second problem is reported for it.
    if payload["reward"].get("kind") not in (None, *kinds_of_models):
        _place_rule(given, payload, "reward" in chosen)


def _trains_adapters(payload: Tree) -> bool:
    lora = payload[Role.ACTOR_ROLLOUT.value].get("lora")
    return isinstance(lora, dict) and lora.get("rank", 0) != 0


def _place_rule(given: Given, payload: Tree, is_placed: bool) -> None:
    """Place a rule on the actor's pool, or on another pool if placement is disaggregated.

    A placement in the YAML or a pool named `reward` has precedence. Notes a pool used by the rule
    only.
    """
    pools = payload["resource_pool"]
    placement = payload["placement"]
    pool = placement.pop("reward")
    if not is_placed and "reward" not in pools:
        pool = placement["actor_rollout"]
        is_split = payload[Role.ACTOR_ROLLOUT.value].get("num_gpus_for_infer") is not None
        if is_split:
            pool = placement.get("ref", placement.get("critic", pool))
    if isinstance(pool, str) and pool in pools and pool not in placement.values():
        meaning = "no role computes on its devices, as a rule needs none (reward.kind=rule)"
        given.note(meaning, f"resource_pool.{pool}")
    placement["reward"] = pool


def _read_pools(given: Given, payload: Tree) -> dict[str, list[int]]:
    """Return each pool's processes per node, without empty pools.

    On a joined cluster a count above `device.devices_per_node` fills whole hosts.
    """
    pools: dict[str, list[int]] = {}
    num_problems_before = len(given.problems)
    runtime = payload["runtime"]
    joins = runtime.get("kind") != "local" and choose_cluster(runtime.get("address")).address
    per_node = payload["device"].get("devices_per_node", DeviceConfig().devices_per_node)
    for spelled, size in given.sections["resource_pool"].items():
        # Keys are names of the user's choice, but for dashes in those of roles.
        underscored = str(spelled).replace("-", "_")
        name = underscored if underscored in ROLES else str(spelled)
        key = f"resource_pool.{name}"
        sizes = size if isinstance(size, list) else [size]
        if name in PoolSettings.model_fields:
            continue
        if not all(type(count) is int and 0 < count <= MAX_DEVICES for count in sizes):
            rule = f"must be a number of devices from 1 to {MAX_DEVICES}, or one for each node"
            given.problems.append(Problem(key, rule, repr(size), "use 1 or [8, 8]"))
        elif joins and type(size) is type(per_node) is int and size > per_node > 0:
            pools[name] = [per_node] * (size // per_node)
            if size % per_node:
                rule = f"must fill whole hosts of {per_node} devices"
                remedy = f"{use(multiples_around(size, per_node))}, or give one for each host"
                rule += f" ({ref('device.devices_per_node')})"
                given.problems.append(Problem(key, rule, size, remedy))
        elif sizes:
            pools[name] = sizes
    if not pools and len(given.problems) == num_problems_before:
        given.problems.append(
            Problem("resource_pool", "is required", remedy="name a pool: `main: 2`")
        )
    return pools


def _note_unread(given: Given, payload: Tree) -> None:
    """Report unknown model keys, and note keys without a reader in this run."""
    if _trains_adapters(payload):
        meaning = "no effect with actor_rollout.lora, where the reference is the actor's model"
        for key in sorted(given.sections["ref"].keys() - {"load", "model"}):
            given.note(meaning, f"ref.{key}={format_value(given.sections['ref'][key])}")
    used_models = set()
    read_keys = {*TrainingConfig.model_fields}
    for role in CONFIGURED:
        values = payload[role.value] or {}
        if "model" in values:
            used_models.add(str(values["model"]))
            read_keys.update(keys_of(role.value))
    for name, values in given.sections["model"].items():
        section = f"model.{name}"
        allowed = keys_of(section)
        for key in sorted(values.keys() - allowed.keys()):
            path = given.written(f"{section}.{key}")
            given.problems.append(unknown_key(section, key, allowed, path))
        if name in used_models:
            _note_keys_without_reader(given, section, values, read_keys)
    _note_keys_without_reader(given, "training", given.sections["training"], read_keys)


def _note_keys_without_reader(
    given: Given, section: str, values: Tree, read_keys: Container[str]
) -> None:
    for key in sorted(values.keys() & SHARED.keys()):
        if key not in read_keys:
            setting = f"{section}.{key}={format_value(values[key])}"
            given.note("no role of this run reads it", setting)


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


def _problems_of(errors: list[ErrorDetails], given: Given) -> Iterator[Problem]:
    """Yield a problem for each pydantic error, with the key as the user wrote it."""
    for error in errors:
        names = [str(name) for name in error["loc"] if name != "[key]"]
        path = ".".join(names)
        if error["type"] == "value_error":  # broken rules of a section
            for problem in error["ctx"]["error"].problems:
                yield problem.rename_keys(
                    lambda key, section=path: given.written(f"{section}.{key}")
                )
        elif error["type"] == "extra_forbidden":
            *parents, key = [name for name in names if name != "architecture"]
            section = ".".join(parents)
            yield unknown_key(section, key, keys_of(section), given.written(path))
        elif names[-1] not in ("architecture", "model"):  # a missing model is reported already
            written = given.written(path)
            field = find_field(written.split("."))
            yield explain(written, error, (field and field.description) or "")
