"""Check files, data and weights of a run before a worker starts; needs no device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.driver_state import (
    check_checkpoints,
    check_train_iters,
    find_newest_checkpoint,
)
from mindspeed_rlxf.checkpoint.exports import check_save_folders
from mindspeed_rlxf.cluster import environment
from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.hf_config import OF_WEIGHTS, find_disagreements, read_hf_config
from mindspeed_rlxf.config.problems import Problem, UserError, closest
from mindspeed_rlxf.config.schema import RewardConfig, RoleConfig, RunConfig
from mindspeed_rlxf.data.fixed_responses import FixedResponses, load_fixed_responses
from mindspeed_rlxf.data.indexed_prompts import IndexedPrompts, load_indexed_prompts
from mindspeed_rlxf.data.prompt_store import reward_style
from mindspeed_rlxf.data.prompts import Prompt, load_prompts
from mindspeed_rlxf.data.tokenizer import (
    check_vocabulary,
    describe_stop_tokens,
    eos_token_ids,
    load_tokenizer,
)
from mindspeed_rlxf.models.parameter_counts import HEADS
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.reporting import trackers
from mindspeed_rlxf.rewards.classifier import check_classifier
from mindspeed_rlxf.rewards.manager import RewardManager
from mindspeed_rlxf.rewards.plans import (
    check_functions,
    find_idle_sources,
    needs_processes,
    rule_decides,
    scores_row,
    try_sandbox,
)
from mindspeed_rlxf.rollout.rollout_engine import ENGINES, NATIVE
from mindspeed_rlxf.trainer.prompt_source import PromptSource, find_order_problems
from mindspeed_rlxf.weights.boxes import BoxedWeights
from mindspeed_rlxf.weights.folders import check_side_files, find_description, open_weights
from mindspeed_rlxf.weights.hf_folder import shape_problems

T = TypeVar("T")
TINY_MODELS = ("outputs", "tiny", "models")  # of examples/tiny/make.py
MAX_SHAPE_PROBLEMS = 3  # of one folder: the first few show which model it is

UNNAMED = "unnamed"
"""Data source of rows without one that a model scores."""


@dataclass
class Prepared:
    """Inputs of a run that the driver has read and checked before the start."""

    tokenizer: Any = None
    eos_token_ids: tuple[int, ...] = ()
    train_prompts: Sequence[Prompt] = ()
    val_prompts: Sequence[Prompt] = ()
    fixed_responses: FixedResponses | None = None
    scores_in_processes: bool = False  # by functions or slow rules, see `rewards.workers`
    sandbox: list[str] = field(default_factory=list)  # a line about its level and weaknesses
    notices: list[str] = field(default_factory=list)  # printed before the run


def prepare(config: RunConfig) -> Prepared:
    """Load tokenizer, prompts and fixed responses; check all files that the run reads or writes.

    Writes nothing but temporary files for the prompts (`PromptStore`); may run a program in the
    sandbox. Errors: UserError with all problems. Where the tokenizer cannot be loaded, these are
    the problems found before it and the prompt files that are missing.
    """
    directory = RunDirectory.choose(config)
    problems = [
        *RunDirectory.check(config),
        *environment.find_problems(config.device.kind, config.pool_settings.env),
        *check_train_iters(config, find_newest_checkpoint(config, directory)),
        *check_checkpoints(config, directory),
    ]
    if not config.validation.only:
        problems += check_save_folders(config, directory)
    for role in config.roles:
        problems += check_weights(config, role)
    problems += [*_check_engine(config), *trackers.find_problems(config.logging.trackers)]
    actor, described, prepared = config.actor_rollout, _find_config_folder(config), Prepared()
    prepared.tokenizer = _attempt(
        problems, lambda: load_tokenizer(config.training.tokenizer_name_or_path)
    )
    if prepared.tokenizer is None:  # nothing can be tokenized, but missing files can be reported
        raise UserError(problems + _find_missing_files(config))
    problems += check_vocabulary(prepared.tokenizer, actor.architecture.vocab_size)
    data = config.data
    training = _load_prompts(config, prepared, data.train_files, data.data_path, problems)
    validation = _load_prompts(config, prepared, data.val_files, data.val_data_path, problems)
    prepared.train_prompts = training.prompts
    prepared.val_prompts = validation.prompts[: config.validation.max_samples]
    data_stops = sorted({*training.stop_token_ids, *validation.stop_token_ids})
    stop_ids = sorted({*actor.stop_token_ids, *data_stops})
    found = _attempt(problems, lambda: eos_token_ids(prepared.tokenizer, described, stop_ids))
    prepared.eos_token_ids = found or ()
    problems += _check_eos_ids(prepared.eos_token_ids, actor.architecture.vocab_size)
    problems += _check_rewards(config, prepared)
    problems += _check_best_metric(config, prepared)
    prepared.fixed_responses = _attempt(problems, lambda: _load_fixed_responses(config, prepared))
    problems += _check_order(config, prepared, directory)
    if problems:
        raise UserError(problems)
    stops = describe_stop_tokens(prepared.tokenizer, described, data_stops, actor.stop_token_ids)
    prepared.notices = [stops, *prepared.sandbox, *_list_notices(config)]
    reward = config.reward
    if reward.rules or any(part.data_sources for part in reward.parts):
        prepared.notices += find_idle_sources(reward, _sources(prepared))
    return prepared


def _sources(prepared: Prepared) -> set[str]:
    prompts = chain(prepared.train_prompts, prepared.val_prompts)
    return {prompt.data_source for prompt in prompts}


def _find_config_folder(config: RunConfig) -> str | None:
    """Return the folder whose generation_config.json the actor uses; None without `load`.

    It is `load`, or the tokenizer's folder where Megatron weights have no config.json. Where the
    weights cannot be described, `load`, without an error.
    """
    load = config.actor_rollout.load
    try:
        return load and str(find_description(load, config.training.tokenizer_name_or_path))
    except ValueError:  # reported with the weights
        return load


def _list_notices(config: RunConfig) -> list[str]:
    """Return notes for the user on valid settings, one per case, [] for none.

    Cases: greedy sampling, top-k or top-p, stop strings, a critic without a score head. Opens the
    critic's folder, which must have been checked.
    """
    actor, notices = config.actor_rollout, []
    if not actor.do_sample:
        notices.append("actor_rollout.do_sample=false: greedy responses do not explore")
    if actor.do_sample and (actor.top_k or actor.top_p < 1.0):
        notices.append(
            "actor_rollout.top_k/top_p filter the sampled tokens; log-probs are of the unfiltered "
            "distribution"
        )
    if actor.stop_strings:
        shown = ", ".join(map(repr, actor.stop_strings))
        notices.append(f"responses also end with the text: {shown}")
    if config.critic and "score.weight" not in _open_weights(config.critic):
        notices.append(f"critic.load={config.critic.load} has no score head: it starts untrained")
    return notices


def _open_weights(section: RoleConfig) -> BoxedWeights:
    assert section.load is not None and section.architecture is not None, "checked beforehand"
    return open_weights(section.load, section.architecture, section.trust_files)


def _attempt(problems: list[Problem], action: Callable[[], T]) -> T | None:
    """Return the result of `action`; on a UserError add its problems to `problems`, return None."""
    try:
        return action()
    except UserError as error:
        problems += error.problems
        return None


def _check_engine(config: RunConfig) -> list[Problem]:
    """Return a problem if the rollout engine is unknown, or cannot run in a split pool."""
    key, name, known = "rollout.engine", config.rollout.engine, [NATIVE, *ENGINES]
    if name not in known:
        remedy = f"use {closest(name, known) or NATIVE}, or add its file to training.plugins"
        return [Problem(key, f"must be one of {', '.join(known)}", name, remedy)]
    if name != NATIVE and config.parts:
        rule = "cannot generate on ranks of its own (num_gpus_for_infer)"
        return [Problem(key, rule, name, f"use {NATIVE}, or remove num_gpus_for_infer")]
    return []


def _check_eos_ids(eos_token_ids: tuple[int, ...], vocab_size: int) -> list[Problem]:
    rule, remedy = f"must be below vocab_size={vocab_size}", "correct actor_rollout.stop_token_ids"
    remedy += ", or the generation_config.json of actor_rollout.load"
    return [Problem(f"EOS id {i}", rule, remedy=remedy) for i in eos_token_ids if i >= vocab_size]


def _find_missing_files(config: RunConfig) -> list[Problem]:
    """Return a problem for each of `data.train_files` and `data.val_files` that does not exist."""
    data = config.data
    keys = {"data.train_files": data.train_files, "data.val_files": data.val_files}
    return [
        Problem(key, "no such file", name, "correct the path", colon=True)
        for key, names in keys.items()
        for name in names
        if not Path(name).exists()
    ]


def _load_prompts(
    config: RunConfig,
    prepared: Prepared,
    files: tuple[str, ...],
    prefixes: tuple[str, ...],
    problems: list[Problem],
) -> IndexedPrompts:
    """Load the prompts of the indexed data sets `prefixes` if there are any, else of `files`.

    Only for indexed data sets has the result stop tokens. Appends load errors to `problems`; the
    result is empty then.
    """
    data = config.data
    if config.reward.kind is not RewardKind.RULE and data.default_data_source is None:
        data = data.model_copy(update={"default_data_source": UNNAMED})  # a model needs none
    arguments = prepared.tokenizer, data, config.actor_rollout.max_prompt_length
    if prefixes:
        indexed = _attempt(problems, lambda: load_indexed_prompts(prefixes, *arguments))
        return indexed or IndexedPrompts()
    return IndexedPrompts(_attempt(problems, lambda: load_prompts(files, *arguments)) or ())


def check_weights(config: RunConfig, role: Role) -> list[Problem]:
    """Return problems of a role's `load` folder: not set, missing, damaged, of another model.

    [] for a rule reward, which needs none; of a Hugging Face classifier those that
    `check_classifier` finds. Reads headers only.
    """
    section = config.role(role)
    if role is Role.REWARD and config.reward.kind is RewardKind.RULE:
        return []
    if role is Role.REWARD and config.reward.kind is RewardKind.HUGGING_FACE:
        return check_classifier(config.reward.load)
    key = f"{role.value}.load"
    if section.load is None:
        return [
            Problem(
                key,
                "must name a folder of weights, Hugging Face's or Megatron's",
                remedy=f"set {key}=FOLDER",
            )
        ]
    try:
        rules, remedy = _find_broken_rules(section, role, config.training.tokenizer_name_or_path)
    except ValueError as error:
        rules, remedy = [str(error)], _suggest_tiny_model(Path(section.load))
    return [Problem(key, rule, section.load, remedy, colon=True) for rule in rules]


def _suggest_tiny_model(folder: Path) -> str:
    """Return advice with the command that makes the missing tiny model `folder`.

    "" if the folder exists or does not lie in TINY_MODELS. The name "rm" adds --reward-model.
    """
    if folder.exists() or folder.parts[-4:-1] != TINY_MODELS:
        return ""
    more = " --reward-model" if folder.name == "rm" else ""
    return f"or make the tiny one with `python examples/tiny/make.py{more}`"


def _find_broken_rules(section: RoleConfig, role: Role, tokenizer: str) -> tuple[list[str], str]:
    """Return a text for each way in which a role's weights differ from its model, and one remedy.

    One text if config.json differs, else one per tensor of another shape: MAX_SHAPE_PROBLEMS, then
    one with the number of others. [] if they agree; a critic's folder may lack the score head.
    tokenizer: folder with config.json if the weights have none
    Errors: ValueError where a file is missing or cannot be read.
    """
    assert section.load is not None and section.architecture is not None
    head = HEADS[role]
    described = find_description(section.load, tokenizer)
    check_side_files(described)
    hf_config = read_hf_config(described, OF_WEIGHTS)
    differing = find_disagreements(section.architecture, hf_config, scored=head is Head.SCORE)
    if differing:
        fields = f"(field: model.{section.model}, config.json): {'; '.join(differing)}"
        return [
            f"config.json must agree with the model YAML {fields}"
        ], "correct the YAML or give the folder of that model"
    folder = _open_weights(section)  # a Megatron folder is read by the config.json checked above
    expected = hf_shapes(section.architecture, head)
    if role is Role.CRITIC and "score.weight" not in folder:
        del expected["score.weight"]  # a language model; the head starts untrained
    found = shape_problems(folder, expected)
    shown = found[:MAX_SHAPE_PROBLEMS]
    if len(found) > len(shown):
        shown.append(f"and {len(found) - len(shown)} more tensors")
    return shown, f"give the folder of model.{section.model}"


def _load_fixed_responses(config: RunConfig, prepared: Prepared) -> FixedResponses | None:
    """Load the fixed responses, which must include every sample of the run; None if not configured.

    Errors: UserError with all problems of the file.
    """
    actor = config.actor_rollout
    if actor.fixed_responses is None:
        return None
    return load_fixed_responses(
        actor.fixed_responses,
        prepared.tokenizer,
        prepared.eos_token_ids,
        actor.architecture.vocab_size,
        actor.max_new_tokens,
        config.training.train_iters * config.samples_per_iteration,
    )


def _check_order(config: RunConfig, prepared: Prepared, directory: RunDirectory) -> list[Problem]:
    """Return a problem if fixed responses do not belong to the prompts that the run will draw.

    [] without fixed responses or prompts. A resumed run is checked from its newest checkpoint on,
    unless its data or seed have changed, which is reported on resuming.
    """
    if prepared.fixed_responses is None or not prepared.train_prompts:
        return []
    source, done = PromptSource.from_config(config, prepared.train_prompts), 0
    if newest := find_newest_checkpoint(config, directory):
        state, done = newest.state, newest.checkpoint.iteration
        try:
            source.load_state_dict(state["trainer"]["prompts"])
        except ValueError:  # other data or seed than those of the run: reported when it resumes
            return []
    remaining = config.training.train_iters - done
    return find_order_problems(prepared.fixed_responses, source, remaining)


def _check_rewards(config: RunConfig, prepared: Prepared) -> list[Problem]:
    """Return problems of the reward rules and functions, alone and with the prompts they score.

    Stops at the first kind that has any: rules that cannot be made and the sandbox, then the
    functions, then the prompts. Sets `sandbox` and `scores_in_processes` of `prepared` on the way.
    May run a program in the sandbox.
    """
    try:
        manager = RewardManager(dict(config.reward.rules), config.verifiers)
        if line := try_sandbox(config.reward):
            prepared.sandbox = [line]
    except UserError as error:
        return error.problems
    reward, parts = config.reward, (prepared.train_prompts, prepared.val_prompts)
    if problems := list(check_functions(reward)):
        return problems
    by_rule = reward.kind is RewardKind.RULE
    validates_by_rule = by_rule or config.validation.reward is RewardKind.RULE
    validated = prepared.val_prompts if validates_by_rule else ()
    scored = chain(*parts) if by_rule else validated
    prepared.scores_in_processes = needs_processes(reward, {p.data_source for p in scored})
    by_label = (p for p in prepared.train_prompts if scores_row(reward, p.extra_info))
    prepared.scores_in_processes |= reward.chooses_by_label and any(True for _ in by_label)
    if reward.parts:
        found = manager.check(
            p
            for p in chain(*parts)
            if scores_row(reward, p.extra_info)
            and rule_decides(reward, p.data_source, reward_style(p.extra_info))
        )
        return found if by_rule else [*found, *_find_unscored_sources(reward, validated)]
    if by_rule:
        return manager.check(chain(*parts))
    if reward.chooses_by_label and (
        found := manager.check(p for p in parts[0] if scores_row(reward, p.extra_info))
    ):
        return found
    remedy = "use validation.reward=model"
    return [replace(p, remedy=f"{p.remedy}, or {remedy}") for p in manager.check(validated)]


def _find_unscored_sources(reward: RewardConfig, validated: Sequence[Prompt]) -> Iterator[Problem]:
    """Yield a problem for each data source of `validated` that no function of the reward scores."""
    sources = dict.fromkeys(prompt.data_source for prompt in validated)
    for source in sources:
        if not any(part.applies_to(source) for part in reward.parts):
            yield Problem(
                f"data source {source!r}",
                "of the validation prompts must have a function in reward.functions, as "
                "validation.reward=rule leaves out the model",
                remedy="add one for it, or use validation.reward=model",
            )


def _check_best_metric(config: RunConfig, prepared: Prepared) -> list[Problem]:
    """Return [problem] if `best_metric` names a data source that no validation prompt has.

    [] otherwise, and where it names no source or there are no validation prompts.
    """
    metric = config.validation.best_metric
    source = metric.removeprefix("val/").rpartition("/")[0]
    known = list(dict.fromkeys(prompt.data_source for prompt in prepared.val_prompts))
    if not known or not source or source in known:
        return []
    rule = f"must be a metric of a data source of the validation prompts ({', '.join(known)})"
    near = closest(source, known) or known[0]
    remedy = f"use val/{near}/{metric.rpartition('/')[2]}"
    return [Problem("validation.best_metric", rule, metric, remedy)]
